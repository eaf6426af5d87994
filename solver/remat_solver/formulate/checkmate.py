"""The Checkmate program as in the paper, equations 1 to 8 with 7b and 7c, extended to several values per op.

Where each op makes one value that is neither optional nor kept, and needs no workspace, the rows are the paper's, one
for one. Beyond it:

- S and FREE are per value, R per op. An optional value has a binary K of its own in each stage, "this computation keeps
  it", and is made where K is 1; others are made where R is 1. MADE below is K or R.
- U counts an op's workspace while it runs.
- A value that stays to the end is no choice once it is made: it takes its bytes from the room of all later stages.
- An op that runs exactly once has no R but its first.
- FREE of an op's own output is there for ops that make several values, of which a recomputation may need only some. The
  paper drops it (Section 4.6), because for one value such a computation would be spurious.

The program's optimum is the least cost of a plan with one recomputation per op and stage, in op order within a stage:
every such plan gives a point of the program by its least retention, with U its memory, and from every point the plan of
its R holds no more than U says.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, combinations

import numpy as np

from ..array_view import ArrayView, Ids
from ..deadline import never
from ..program import Booleans, Builder, Floats, Term, scattered
from .formulation import Formulation, Matrices, Stages, cost_units, recomputable, stages
from .rows import (
    Columns,
    Memory,
    add_changes,
    add_keeping_needs_computing,
    add_retention,
    filled,
    following,
    residents,
    room,
    stage_columns,
)


def checkmate(view: ArrayView, sweeps: int = 1, *, stop: Callable[[], bool] = never) -> Formulation:
    """The paper's program; `sweeps` stages per op (Section 4.10). Where `stop` says so, `TimeUp` is raised."""
    builder, stage_of = Builder(stop), stages(view.ops, sweeps)
    cost, unit_ns, whole = cost_units(view)
    runs = recomputable(view, stage_of)
    earlier = (view.maker < stage_of.frontier[:, None]) & ~view.kept
    retains = np.vstack((earlier, np.zeros((1, view.values), dtype=np.bool_)))
    keeps = runs[:, view.maker] & view.optional
    columns = stage_columns(builder, view, stage_of, cost=cost, runs=runs, retains=retains, keeps=keeps)
    add_dependencies(builder, columns, view)
    add_retention(builder, columns)
    add_keeping_needs_computing(builder, columns, view)
    free, free_own = add_free(builder, columns, view)
    memory = add_memory(builder, columns, view, stage_of, free, free_own)
    program = builder.program()

    def complete(matrices: Matrices) -> Floats:
        freed = zip((free, free_own), _freed(view, matrices), strict=True)
        return memory.filled(filled(columns, matrices, program.columns, *freed))

    return Formulation(view, stage_of, program, columns.compute, columns.retain, complete, unit_ns, whole)


def add_dependencies(builder: Builder, columns: Columns, view: ArrayView) -> None:
    """(1b): R[s,k] ≤ MADE[s,v] + S[s,v] for every value v that op k reads: made in the stage or retained into it."""
    runs = columns.compute[:, view.uses.op]
    stage, use = np.nonzero(runs >= 0)
    value = view.uses.value[use]
    builder.add_implied(runs[stage, use], columns.made[stage, value], columns.retain[stage, value])


def add_free(builder: Builder, columns: Columns, view: ArrayView) -> tuple[Ids, Ids]:
    """(7a to 7c): binaries FREE of each use, [stages, uses], and of own outputs, [stages, values], and their rows.

    For a use of v by op k, num_hazards = 1 − R[s,k] + S[s+1,v] + Σ R[s,j] over the later users j of v. For an op's own
    output v, num_hazards = 1 − R[s,maker] + S[s+1,v] + Σ R[s,j] over all users j of v.
    """
    uses = view.uses
    several = np.bincount(view.maker, minlength=view.ops) > 1
    own = (columns.compute[:, view.maker] >= 0) & several[view.maker] & ~view.optional & ~view.kept
    free, free_own = builder.variables_at(columns.compute[:, uses.op] >= 0), builder.variables_at(own)
    _add_free(builder, columns, view, free, uses.op, uses.value, *_later_uses(view))
    every_value, every_use = np.arange(view.values), np.arange(uses.count)
    _add_free(builder, columns, view, free_own, view.maker, every_value, uses.value, every_use)
    return free, free_own


