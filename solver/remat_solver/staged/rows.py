"""The program of one round: the relaxation for the present cuts with whatever rows have been found so far.

Rows (h) are of the memory while ops are recomputed: for an op k recomputed in coarse stage c. They hold for any number
of recomputations in any order. Let T_{c,v} = 1 if v is resident throughout c: at least if v was made before c by an op
that does not run in c, and is either resident when c ends or read by τ_c, the op whose first computation ends it. So

        T_{c,v} ≥ S_{c+1,v} − R_{c,p(v)},      T_{c,v} ≥ 1 − R_{c,p(v)}  where τ_c reads v
    (h) need(k) R_{c,k} + Σ_{v that k neither reads nor makes} M_v T_{c,v} ≤ capacity:

if k runs, all of this is resident while it does; if not, the sum is at most what is resident at any moment of c.

How far the memory is broken inside coarse stages, where the relaxation does not look, says where to cut next. Let t be
an op first computed in coarse stage c before its end τ_c. A value v is certainly resident while t runs if its maker
p(v) does not run (again) in c and either v is read by a first computation in t + 1 … τ_c, or v is resident when c ends:
then v has been resident without a break since before t. So with S' = S_{c+1,v} and R = R_{c,p(v)}

    x_v = 1 − R   if v is read by a first computation in t + 1 … τ_c,      else   S' − R

is at most the indicator of that, and need(t) + Σ M_v max(0, x_v) over the values made before t that t does not read
says how much memory t must have. (Ops first computed in c itself are taken not to run twice in c, which makes this an
estimate for them.) The same inequality can be written as a row instead of a cut at t: tried, it raised bounds less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field, replace

import numpy as np

from ..array_view import ArrayView, Ids
from ..deadline import never
from ..program import Builder, Floats, Names, Program, Term
from .relaxation import ONE, ZERO, Columns, Span, add_spans, held_at_end, left_at_cut, relax, values_of
from .scale import Scale

_TOLERANCE = 1e-3
"""The fraction of the capacity by which a solution may exceed it."""


def worst_op(view: ArrayView, columns: Columns, x: Floats) -> int | None:
    """The op inside a coarse stage whose first computation a solution, fractional or not, can afford least.

    None where it can afford all of them.
    """
    found: list[tuple[float, int]] = []
    made = view.maker + 1
    for c in range(1, columns.stages):
        first, end = int(columns.first[c]), int(columns.cuts[c])
        run = values_of(columns.runs[c], x)[view.maker]
        due = np.maximum(1.0 - run, 0.0) * view.size
        held = np.maximum(values_of(held_at_end(view, columns, c), x) - run, 0.0) * view.size
        last = np.full(view.values, -1)
        earlier = view.uses.op <= end
        np.maximum.at(last, view.uses.value[earlier], view.uses.op[earlier])
        # from the op after its maker on, a value is there: as one that is due before its last use, then as one held
        change = np.zeros(max(view.ops, end) + 2)
        np.add.at(change, made, due)
        np.add.at(change, np.maximum(last, made), held - due)
        read = (view.uses.op >= first) & (view.uses.op < end)
        op, value = view.uses.op[read], view.uses.value[read]
        inputs = np.bincount(op, np.where(op < last[value], due[value], held[value]), minlength=end)
        memory = np.cumsum(change)[first:end] - inputs[first:end] + view.need[first:end]
        excess = (memory - view.capacity) / max(view.capacity, 1)
        found += [(float(excess[i]), first + int(i)) for i in np.flatnonzero(excess > _TOLERANCE)]
    return max(found)[1] if found else None


_ALMOST = 0.1
"""Charged together with recomputations that break a row are those that would fill all but so much of the capacity."""
_MOST_CHARGED = 150
"""The rows (h) that one round adds to a coarse stage, which have up to as many entries as there are values."""


Recomputations = dict[int, set[int]]
"""Rows (h): the recomputations whose memory has a row, for each coarse stage by a stage that it holds."""


def add_to(known: Recomputations, more: Recomputations) -> bool:
    """Add recomputations to those that have a row, by stage; whether one of them is new."""
    new = False
    for stage, ops in more.items():
        known_ops = known.setdefault(stage, set())
        new |= not ops <= known_ops
        known_ops |= ops
    return new


def add_recomputations(
    view: ArrayView, columns: Columns, recomputations: Recomputations, builder: Builder, scale: Scale
) -> None:
    """Write rows (h)."""
    charged: Recomputations = {}
    for stage, ops in recomputations.items():
        charged.setdefault(columns.stage_of(stage), set()).update(ops)
    for c, ops in sorted(charged.items()):
        if c == 0:
            continue
        throughout, run = needed_to_end(view, columns, c), columns.runs[c][view.maker]
        # S_{c+1,v} itself where p(v) cannot run in c
        values = np.flatnonzero((throughout != ZERO) & (run >= 0))
        throughout[values] = through(c, values, throughout[values], (run[values],), builder)
        add_reruns(view, columns, c, ops, throughout, builder, scale)


def add_reruns(
    view: ArrayView, columns: Columns, c: int, ops: Set[int], throughout: Ids, builder: Builder, scale: Scale
) -> None:
    """Write the rows (h) of some ops of a coarse stage, with the columns of T_{c,v}."""
    for op in sorted(ops):
        run = columns.runs[c][op]
        if run < 0:
            continue
        others = throughout.copy()
        others[view.inputs(op)] = ZERO
        others[view.value_start[op] : view.value_start[op + 1]] = ZERO
        free = np.flatnonzero(others >= 0)
        room = view.capacity - int(view.size[others == ONE].sum())
        terms = [
            Term(0, run, scale.weights(view.need[op : op + 1])),
            Term(0, others[free], scale.weights(view.size[free])),
        ]
        builder.add_rows(1, terms, upper=scale.room(room), name=("rerun", c, op))


def through(c: int, values: Ids, hold: Ids, brought: Iterable[Ids], builder: Builder, *, integer: bool = True) -> Ids:
    """New columns, of T_{c,v} of some values: at least `hold`, the need until c ends, less what brings one in c."""
    column = builder.variables(len(values), integer=integer, name=("through", c, values))
    rows = np.arange(len(values))
    terms = [Term(rows, hold), *(Term(rows, other, -1.0) for other in (*brought, column))]
    builder.add_rows(len(values), terms, upper=np.where(hold == ONE, -1.0, 0.0), name=("through", c, values))
    return column


def violated_recomputations(view: ArrayView, columns: Columns, x: Floats) -> Recomputations:
    """In each coarse stage where a solution breaks a row (h) by more than a fraction of the capacity, what to charge.

    Besides the recomputations that break a row, those that nearly would: the next solution may run them instead.
    """
    found: Recomputations = {}
    for c in range(1, columns.stages):
        run = values_of(columns.runs[c], x)
        resident = np.maximum(values_of(needed_to_end(view, columns, c), x) - run[view.maker], 0.0)
        resident[view.value_start[columns.first[c]] :] = 0.0
        held = resident * view.size
        beside = float(held.sum()) - np.bincount(view.maker, held, minlength=view.ops)
        beside -= np.bincount(view.edge_op, held[view.edge_value], minlength=view.ops)
        if float((beside + view.need * run)[run > 1e-6].max(initial=0.0)) <= (1.0 + _TOLERANCE) * view.capacity:
            continue
        able = columns.runs[c] >= 0
        over = np.where(able, beside + view.need - (1.0 - _ALMOST) * view.capacity, 0.0)
        worst = np.argsort(-over, kind="stable")[:_MOST_CHARGED]
        found[columns.cuts[c]] = set(worst[over[worst] > 0].tolist())
    return found


def needed_to_end(view: ArrayView, columns: Columns, c: int) -> Ids:
    """[m] the column that says that a value made before c is needed until c ends: S_{c+1,v}, or 1 if τ_c reads it."""
    hold = held_at_end(view, columns, c).copy()
    hold[view.inputs(columns.cuts[c])] = ONE
    hold[view.value_start[columns.first[c]] :] = ZERO
    return hold


@dataclass(frozen=True, eq=False)
class Cover:
    """More than fits next to the first computation of a cut op: at most `most` of these values can be resident then."""

    op: int
    values: Ids
    most: int


@dataclass
class Rows:
    """What a proof has found worth telling apart; grows from round to round and never shrinks.

    `cuts` end coarse stages; `spans` are the coarse stages that were cut, those with variables. `recomputations` are
    those with rows (h). `covers` repair what rounded weights let through.
    """

    cuts: set[int]
    spans: list[Span] = field(default_factory=list)
    recomputations: Recomputations = field(default_factory=dict)
    covers: list[Cover] = field(default_factory=list)

    def cut(self, op: int) -> None:
        """Tell the stages up to that of an op apart from those after it; the op is no cut yet."""
        before = max((cut for cut in self.cuts if cut < op), default=None)
        if before is not None:
            self.spans.append((before, min(cut for cut in self.cuts if cut > op)))
        self.cuts.add(op)

    @property
    def count(self) -> int:
        """How much has been found: more whenever a program becomes another one."""
        runs = sum(map(len, self.recomputations.values()))
        return len(self.cuts) + len(self.spans) + len(self.covers) + runs

    def with_cut(self, op: int) -> Rows:
        """These rows with one more cut; they stay as they are."""
        more = replace(self, cuts=set(self.cuts), spans=list(self.spans))
        more.cut(op)
        return more


@dataclass(frozen=True, eq=False)
class Round:
    """A program, where its variables are, and what all is called.

    `spans` are the first and the last of the coarse stages of each span that has several.
    """

    program: Program
    columns: Columns
    names: Names
    column_names: Names
    spans: tuple[Span, ...]


def write(
    view: ArrayView,
    rows: Rows,
    scale: Scale,
    *,
    nested: bool = True,
    cutoff_ns: int | None = None,
    stop: Callable[[], bool] = never,
) -> Round:
    """The program for the rows found so far; the objective is in units of cost and leaves out each op's first run.

    Without `nested` it has no spans. With `cutoff_ns` its last row is of points whose objective is less; for a scale
    of 1 ns alone. Where `stop` says so, `TimeUp` is raised.
    """
    builder = Builder(stop)
    columns = relax(view, tuple(sorted(rows.cuts)), scale, builder)
    if nested:
        add_spans(view, columns, rows.spans, builder)
    add_recomputations(view, columns, rows.recomputations, builder, scale)
    for cover in rows.covers:
        _add_cover(columns, cover, builder)
    if cutoff_ns is not None:
        _add_cheaper(view, columns, cutoff_ns, builder)
    starts = {cut: c + 1 for c, cut in enumerate(columns.cuts)}
    ends = {(starts[begin], columns.stage_of(end)) for begin, end in rows.spans if nested}
    spans = tuple(sorted((first, last) for first, last in ends if first < last))
    return Round(builder.program(), columns, builder.names, builder.column_names, spans)


def cover_of(view: ArrayView, columns: Columns, op: int, x: Floats) -> Cover | None:
    """A row that a 0/1 solution breaks because too much is resident while a cut op runs; None if all of it fits.

    The largest of the resident values until they exceed what is left, in whole bytes: not all of them fit. So many of
    these and of any larger values do not either.
    """
    hold = columns.holds[columns.stage_of(op) + 1]
    left, free = left_at_cut(view, op, hold)
    held = free[x[hold[free]] > 0.5]
    held = held[np.argsort(-view.size[held], kind="stable")]
    over = np.flatnonzero(np.cumsum(view.size[held]) > left)
    if not len(over):
        return None
    chosen = held[: over[0] + 1]
    larger = free[view.size[free] >= view.size[chosen[0]]]
    return Cover(op, np.union1d(chosen, larger), len(chosen) - 1)


def _add_cheaper(view: ArrayView, columns: Columns, cutoff_ns: int, builder: Builder) -> None:
    ops = [np.flatnonzero(run >= 0) for run in columns.runs]
    terms = [Term(0, run[each], view.cost[each]) for run, each in zip(columns.runs, ops, strict=True)]
    builder.add_rows(1, terms, upper=float(cutoff_ns - 1), name=("cheaper", cutoff_ns))


def _add_cover(columns: Columns, cover: Cover, builder: Builder) -> None:
    column = columns.holds[columns.stage_of(cover.op) + 1][cover.values]
    free, most = column >= 0, cover.most - int((column == ONE).sum())
    weighted = (number for value in cover.values[free].tolist() for number in (value, 1))
    name = ("cover", columns.stage_of(cover.op) + 1, most, *weighted)
    builder.add_rows(1, [Term(0, column[free])], upper=float(most), name=name)
