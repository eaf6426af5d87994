"""Between plans and the matrices of the stage programs: which op runs in which stage, which value passes into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from remat_ir.plan import without_unread

from ..array_view import ArrayView, Ids
from ..program import Booleans


@dataclass(frozen=True, eq=False)
class Stages:
    """The rows of R and S (Checkmate, Section 4.2): ops run in index order within a stage.

    Attributes:
        frontier: [stages] the op up to which a stage may compute.
        advances: [stages] whether the stage ends with the first computation of its frontier. One in `sweeps` of them
            does; the others only recompute (Checkmate, Section 4.10).
        sweeps: stages per op.
    """

    frontier: Ids
    advances: Booleans
    sweeps: int

    @property
    def count(self) -> int:
        """The number of stages."""
        return len(self.frontier)


def stages(ops: int, sweeps: int = 1, first: int = 0) -> Stages:
    """`sweeps` stages for each op from `first` on; the ops before `first` run once each, before all stages."""
    frontier = np.repeat(np.arange(first, ops, dtype=np.int64), sweeps)
    advances = np.zeros(len(frontier), dtype=np.bool_)
    advances[sweeps - 1 :: sweeps] = True
    return Stages(frontier, advances, sweeps)


def sequence_of(view: ArrayView, stage_of: Stages, computed: Booleans) -> tuple[int, ...]:
    """The ops in the order in which they run, by a row-major scan (Checkmate, Algorithm 1), unread ones left out.

    Args:
        computed: [stages, ops] R.
    """
    before = int(stage_of.frontier[0]) if stage_of.count else view.ops
    rows, ops = np.nonzero(computed)
    # after its frontier has been computed, a stage has nothing left to do
    inside = ops <= stage_of.frontier[rows]
    order = [*range(before), *ops[inside].tolist()]
    return without_unread(view.graph, order)


@dataclass(frozen=True, eq=False)
class Matrices:
    """A plan as 0/1 matrices, with the least retention.

    Attributes:
        computed: [stages, ops] R.
        retained: [stages + 1, values] S; the row of stage 0 holds what is there before all stages.
        made: [stages, values] whether the stage makes the value and something reads this instance.
    """

    computed: Booleans
    retained: Booleans
    made: Booleans


def matrices_of(view: ArrayView, stage_of: Stages, sequence: Sequence[int]) -> Matrices | None:
    """The matrices of a sequence; None if it needs more sweeps than a stage has.

    With one sweep, what a stage recomputes is put into op order, each op once: for a sequence that is not so already
    this is another schedule, whose memory may differ, and it may lack an input. What is recomputed before all stages
    is left out: there is room there to keep everything.
    """
    first = int(stage_of.frontier[0]) if stage_of.count else view.ops
    runs = _runs(view, sequence)
    computed = np.zeros((stage_of.count, view.ops), dtype=np.bool_)
    order, where = list(range(first)), [-1] * first
    for op in range(first, view.ops):
        sweeps = runs[op] or [[]]
        if len(sweeps) > stage_of.sweeps:
            if stage_of.sweeps > 1:
                return None
            sweeps = [sorted({again for run in sweeps for again in run})]
        sweeps[-1].append(op)
        last_stage = (op - first + 1) * stage_of.sweeps - 1
        for stage, run in enumerate(sweeps, last_stage - len(sweeps) + 1):
            computed[stage, run] = True
            order += run
            where += [stage] * len(run)
    retention = _retention(view, stage_of.count, order, where)
    return None if retention is None else Matrices(computed, *retention)


def _runs(view: ArrayView, sequence: Sequence[int]) -> list[list[list[int]]]:
    """[ops] what is recomputed between the first computation of the op before and its own, in ascending runs."""
    runs: list[list[list[int]]] = [[] for _ in range(view.ops + 1)]
    done = 0
    for op in without_unread(view.graph, sequence):
        if op == done:
            done += 1
        elif runs[done] and op > runs[done][-1][-1]:
            runs[done][-1].append(op)
        else:
            runs[done].append([op])
    return runs


def _retention(
    view: ArrayView, count: int, order: Sequence[int], where: Sequence[int]
) -> tuple[Booleans, Booleans] | None:
    retained = np.zeros((count + 1, view.values), dtype=np.bool_)
    made = np.zeros((count, view.values), dtype=np.bool_)
    current: dict[int, int] = {}
    for op, stage in zip(order, where, strict=True):
        for value in view.graph.op_inputs[op]:
            if value not in current:
                return None
            born = current[value]
            retained[born + 1 : stage + 1, value] = True
            if born >= 0:
                made[born, value] = True
        for value in view.graph.op_values[op]:
            current[value] = stage
    return retained, made


def recomputable(view: ArrayView, stage_of: Stages, allowed: Booleans | None = None) -> Booleans:
    """[stages, ops] where an op may run: its first computation, or again before a later op's up to its last stage.

    `allowed`: [stages, ops] where recomputing is allowed at all; everywhere if None.
    """
    op = np.arange(view.ops)
    again = (op < stage_of.frontier[:, None]) & (stage_of.frontier[:, None] <= view.last_stage)
    if allowed is not None:
        again &= allowed
    return np.asarray(again | ((op == stage_of.frontier[:, None]) & stage_of.advances[:, None]))
