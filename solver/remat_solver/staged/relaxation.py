"""The coarse-stage relaxation: one pair (R, S) per stretch of stages instead of one per stage.

Stage t of a plan is what runs after the first computation of op t − 1, up to and including that of op t. Cuts τ_0 <
τ_1 < … < τ_{K−1} = n − 1 gather stages into coarse stages: c covers f_c … τ_c, with f_c = τ_{c−1} + 1. For c ≥ 1, ops
i < f_c and values v made by such ops,

    R_{c,i} = 1  if op i is computed anywhere in coarse stage c (a recomputation, since i < f_c)
    S_{c,v} = 1  if value v is resident when coarse stage c begins: right after the first computation of τ_{c−1}

and the program minimises Σ C_i + Σ C_i R_{c,i}. Every plan, with any number of recomputations in any order inside a
stage, maps to a point of this program that costs no more: each R counts once what the plan pays at least once, and
recomputations of op i within the coarse stage in which it is first computed are not charged at all. The rows hold for
that point, so the program's optimum, and any bound on it, is a bound for the whole space:

    (a) R_{c,j} ≤ R_{c,p(v)} + S_{c,v}     v read by j < f_c: when j runs, v is resident, either since the start of c or
                                           because its maker p(v) has run in c
    (b) 1 ≤ R_{c,p(v)} + S_{c,v}           v made before f_c and read by an op first computed in c: the same
    (c) S_{c+1,v} ≤ R_{c,p(v)} + S_{c,v}   v made before f_c and resident after c: the same
    (d) memory while τ = τ_{c−1} is first computed: its inputs, its non-optional outputs, its workspace, kept values
        made before, every other value with S_{c,v} = 1 (made before τ, so resident while τ runs), and each optional
        output of τ with S_{c,v} = 1 (there only because that computation kept it): together at most the capacity

Fixed beforehand, all without loss: R = S = 0 where the op or value leads to no first computation in c or later (such a
computation could be struck out of the plan); R = 0 for ops that may not run in c any more; S = 1 for kept values and
for values of such ops that a first computation in c or later reads, since they cannot be made again. Because the cuts
only choose which stages are told apart, any choice is valid; a finer one is tighter.

Coarse stage 0 has no variables: what it recomputes is not charged and what it holds at its end is free.
The fine program, with one coarse stage per stage, is Checkmate's, equations 1 to 8, without its memory inside stages.

Spans, coarse stages around coarse stages, make the bound of a finer relaxation at least that of a coarser one. A span
gathers coarse stages a … b of the present cuts, as one coarse stage of an earlier round did before it was cut. Its
variables R_{a…b,i} = 1 if op i, first computed before f_a, is computed anywhere in stages a … b. Every plan gives them
values for which these rows hold, by the same argument as for rows (a) to (c), of which they are those of coarser cuts:

    R_{a…b,j} ≤ R_{a…b,p(v)} + S_{a,v}      v read by j < f_a
    1 ≤ R_{a…b,p(v)} + S_{a,v}              v made before f_a and read by an op first computed in a … b
    S_{b+1,v} ≤ R_{a…b,p(v)} + S_{a,v}      v made before f_a and resident after b

and, with c running over the stages or spans that a … b was cut into, that R is an "or":

    (e) R_{c,i} ≤ R_{a…b,i} ≤ Σ_c R_{c,i}

Only the stages are charged. In whole numbers the rows say nothing new. In a linear relaxation they do: halves of a
value held at several cuts may each serve a half of one recomputation, and a stage cut in two lets more of that happen;
with the span's rows the Σ_c R_{c,i} can't fall below the R of the stage before it was cut. So with all spans the
linear bound never falls from round to round, which it does without them (of a ResNet-50 at a fifth of its memory from
16.03 % with two cuts to 14.49 % with fourteen; with spans it rises to 16.62 %).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..array_view import ArrayView, Ids, Trace
from ..program import Builder, Floats, Term
from .scale import Scale

ZERO = -1
ONE = -2
"""Marks in a table of columns: no variable, the quantity is 0 or 1."""
Span = tuple[int, int]
"""The cut before the span's first op, and the cut that ends it; or its first and its last coarse stage."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Where the variables of a relaxation are.

    `cuts[c]` is τ_c and `first[c]` is f_c; `runs[c][i]` and `holds[c][v]` give the column of R_{c,i} and S_{c,v}, or
    ZERO or ONE. Coarse stage 0 has no variables. They are the first `count` columns of a program.
    """

    cuts: tuple[int, ...]
    first: tuple[int, ...]
    runs: tuple[Ids, ...]
    holds: tuple[Ids, ...]
    count: int

    @property
    def stages(self) -> int:
        """The number of coarse stages, stage 0 included."""
        return len(self.cuts)

    def stage_of(self, op: int) -> int:
        """The coarse stage in which an op is first computed."""
        return int(np.searchsorted(self.cuts, op))


def held_at_end(view: ArrayView, columns: Columns, c: int) -> Ids:
    """[m] the column of S_{c+1,v}; after the last coarse stage only kept values matter."""
    if c + 1 < columns.stages:
        return columns.holds[c + 1]
    return np.where(view.kept, ONE, ZERO)


def values_of(column: Ids, x: Floats) -> Floats:
    """What a table of columns holds at a solution."""
    return np.where(column >= 0, x[np.maximum(column, 0)] if len(x) else 0.0, np.where(column == ONE, 1.0, 0.0))


def relax(view: ArrayView, cuts: tuple[int, ...], scale: Scale, builder: Builder) -> Columns:
    """Write rows (a) to (d) for the given cuts, ascending and ending with n − 1."""
    columns = _columns(view, cuts, builder, scale)
    for c in range(1, columns.stages):
        _reads(view, columns, (c, c), columns.runs[c], builder)
        _residence(view, columns, (c - 1, c - 1), columns.runs[c - 1], builder)
        memory_at_cut(view, columns, c, builder, scale)
    return columns


def _columns(view: ArrayView, cuts: tuple[int, ...], builder: Builder, scale: Scale) -> Columns:
    first = (0, *(cut + 1 for cut in cuts[:-1]))
    runs, holds = [np.full(view.ops, ZERO)], [np.full(view.values, ZERO)]
    ops, cost = np.arange(view.ops), scale.costs(view.cost)
    for start in first[1:]:
        useful = (ops < start) & (view.op_reach >= start)
        c = len(runs)
        name = ("run", c, c, np.flatnonzero(useful))
        runs.append(builder.variables_at(useful, cost=cost[useful], name=name))
        made = view.maker < start
        certain = made & (view.kept | ((view.last_stage[view.maker] < start) & (view.last_reader >= start)))
        free = made & ~certain & (view.value_reach >= start)
        hold = builder.variables_at(free, name=("hold", c, np.flatnonzero(free)))
        hold[certain] = ONE
        holds.append(hold)
    return Columns(cuts, first, tuple(runs), tuple(holds), builder.columns)


def _reads(view: ArrayView, columns: Columns, ends: Span, run: Ids, builder: Builder) -> None:
    """(a) and (b) of the coarse stages `ends`, the first and the last, in which the variables R of `run` count."""
    first, last = ends
    hold, reader = columns.holds[first], run[view.edge_op]
    edges = np.flatnonzero((reader >= 0) & (hold[view.edge_value] != ONE))
    values = view.edge_value[edges]
    name = ("read", first, last, view.edge_op[edges], values)
    builder.add_implied(reader[edges], run[view.maker[values]], hold[values], name=name)
    start, end = columns.first[first], columns.cuts[last]
    read = view.edge_value[view.edge_start[start] : view.edge_start[end + 1]]
    values = np.unique(read[view.maker[read] < start])
    values = values[hold[values] != ONE]
    rows = np.arange(len(values))
    terms = [Term(rows, run[view.maker[values]]), Term(rows, hold[values])]
    builder.add_rows(len(values), terms, lower=1.0, name=("first", first, last, values))


def _residence(view: ArrayView, columns: Columns, ends: Span, run: Ids, builder: Builder) -> None:
    """(c), from the coarse stages `ends` to the next one; nothing is known of what coarse stage 0 recomputes."""
    first, last = ends
    if first == 0 or last + 1 == columns.stages:
        return
    hold, later = columns.holds[first], columns.holds[last + 1]
    values = np.flatnonzero((later >= 0) & (view.maker < columns.first[first]) & (hold != ONE))
    name = ("stay", first, last, values)
    builder.add_implied(later[values], run[view.maker[values]], hold[values], name=name)


def memory_at_cut(view: ArrayView, columns: Columns, c: int, builder: Builder, scale: Scale) -> None:
    """(d)"""
    left, values = left_at_cut(view, columns.cuts[c - 1], columns.holds[c])
    terms = [Term(0, columns.holds[c][values], scale.weights(view.size[values]))]
    builder.add_rows(1, terms, upper=scale.room(left), name=("memory", c))


def left_at_cut(view: ArrayView, op: int, hold: Ids) -> tuple[int, Ids]:
    """The bytes left by what certainly is resident while the op of a cut runs, and the values that compete for them.

    `hold` are the columns of S when the coarse stage after the cut begins.
    """
    counted = (view.maker < op) | ((view.maker == op) & view.optional)
    counted[view.inputs(op)] = False
    left = view.capacity - int(view.need[op]) - int(view.size[counted & (hold == ONE)].sum())
    return left, np.flatnonzero(counted & (hold >= 0))


def add_spans(view: ArrayView, columns: Columns, spans: Sequence[Span], builder: Builder) -> None:
    """Write the rows of all spans; each must begin and end at present cuts, and any two be nested or apart."""
    starts = {columns.cuts[c - 1]: c for c in range(1, columns.stages)}
    runs: dict[Span, Ids] = {(c, c): columns.runs[c] for c in range(1, columns.stages)}
    for span in sorted(set(spans), key=lambda ends: (ends[1] - ends[0], ends)):
        ends = starts[span[0]], columns.stage_of(span[1])
        if ends in runs:
            continue
        free = columns.runs[ends[0]] >= 0
        run = builder.variables_at(free, name=("run", *ends, np.flatnonzero(free)))
        _link(ends, run, {part: runs[part] for part in _parts(ends, runs)}, builder)
        _reads(view, columns, ends, run, builder)
        _residence(view, columns, ends, run, builder)
        runs[ends] = run


def _parts(ends: Span, runs: Collection[Span]) -> Iterator[Span]:
    """The largest stages and spans that lie in a span, which together fill it."""
    first, last = ends
    while first <= last:
        end = max(b for a, b in runs if a == first and b <= last)
        yield first, end
        first = end + 1


def _link(ends: Span, run: Ids, parts: Mapping[Span, Ids], builder: Builder) -> None:
    """(e)"""
    ops = np.flatnonzero(run >= 0)
    for inner, part in parts.items():
        there = ops[part[ops] >= 0]
        builder.add_implied(part[there], run[there], name=("part", *ends, *inner, there))
    builder.add_implied(run[ops], *(part[ops] for part in parts.values()), name=("or", *ends, ops))


def primal_heuristic(view: ArrayView, columns: Columns, x: Floats) -> list[int]:
    """A sequence of ops that recomputes, in each coarse stage, what a 0/1 solution says.

    The relaxation does not say when inside a coarse stage an op runs. Each is placed in the earliest stage in which a
    first computation or another recomputation there reads it, or in the latest such stage where the solution also
    holds all that is read of it at the coarse stage's begin, but no later than it may. The sequence is complete and in
    order; whether it fits the memory is not promised.
    """
    graph = view.graph
    extra: list[tuple[int, int]] = []
    for c in range(1, columns.stages):
        first, last = columns.first[c], columns.cuts[c]
        held = (columns.holds[c] == ONE) | (values_of(columns.holds[c], x) > 0.5)
        placed: dict[int, int] = {}
        for op in np.flatnonzero(values_of(columns.runs[c], x) > 0.5)[::-1].tolist():
            stages: list[int] = []
            all_held = True
            for value in graph.op_values[op]:
                uses = [
                    reader if first <= reader <= last else placed[reader]
                    for reader in graph.users[value]
                    if first <= reader <= last or reader in placed
                ]
                all_held &= not uses or bool(held[value])
                stages += uses
            wanted = last if not stages else max(stages) if all_held else min(stages)
            placed[op] = min(wanted, graph.last_stage[op])
            extra.append((placed[op], op))
    return in_order(view.ops, extra)


def in_order(ops: int, extra: list[tuple[int, int]]) -> list[int]:
    """The sequence with the given recomputations (stage, op): in each stage ascending, before its first computation."""
    return [op for _, op in sorted({*extra, *((op, op) for op in range(ops))})]


def point(view: ArrayView, columns: Columns, run: Trace) -> Floats:
    """The point of the relaxation that a sequence maps to, [columns.count]: a start for an engine."""
    x = np.zeros(columns.count)
    stage_of = np.searchsorted(np.array(columns.cuts), np.minimum(run.stage, view.ops - 1))
    where_first = np.full(view.ops, -1)
    for position, op in enumerate(run.order.tolist()):
        if where_first[op] < 0:
            where_first[op] = position
            continue
        column = columns.runs[int(stage_of[position])][op]
        if column >= 0:
            x[column] = 1.0
    for c in range(1, columns.stages):
        held = columns.holds[c][run.resident_after(int(where_first[columns.cuts[c - 1]]))]
        x[held[held >= 0]] = 1.0
    return x
