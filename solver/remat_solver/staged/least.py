"""The least memory, bounded from below: the relaxation with its capacity as the variable that is minimised.

The rows of the relaxation hold for every plan whatever its budget, if the budget stands on their right side: with b ≥
the plan's peak, in units of memory rounded up, each memory row reads Σ floor(M / u) x − b ≤ floor(− constants / u). So
the least b for which the relaxation has a solution is a bound on every budget that suffices, in the whole space, and
the proof goes on as that of a cost does: cut where the solution needs more than b. Coarse stage 0, in which nothing is
charged, ends before the first op at which the smallest known budget is exceeded; that it may be exceeded there under
smaller ones makes the bound no less true, and is cut apart like the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from remat_ir import Graph, Problem

from ..array_view import ArrayView, Trace, trace, view_of
from ..backends.engine import Engine
from ..deadline import Deadline, TimeUp, never
from ..program import Builder, Floats, Program, Term
from .relaxation import Columns, primal_heuristic, relax
from .rows import Recomputations, add_recomputations, add_to, violated_recomputations
from .scale import Scale, balance_of, balanced, scale_of

_LOOSE = 0.1
"""Recomputations per op that a solution may have more than it needs: they only say where to cut."""


class LeastProof:
    """Raises the bound on the least budget of a graph below `known`, a budget that suffices.

    `low` and `known` are in bytes, fixed ones included. Work goes on where the last call of `run` ended.
    """

    def __init__(self, graph: Graph, low: int, known: int) -> None:
        self.graph, self.low, self.known = graph, low, known
        self._view: ArrayView = view_of(Problem(graph, max(low, known - 1)))
        self._bare: ArrayView = replace(self._view, capacity=0)
        self._scale: Scale = scale_of(self._view)
        tight_from, last = self._view.tight_from, self._view.ops - 1
        self._cuts = {min(max(0, tight_from - 1), last), last}
        self._recomputations: Recomputations = {}
        sizes = np.concatenate((self._view.size, self._view.workspace))
        self._exact = not (sizes % self._scale.bytes).any()
        self._weight = 1.0

    def run(
        self,
        engine: Engine,
        deadline: Deadline,
        *,
        stopped: Callable[[], bool] = never,
    ) -> bool:
        """Go on until the deadline, or until nothing is left to tell apart; whether there is more to do."""

        def over() -> bool:
            return deadline.passed() or stopped()

        while not over():
            try:
                program, columns = self._write(over)
            except TimeUp:
                return True
            factor = balance_of(program)
            outcome = engine.run(
                balanced(program),
                deadline=deadline,
                stopped=stopped,
                absolute_gap=factor * _LOOSE * self._view.ops,
                on_improvement=lambda news, factor=factor: self._raise(news.bound / factor),  # type: ignore[misc]
            )
            if outcome.status == "infeasible":
                self._raise_to(self.known)
                return False
            self._raise(outcome.bound / factor)
            if outcome.x is None or outcome.status != "optimal":
                return True
            run = trace(self._view, primal_heuristic(self._view, columns, outcome.x))
            if self.low >= self.known or not self._refine(columns, outcome.x, run):
                return False
        return True

    def _write(self, stop: Callable[[], bool]) -> tuple[Program, Columns]:
        unit, fixed = self._scale.bytes, self.graph.fixed_bytes
        builder = Builder(stop)
        low, high = max(0, self.low - fixed) // unit, -(-max(0, self.known - 1 - fixed) // unit)
        budget = builder.variables(1, cost=1.0, lower=float(low), upper=float(max(low, high)))
        lent = (Term(0, budget, -1.0),)
        columns = relax(self._bare, tuple(sorted(self._cuts)), self._scale, builder, lent)
        add_recomputations(self._bare, columns, self._recomputations, builder, self._scale, lent)
        program = builder.program()
        cost = np.zeros(program.columns)
        runs = np.concatenate([run[run >= 0] for run in columns.runs])
        cost[runs] = 1.0
        # all recomputations together weigh less than one unit of memory; without any weight a solution has thousands
        # that serve nothing, and does not show where to cut
        cost[budget] = self._weight = float(len(runs) + 1)
        return replace(program, cost=cost), columns

    def _raise(self, objective: float) -> None:
        if np.isfinite(objective):
            units = int(np.floor(np.ceil(objective - 1e-3) / self._weight))
            # where units are not exact, a peak is rounded up to them
            least = units * self._scale.bytes if self._exact else (units - 1) * self._scale.bytes + 1
            self._raise_to(self.graph.fixed_bytes + least)

    def _raise_to(self, budget_bytes: int) -> None:
        if budget_bytes > self.low:
            self.low = min(budget_bytes, self.known)

    def _refine(self, columns: Columns, x: Floats, run: Trace) -> bool:
        """Cut where the sequence exceeds the solution's own b most; False where all that can be is told apart."""
        capacity = max(self.low - self.graph.fixed_bytes, round(float(x[0])) * self._scale.bytes)
        view = replace(self._view, capacity=capacity)
        new = add_to(self._recomputations, violated_recomputations(view, columns, x))
        for position in np.argsort(-run.memory, kind="stable").tolist():
            if run.memory[position] <= capacity:
                break
            stage = int(run.stage[position])
            for cut in (stage, stage - 1):
                if cut >= 0 and cut not in self._cuts:
                    self._cuts.add(cut)
                    return True
        return new
