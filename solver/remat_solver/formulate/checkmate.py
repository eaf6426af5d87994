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

import numpy as np

from ..array_view import ArrayView, Ids
from ..deadline import never
from ..program import Booleans, Builder, Floats, Term, scattered
from .formulation import Formulation, Matrices, Stages, cost_units, recomputable, stages
from .rows import Columns, add_keeping_needs_computing, add_retention, filled, room, stage_columns


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
    free, free_own = free_columns(builder, columns, view)
    add_free_of_uses(builder, columns, view, free)
    add_free_of_own(builder, columns, view, free_own)
    memory = add_memory(builder, columns, view, stage_of, free, free_own)
    program = builder.program()

    def complete(matrices: Matrices) -> Floats:
        x = filled(columns, view, matrices, program.columns)
        freed, freed_own = _freed(view, matrices)
        for placed, values in ((free, freed), (free_own, freed_own)):
            x[placed[placed >= 0]] = values[placed >= 0]
        used = _memory_of(view, matrices, freed, freed_own) / room(view, stage_of)[1]
        x[memory[memory >= 0]] = used[memory >= 0]
        return x

    return Formulation(view, stage_of, program, columns.compute, columns.retain, complete, unit_ns, whole)


def add_dependencies(builder: Builder, columns: Columns, view: ArrayView) -> None:
    """(1b): R[s,k] ≤ MADE[s,v] + S[s,v] for every value v that op k reads: made in the stage or retained into it."""
    runs = columns.compute[:, view.uses.op]
    stage, use = np.nonzero(runs >= 0)
    value = view.uses.value[use]
    builder.add_implied(runs[stage, use], columns.made[stage, value], columns.retain[stage, value])


def free_columns(builder: Builder, columns: Columns, view: ArrayView) -> tuple[Ids, Ids]:
    """(7a): binaries FREE of each use, [stages, uses], and of own outputs, [stages, values]."""
    free = builder.variables_at(columns.compute[:, view.uses.op] >= 0)
    several = np.bincount(view.maker, minlength=view.ops) > 1
    own = (columns.compute[:, view.maker] >= 0) & several[view.maker] & ~view.optional & ~view.kept
    return free, builder.variables_at(own)


def _add_free(builder: Builder, free: Ids, runs: Ids, retained: Ids, row: Ids, later: Ids) -> None:
    """(7b, 7c): FREE = 1 exactly if num_hazards (6) = 1 − R + S + Σ R of later users = 0.

    `free`, `runs` and `retained` are columns of FREE, R and S, one a row; `later` those of the later users' R, which
    count in the rows `row`. κ is the largest value that num_hazards can take in a row.
    """
    each = np.arange(len(free))
    kappa = 1.0 + (retained >= 0) + np.bincount(row, minlength=len(free))
    hazards = [Term(each, runs, -1.0), Term(each, retained), Term(row, later)]
    builder.add_rows(len(free), [*hazards, Term(each, free)], lower=0.0)
    builder.add_rows(len(free), [*hazards, Term(each, free, kappa)], upper=kappa - 1.0)


def add_free_of_uses(builder: Builder, columns: Columns, view: ArrayView, free: Ids) -> None:
    """(7b, 7c) for a use of v by op k: num_hazards = 1 − R[s,k] + S[s+1,v] + Σ R[s,j] over the later users j of v."""
    stage, use = np.nonzero(free >= 0)
    number = scattered(free >= 0, np.arange(len(use)))
    earlier, later = _later_uses(view)
    runs = columns.compute[:, view.uses.op]
    pair_stage, pair = np.nonzero((free[:, earlier] >= 0) & (runs[:, later] >= 0))
    _add_free(
        builder,
        free[stage, use],
        runs[stage, use],
        columns.retain[stage + 1, view.uses.value[use]],
        number[pair_stage, earlier[pair]],
        runs[pair_stage, later[pair]],
    )


def _later_uses(view: ArrayView) -> tuple[Ids, Ids]:
    """Pairs of uses of one value, the earlier first."""
    earlier: list[int] = []
    later: list[int] = []
    for value in range(view.values):
        first, last = int(view.uses.first[value]), int(view.uses.last[value])
        for use in range(first, last):
            earlier += [use] * (last - use)
            later += range(use + 1, last + 1)
    return np.array(earlier, dtype=np.int64), np.array(later, dtype=np.int64)


def add_free_of_own(builder: Builder, columns: Columns, view: ArrayView, free_own: Ids) -> None:
    """(7b, 7c) for an op's own output v: num_hazards = 1 − R[s,maker] + S[s+1,v] + Σ R[s,j] over all users j of v."""
    stage, value = np.nonzero(free_own >= 0)
    number = scattered(free_own >= 0, np.arange(len(value)))
    runs = columns.compute[:, view.uses.op]
    use_stage, use = np.nonzero((free_own[:, view.uses.value] >= 0) & (runs >= 0))
    _add_free(
        builder,
        free_own[stage, value],
        columns.compute[stage, view.maker[value]],
        columns.retain[stage + 1, value],
        number[use_stage, view.uses.value[use]],
        runs[use_stage, use],
    )


