"""Memory while ops are recomputed: rows (h) for every plan, and rows inside one chosen stage that hold for fewer.

Rows (h), for an op k recomputed in coarse stage c, hold for any number of recomputations in any order. Let T_{c,v} = 1
if v is resident throughout c: at least if v was made before c by an op that does not run in c, and is either resident
when c ends or read by τ_c, the op whose first computation ends it. So

        T_{c,v} ≥ S_{c+1,v} − R_{c,p(v)},      T_{c,v} ≥ 1 − R_{c,p(v)}  where τ_c reads v
    (h) need(k) R_{c,k} + Σ_{v that k neither reads nor makes} M_v T_{c,v} ≤ capacity:

if k runs, all of this is resident while it does; if not, the sum is at most what is resident at any moment of c.

The other rows describe one stage t exactly, in the space where each op is recomputed at most once between two
successive first computations, in op order (Checkmate, Section 4.2). They are written for coarse stages that consist of
t alone, and a bound on a program that has them is a bound in that space only. With A_{v,k} = 1 if v is resident from
its previous event in the stage (being made there or read there, else the stage's begin) until op k < t is recomputed:

    (f) R_{p(v)} + S_v ≤ 1 for values that p(v) makes whether kept or not: nothing before its own slot reads v, so
        holding it from the begin until it is made again is of no use, and it can't be resident when it is made
    (g) A_{v,k} ≥ R_k;  A_{v,first k} ≤ R_{p(v)} + S_v;  A_{v,next k} ≤ A_{v,k};  S'_v ≤ A_{v,last k}
    memory at slot k, with cur(v) = A of the first reader from k on, else S'_v, and 1 where t reads v:
        workspace_k R_k + Σ_{v of k, always} M_v (R_k + S_v) + Σ_{v of k, optional} M_v cur(v)
        + Σ_{p(v) < k} M_v cur(v) + Σ_{k < p(v) < t} M_v S_v ≤ capacity

The last sum is right because holding a value at a stage's begin that is neither read in the stage nor held at its end
can be struck out of a plan, and its readers come after its maker's slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..array_view import ArrayView, Ids
from ..program import Builder, Floats, Term
from .interior import held_at_end, values_of
from .relaxation import ONE, ZERO, Columns
from .scale import Scale

_ALMOST = 0.1
"""Charged together with recomputations that break a row are those that would fill all but so much of the capacity."""
_MOST_CHARGED = 150
"""The rows (h) that one round adds to a coarse stage, which have up to as many entries as there are values."""


Reruns = dict[int, set[int]]
"""Rows (h): the recomputations whose memory is charged, for each coarse stage by a stage that it holds."""


def charge(known: Reruns, more: Reruns) -> bool:
    """Add recomputations to those charged, by stage; whether one of them is new."""
    new = False
    for stage, ops in more.items():
        charged = known.setdefault(stage, set())
        new |= not ops <= charged
        charged |= ops
    return new


def add_reruns(
    view: ArrayView, columns: Columns, reruns: Reruns, builder: Builder, scale: Scale, lent: Sequence[Term] = ()
) -> None:
    """Write rows (h); `lent` as in `relax`."""
    charged: Reruns = {}
    for stage, ops in reruns.items():
        charged.setdefault(columns.stage_of(stage), set()).update(ops)
    for c, ops in sorted(charged.items()):
        if c == 0:
            continue
        throughout = _throughout(view, columns, c, builder)
        for op in sorted(ops):
            run = columns.runs[c][op]
            if run < 0:
                continue
            beside = throughout.copy()
            beside[view.inputs(op)] = ZERO
            beside[view.value_start[op] : view.value_start[op + 1]] = ZERO
            free = np.flatnonzero(beside >= 0)
            room = view.capacity - int(view.size[beside == ONE].sum())
            terms = [
                Term(0, run, scale.weights(view.need[op : op + 1])),
                Term(0, beside[free], scale.weights(view.size[free])),
                *lent,
            ]
            builder.add_rows(1, terms, upper=scale.room(room), name=("rerun", c, op))


def _throughout(view: ArrayView, columns: Columns, c: int, builder: Builder) -> Ids:
    """[m] the columns of T_{c,v}, where need be new ones."""
    hold, run = _needed_to_end(view, columns, c), columns.runs[c][view.maker]
    hold[view.value_start[columns.first[c]] :] = ZERO
    column = hold.copy()  # the same where p(v) cannot run in c
    values = np.flatnonzero((hold != ZERO) & (run >= 0))
    column[values] = builder.variables(len(values), name=("through", c, values))
    held, rows = hold[values], np.arange(len(values))
    terms = [
        Term(rows[held >= 0], held[held >= 0]),
        Term(rows, run[values], -1.0),
        Term(rows, column[values], -1.0),
    ]
    builder.add_rows(len(values), terms, upper=np.where(held == ONE, -1.0, 0.0), name=("through", c, values))
    return column


def violated_reruns(view: ArrayView, columns: Columns, x: Floats, *, tolerance: float = 1e-3) -> Reruns:
    """In each coarse stage where a solution breaks a row (h) by more than a fraction of the capacity, what to charge.

    Besides the recomputations that break a row, those that nearly would: the next solution may run them instead.
    """
    found: Reruns = {}
    for c in range(1, columns.stages):
        run = values_of(columns.runs[c], x)
        resident = np.maximum(values_of(_needed_to_end(view, columns, c), x) - run[view.maker], 0.0)
        resident[view.value_start[columns.first[c]] :] = 0.0
        held = resident * view.size
        beside = float(held.sum()) - np.bincount(view.maker, held, minlength=view.ops)
        beside -= np.bincount(view.edge_op, held[view.edge_value], minlength=view.ops)
        if float((beside + view.need * run)[run > 1e-6].max(initial=0.0)) <= (1.0 + tolerance) * view.capacity:
            continue
        able = columns.runs[c] >= 0
        over = np.where(able, beside + view.need - (1.0 - _ALMOST) * view.capacity, 0.0)
        worst = np.argsort(-over, kind="stable")[:_MOST_CHARGED]
        found[columns.cuts[c]] = set(worst[over[worst] > 0].tolist())
    return found


def _needed_to_end(view: ArrayView, columns: Columns, c: int) -> Ids:
    """[m] the column that says that a value is needed until c ends: S_{c+1,v}, or 1 if τ_c reads it."""
    hold = held_at_end(view, columns, c).copy()
    hold[view.inputs(columns.cuts[c])] = ONE
    return hold


def add_single_stage(
    view: ArrayView, columns: Columns, stage: int, slots: Iterable[int], builder: Builder, scale: Scale
) -> None:
    """Write (f), the A rows of (g) and the memory at the given slots of a stage that is a coarse stage of its own."""
    c = columns.stage_of(stage)
    assert columns.first[c] == columns.cuts[c] == stage
    run, hold, after = columns.runs[c], columns.holds[c], held_at_end(view, columns, c)
    values = np.flatnonzero((hold >= 0) & ~view.optional & (run[view.maker] >= 0))
    rows = np.arange(len(values))
    builder.add_rows(len(values), [Term(rows, run[view.maker[values]]), Term(rows, hold[values])], upper=1.0)
    read_at_end = np.zeros(view.values, dtype=np.bool_)
    read_at_end[view.inputs(stage)] = True
    chosen = np.flatnonzero((run[view.edge_op] >= 0) & (hold[view.edge_value] >= 0) & ~read_at_end[view.edge_value])
    chosen = chosen[np.lexsort((view.edge_op[chosen], view.edge_value[chosen]))]
    value, reader = view.edge_value[chosen], view.edge_op[chosen]
    resident = builder.variables(len(chosen), integer=True)
    _add_residence(view, run, hold, after, value, reader, resident, builder)
    for slot in sorted(slots):
        if run[slot] >= 0:
            _add_slot(view, run, hold, after, read_at_end, (value, reader, resident), slot, stage, builder, scale)


def _add_residence(
    view: ArrayView, run: Ids, hold: Ids, after: Ids, value: Ids, reader: Ids, resident: Ids, builder: Builder
) -> None:
    rows = np.arange(len(value))
    builder.add_rows(len(value), [Term(rows, run[reader]), Term(rows, resident, -1.0)], upper=0.0)
    starts = np.concatenate(([True], value[1:] != value[:-1])) if len(value) else np.zeros(0, dtype=np.bool_)
    ends = np.concatenate((starts[1:], [True])) if len(value) else starts
    first = np.flatnonzero(starts)
    makers = run[view.maker[value[first]]]
    rows = np.arange(len(first))
    terms = [
        Term(rows, resident[first]),
        Term(rows, hold[value[first]], -1.0),
        Term(rows[makers >= 0], makers[makers >= 0], -1.0),
    ]
    builder.add_rows(len(first), terms, upper=0.0)
    later = np.flatnonzero(~starts)
    rows = np.arange(len(later))
    builder.add_rows(len(later), [Term(rows, resident[later]), Term(rows, resident[later - 1], -1.0)], upper=0.0)
    last = np.flatnonzero(ends & (after[value] >= 0))
    rows = np.arange(len(last))
    builder.add_rows(len(last), [Term(rows, after[value[last]]), Term(rows, resident[last], -1.0)], upper=0.0)
    forced = resident[ends & (after[value] == ONE)]
    builder.add_rows(len(forced), [Term(np.arange(len(forced)), forced)], lower=1.0)


def _add_slot(
    view: ArrayView,
    run: Ids,
    hold: Ids,
    after: Ids,
    read_at_end: np.typing.NDArray[np.bool_],
    events: tuple[Ids, Ids, Ids],
    slot: int,
    stage: int,
    builder: Builder,
    scale: Scale,
) -> None:
    value, reader, resident = events
    # cur(v): the first event from the slot on, else the stage's end; constant where t reads v or v can't be freed
    current = after.copy()
    upcoming = np.flatnonzero(reader >= slot)[::-1]
    current[value[upcoming]] = resident[upcoming]
    current[read_at_end | (hold == ONE)] = ONE
    made = np.arange(view.value_start[slot], view.value_start[slot + 1])
    before = np.arange(view.value_start[slot])
    optional, always = made[view.optional[made]], made[~view.optional[made]]
    counted = np.concatenate((before, optional))
    column = current[counted]
    later = np.arange(view.value_start[slot + 1], view.value_start[stage])
    start = hold[later]
    held = always[hold[always] >= 0]
    constant = int(view.size[counted[column == ONE]].sum()) + int(view.size[later[start == ONE]].sum())
    making = int(view.workspace[slot]) + int(view.size[always].sum())
    terms = [
        Term(0, column[column >= 0], scale.weights(view.size[counted[column >= 0]])),
        Term(0, start[start >= 0], scale.weights(view.size[later[start >= 0]])),
        Term(0, hold[held], scale.weights(view.size[held])),
        Term(0, run[slot], scale.weights(np.array([making]))),
    ]
    builder.add_rows(1, terms, upper=scale.room(view.capacity - constant))
