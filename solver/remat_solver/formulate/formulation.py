"""A program together with what its columns mean: how a plan becomes a start, a solution a plan, a bound nanoseconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from remat_ir import Plan, plan_of

from ..array_view import ArrayView, Ids
from ..deadline import look, never
from ..program import Floats, Program
from .schedule import Matrices, Stages, matrices_of, sequence_of

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