def add_memory(
    builder: Builder,
    columns: Columns,
    view: ArrayView,
    stage_of: Stages,
    free: Ids,
    free_own: Ids,
) -> Ids:
    """(2, 3, 4, 8): U[s,k], memory while op k runs in stage s, in units of the room; returns its columns.

    U[s,0] is what was retained plus what op 0 makes; U[s,k+1] is U[s,k], less what is freed after op k, plus what op
    k+1 makes. U is at most the room, and U + workspace · R too.
    """
    left, unit = room(view, stage_of)
    weight, workspace = view.size / unit, view.workspace / unit
    slots = np.arange(view.ops) <= stage_of.frontier[:, None] - ~stage_of.advances[:, None]
    stage, op = np.nonzero(slots)
    memory = builder.variables_at(slots, upper=left[slots], integer=False)
    row = scattered(slots, np.arange(len(op)))
    previous = np.where(op > 0, memory[stage, np.maximum(op, 1) - 1], -1)
    retain_stage, retained = np.nonzero(columns.retain >= 0)
    made_stage, made = np.nonzero((columns.made >= 0) & ~view.kept)
    # freed after op k: in the row of slot k + 1, where the stage has one
    use_stage, use = np.nonzero((free >= 0) & _has_next(slots, view.uses.op))
    own_stage, own = np.nonzero((free_own >= 0) & _has_next(slots, view.maker))
    builder.add_rows(
        len(op),
        [
            Term(np.arange(len(op)), memory[stage, op]),
            Term(np.arange(len(op)), previous, -1.0),
            Term(row[retain_stage, 0], columns.retain[retain_stage, retained], -weight[retained]),
            Term(row[made_stage, view.maker[made]], columns.made[made_stage, made], -weight[made]),
            Term(row[use_stage, view.uses.op[use] + 1], free[use_stage, use], weight[view.uses.value[use]]),
            Term(row[own_stage, view.maker[own] + 1], free_own[own_stage, own], weight[own]),
        ],
        lower=0.0,
        upper=0.0,
    )
    stage, op = np.nonzero((columns.compute >= 0) & (workspace > 0))
    each = np.arange(len(op))
    builder.add_rows(
        len(op),
        [Term(each, memory[stage, op]), Term(each, columns.compute[stage, op], workspace[op])],
        upper=left[stage, op],
    )
    return memory


def _has_next(slots: Booleans, op: Ids) -> Booleans:
    """[stages, …] whether the stage has a slot after each op's."""
    wider = np.hstack((slots, np.zeros((len(slots), 1), dtype=np.bool_)))
    return np.asarray(wider[:, op + 1])


def _freed(view: ArrayView, matrices: Matrices) -> tuple[Booleans, Booleans]:
    """[stages, uses] and [stages, values]: FREE of a plan's matrices."""
    after = matrices.retained[1:]
    runs = matrices.computed[:, view.uses.op]
    needed_later = np.zeros_like(runs)
    # from the last use of a value to its first: whether anything later needs it
    for use in range(view.uses.count - 1, -1, -1):
        follower = view.uses.next[use]
        needed_later[:, use] = (
            after[:, view.uses.value[use]] if follower < 0 else needed_later[:, follower] | runs[:, follower]
        )
    own = matrices.computed[:, view.maker] & ~after
    for value in range(view.values):
        first = view.uses.first[value]
        if first >= 0:
            own[:, value] &= ~(needed_later[:, first] | runs[:, first])
    return runs & ~needed_later, own


def _memory_of(view: ArrayView, matrices: Matrices, freed: Booleans, freed_own: Booleans) -> Floats:
    """[stages, ops] U of a plan's matrices in bytes, without workspaces, fixed bytes and kept values."""
    change = np.zeros((len(matrices.computed), view.ops + 1))
    change[:, 0] = (matrices.retained[:-1] & ~view.kept) @ view.size
    several = np.bincount(view.maker, minlength=view.ops) > 1
    own = freed_own & several[view.maker] & ~view.optional & ~view.kept
    rows = np.arange(len(change))[:, None]
    produced = matrices.computed[:, view.maker] & ~view.kept & (~view.optional | matrices.made)
    np.add.at(change, (rows, view.maker[None, :]), produced * view.size)
    np.add.at(change, (rows, view.uses.op[None, :] + 1), -(freed * view.size[view.uses.value]))
    np.add.at(change, (rows, view.maker[None, :] + 1), -(own * view.size))
    return np.asarray(np.cumsum(change, axis=1)[:, :-1])
