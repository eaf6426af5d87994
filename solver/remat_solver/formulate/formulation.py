"""A program together with what its columns mean: how a plan becomes a start, a solution a plan, a bound nanoseconds.

Between plans and programs are matrices: which op runs in which stage, which value passes into it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from remat_ir import Plan, plan_of
from remat_ir.plan import without_unread

from ..array_view import ArrayView, Ids
from ..deadline import look, never
from ..program import Booleans, Floats, Program


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


def recomputable(view: ArrayView, stage_of: Stages, least_stage: int = 0) -> Booleans:
    """[stages, ops] where an op may run: its first computation, or again before a later op's up to its last stage.

    Ops are recomputed in the stages of frontiers from `least_stage` on.
    """
    op, frontier = np.arange(view.ops), stage_of.frontier[:, None]
    again = (op < frontier) & (frontier <= view.last_stage) & (frontier >= least_stage)
    return np.asarray(again | ((op == frontier) & stage_of.advances[:, None]))


LARGEST_WHOLE_COST = 1e7
"""Costs are passed as whole multiples of their common divisor while they add up to less than this: engines then know
that objectives are whole numbers, and prove more."""

SCALED_COST = 1e5
"""What larger costs are scaled to add up to. Measured on one instance (73 ops): HiGHS took 1.1 s at 1e5, 3 s at 100 and
12 s at 1e7."""

RELATIVE_TOLERANCE = 1e-9
ABSOLUTE_TOLERANCE = 1e-5
"""How far an engine's bound, in the program's units, may lie above the truth: float64 sums, and HiGHS's 1e-6."""


@dataclass(frozen=True, eq=False)
class Formulation:
    """A program over stages, and its columns.

    Attributes:
        compute: [stages, ops] the column of R, −1 where an op cannot run.
        retain: [stages + 1, values] the column of S, −1 where a value is never retained into the stage by choice.
        complete: fills a start: [columns] from the matrices of a plan.
        unit_ns: ns per unit of the objective.
        whole: whether every objective is a whole number of units.
    """

    view: ArrayView
    stages: Stages
    program: Program
    compute: Ids
    retain: Ids
    complete: Callable[[Matrices], Floats]
    unit_ns: float
    whole: bool

    def sequence(self, x: Floats) -> tuple[int, ...]:
        """The ops that a solution runs, in order, without those of which nothing is read."""
        computed = np.zeros(self.compute.shape, dtype=np.bool_)
        there = self.compute >= 0
        computed[there] = x[self.compute[there]] > 0.5
        return sequence_of(self.view, self.stages, computed)

    def plan(self, x: Floats) -> Plan:
        """The least-memory plan of a solution; whether it fits in whole bytes is the verifier's to say."""
        return plan_of(self.view.graph, self.sequence(x))

    def start(self, sequence: Sequence[int], stop: Callable[[], bool] = never) -> Floats | None:
        """[columns] the solution of a plan's sequence of ops, or None if the program's space does not hold it.

        Raises:
            TimeUp: `stop` said so.
        """
        look(stop)
        matrices = matrices_of(self.view, self.stages, sequence)
        if matrices is None or bool((matrices.computed & (self.compute < 0)).any()):
            return None
        look(stop)
        x = self.complete(matrices)
        look(stop)
        return x if self.program.violation(x) <= 1e-6 else None

    def bound_ns(self, bound: float) -> int:
        """A proved bound in whole ns, from an engine's bound: rounded down by the engine's tolerance, then up to the
        next cost that a plan can have, for costs are whole numbers."""
        if not math.isfinite(bound):
            return 0
        safe = bound - ABSOLUTE_TOLERANCE - RELATIVE_TOLERANCE * abs(bound)
        return math.ceil(safe) * round(self.unit_ns) if self.whole else math.ceil(safe * self.unit_ns)


def cost_units(view: ArrayView) -> tuple[Floats, float, bool]:
    """[ops] costs in units, ns per unit, and whether the units are whole."""
    costs = view.graph.op_cost_ns
    divisor = math.gcd(*costs)
    total = view.graph.total_cost_ns
    if divisor and total / divisor <= LARGEST_WHOLE_COST:
        return view.cost / divisor, float(divisor), True
    if not total:
        return view.cost.astype(np.float64), 1.0, True
    unit = total / SCALED_COST
    return view.cost / unit, unit, False


BYTES_PER_ENTRY = 1500
BASE_BYTES = 100_000_000
"""Measured: HiGHS's process held 0.27 GB at the root of a program of 350 thousand coefficients, 0.24 GB while branching
on one of 120 thousand, 0.1 GB on small ones. The arrays of the program while it is built stay below that."""
SECONDS_PER_ENTRY = 1e-7
"""Measured: from 0.05 to 0.2 µs of processor time to write one; its hand-over and the engine's reading take no less."""


def entries(view: ArrayView, *, sweeps: int = 1, first: int = 0, pairs: bool = False) -> int:
    """About how many coefficients the program has that are not zero.

    Each stage of frontier f has rows for the uses by ops up to f, the values of ops before f, and the ops up to f:
    about 8, 5 and 3 coefficients for each. The paper's rows 7b and 7c also have one for each pair of uses of a value.
    """
    # in how many stages each is there: those whose frontier is its op or later
    of_use = view.ops - np.maximum(view.uses.op, first)
    of_value = view.ops - np.maximum(view.maker + 1, first)
    of_op = view.ops - np.maximum(np.arange(view.ops), first)
    total = 8 * int(of_use.sum()) + 5 * int(of_value.sum()) + 3 * int(of_op.sum())
    if pairs and view.uses.count:
        total += 2 * int((of_use * (np.arange(view.uses.count) - view.uses.first[view.uses.value])).sum())
    return total * sweeps


def engine_bytes(coefficients: int) -> int:
    """About how much memory an engine needs for a program of so many coefficients, in bytes."""
    return coefficients * BYTES_PER_ENTRY + BASE_BYTES
