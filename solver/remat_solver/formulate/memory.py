"""The memory rows of the tight program: U from slot to slot, and the first computations once more as knapsacks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..array_view import ArrayView, Ids
from ..program import Booleans, Builder, Floats, Term
from .columns import Columns, picked, room
from .residency import Residency
from .schedule import Stages


@dataclass(frozen=True, eq=False)
class Memory:
    """The U columns, [slots] in stage and op order, and the change of memory at each slot as (slot, column, weight)."""

    column: Ids
    begins_stage: Booleans
    changes: tuple[Term, ...]

    def fill(self, x: Floats) -> None:
        """Set U in a start whose other columns are set."""
        change = np.zeros(len(self.column))
        for term in self.changes:
            np.add.at(change, np.asarray(term.row), x[np.asarray(term.column)] * np.asarray(term.value))
        total = np.cumsum(change)
        starts = np.flatnonzero(self.begins_stage)
        before = np.where(starts > 0, total[starts - 1], 0.0)
        x[self.column] = total - np.repeat(before, np.diff([*starts, len(total)]))


def add_memory(builder: Builder, columns: Columns, view: ArrayView, stage_of: Stages, held: Residency) -> Memory:
    """(8) at each slot (s,k) where op k may run: U[s,k] + workspace · R[s,k] ≤ room, in units of the room.

    U is written as changes from slot to slot, which keeps rows short. Until its maker's index has passed, a value
    counts S[s,v]; while its maker runs, MADE[s,v] too; then `begins` (A of its first use, or S[s+1,v]); after each use
    `after`. At a slot whose op does not run this is no more than what the op before left behind, so the rows of idle
    slots cut off nothing.
    """
    left, unit = room(view, stage_of)
    weight, workspace = view.size / unit, view.workspace / unit
    stage, op = np.nonzero(columns.compute >= 0)
    slots = len(op)
    slot = np.full(columns.compute.shape, -1, dtype=np.int64)
    slot[stage, op] = np.arange(slots)
    following = _following(slot)
    begins_stage = np.concatenate(([True], stage[1:] != stage[:-1])) if slots else np.zeros(0, dtype=np.bool_)
    first_slot = np.zeros(stage_of.count, dtype=np.int64)
    first_slot[stage[begins_stage]] = np.flatnonzero(begins_stage)
    charged = ~view.kept
    retain_stage, retained = np.nonzero(columns.retain[:-1] >= 0)
    made_stage, made = np.nonzero((columns.made >= 0) & charged)
    passed = following[:, view.maker]  # the first slot after a value's maker
    turn_stage, turn = np.nonzero((passed >= 0) & charged)
    turn_slot = passed[turn_stage, turn]
    used = np.where(held.column >= 0, following[:, view.uses.op], -1)
    use_stage, use = np.nonzero(used >= 0)
    use_slot, use_weight = used[use_stage, use], weight[view.uses.value[use]]
    changes = (
        Term(first_slot[retain_stage], columns.retain[retain_stage, retained], weight[retained]),
        Term(slot[made_stage, view.maker[made]], columns.made[made_stage, made], weight[made]),
        picked(turn_slot, held.begins[turn_stage, turn], weight[turn]),
        picked(turn_slot, columns.made[turn_stage, turn], -weight[turn]),
        picked(turn_slot, columns.retain[turn_stage, turn], -weight[turn]),
        picked(use_slot, held.after[use_stage, use], use_weight),
        Term(use_slot, held.column[use_stage, use], -use_weight),
    )
    limit = left[stage, op]
    first = builder.lower_of(columns.compute[stage, op]) > 0
    column = builder.variables(slots, upper=np.where(first, limit - workspace[op], limit), integer=False)
    each, rest = np.arange(slots), np.flatnonzero(~begins_stage)
    zero = np.zeros(slots)
    negated = tuple(Term(term.row, term.column, -np.asarray(term.value)) for term in changes)
    builder.add_rows(slots, [Term(each, column), Term(rest, column[rest - 1], -1.0), *negated], lower=zero, upper=zero)
    busy = np.flatnonzero(~first & (workspace[op] > 0))
    each = np.arange(len(busy))
    builder.add_rows(
        len(busy),
        [Term(each, column[busy]), Term(each, columns.compute[stage[busy], op[busy]], workspace[op[busy]])],
        upper=limit[busy],
    )
    return Memory(column, begins_stage, changes)


def _following(slot: Ids) -> Ids:
    """[stages, ops] the first slot of the stage after each op, or −1."""
    following = np.full(slot.shape, -1, dtype=np.int64)
    for op in range(slot.shape[1] - 2, -1, -1):
        following[:, op] = np.where(slot[:, op + 1] >= 0, slot[:, op + 1], following[:, op + 1])
    return following


def add_frontier_memory(builder: Builder, columns: Columns, view: ArrayView, stage_of: Stages) -> None:
    """Memory at slot (t,t): inputs and outputs of t, and what is retained next to them, S[s+1,v] ≤ room, as a knapsack.

    It repeats what U says there: at its first computation, op t is the last of its stage, so what is resident next to
    its inputs is what the next stage retains.
    """
    left, unit = room(view, stage_of)
    weight = view.size / unit
    stage = np.flatnonzero(stage_of.advances)
    op = stage_of.frontier[stage]
    reads = np.zeros((view.ops, view.values), dtype=np.bool_)
    reads[view.uses.op, view.uses.value] = True
    beside = (columns.retain[stage + 1] >= 0) & ~reads[op] & (view.maker != op[:, None])
    makes = (columns.made[stage] >= 0) & (view.maker == op[:, None]) & ~view.kept
    row, value = np.nonzero(beside)
    made_row, made = np.nonzero(makes)
    inputs = reads[op] @ weight
    builder.add_rows(
        len(stage),
        [
            Term(row, columns.retain[stage[row] + 1, value], weight[value]),
            Term(made_row, columns.made[stage[made_row], made], weight[made]),
        ],
        upper=left[stage, op] - inputs - view.workspace[op] / unit,
    )