def _add_free(
    builder: Builder, columns: Columns, view: ArrayView, free: Ids, op: Ids, value: Ids, event: Ids, later: Ids
) -> None:
    """(7b, 7c): FREE = 1 exactly if num_hazards (6) = 1 − R + S + Σ R of later users = 0.

    `free` are the columns of FREE, [stages, events]; `op` and `value` are those of each event. `event` and `later` are
    pairs of an event and a use after it. κ is the largest value that num_hazards can take in a row.
    """
    stage, which = np.nonzero(free >= 0)
    each = np.arange(len(which))
    number, reads = scattered(free >= 0, each), columns.compute[:, view.uses.op]
    pair_stage, pair = np.nonzero((free[:, event] >= 0) & (reads[:, later] >= 0))
    row, retained = number[pair_stage, event[pair]], columns.retain[stage + 1, value[which]]
    kappa = 1.0 + (retained >= 0) + np.bincount(row, minlength=len(each))
    runs = Term(each, columns.compute[stage, op[which]], -1.0)
    hazards = [runs, Term(each, retained), Term(row, reads[pair_stage, later[pair]])]
    builder.add_rows(len(each), [*hazards, Term(each, free[stage, which])], lower=0.0)
    builder.add_rows(len(each), [*hazards, Term(each, free[stage, which], kappa)], upper=kappa - 1.0)


def _later_uses(view: ArrayView) -> tuple[Ids, Ids]:
    """Pairs of uses of one value, the earlier first."""
    of_value = zip(view.uses.first.tolist(), view.uses.last.tolist(), strict=True)
    pairs = (pair for first, last in of_value for pair in combinations(range(first, last + 1), 2))
    flat = np.fromiter(chain.from_iterable(pairs), np.int64)
    return flat[::2], flat[1::2]


def add_memory(
    builder: Builder,
    columns: Columns,
    view: ArrayView,
    stage_of: Stages,
    free: Ids,
    free_own: Ids,
) -> Memory:
    """(2, 3, 4, 8): U[s,k], memory while op k runs in stage s, in units of the room.

    U[s,0] is what was retained plus what op 0 makes; U[s,k+1] is U[s,k], less what is freed after op k, plus what op
    k+1 makes. U is at most the room, and U + workspace · R too.
    """
    left, unit = room(view, stage_of)
    weight, workspace = view.size / unit, view.workspace / unit
    slots = np.arange(view.ops) <= stage_of.frontier[:, None] - ~stage_of.advances[:, None]
    stage, op = np.nonzero(slots)
    slot = scattered(slots, np.arange(len(op)))
    after = following(slot)
    retain_stage, retained = np.nonzero(columns.retain >= 0)
    made_stage, made = np.nonzero((columns.made >= 0) & ~view.kept)
    # freed after op k: in the row of slot k + 1, where the stage has one
    use_slot = np.where(free >= 0, after[:, view.uses.op], -1)
    own_slot = np.where(free_own >= 0, after[:, view.maker], -1)
    use, own = np.nonzero(use_slot >= 0), np.nonzero(own_slot >= 0)
    changes = (
        Term(slot[retain_stage, 0], columns.retain[retain_stage, retained], weight[retained]),
        Term(slot[made_stage, view.maker[made]], columns.made[made_stage, made], weight[made]),
        Term(use_slot[use], free[use], -weight[view.uses.value[use[1]]]),
        Term(own_slot[own], free_own[own], -weight[own[1]]),
    )
    runs, sure = columns.compute[stage, op], np.zeros(len(op), dtype=np.bool_)
    return add_changes(builder, op == 0, changes, runs, sure, left[stage, op], workspace[op])


def _freed(view: ArrayView, matrices: Matrices) -> tuple[Booleans, Booleans]:
    """[stages, uses] and [stages, values]: FREE of a plan's matrices."""
    uses, after, present = view.uses, matrices.retained[1:], residents(view, matrices)
    needed_later = np.where(uses.next < 0, after[:, uses.value], present[:, uses.next])
    own, read = matrices.computed[:, view.maker] & ~after, uses.first >= 0
    own[:, read] &= ~present[:, uses.first[read]]
    return matrices.computed[:, uses.op] & ~needed_later, own
