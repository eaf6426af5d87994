"""A plan whose generated code fits the budget: planned on regions, generated without compiling, replanned if over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from remat_ir import Answer, Compute, Graph, Plan, Problem, verify

from .. import _compat, _compat_inductor
from ..capture.operations import Operations
from ..errors import CaptureError, NothingFound
from ..lowering.lower import lower
from ..planning.budget import readable
from ..planning.planner import plan_or_raise
from ..profiling.profile import Table, profile_kernels, signature
from .joint import Joint, with_updates
from .memory import step_peak, tangent_bytes

log = logging.getLogger("remat")

TRIES = 5
"""How many plans are asked for at most."""

MOST_STEPS = 2.0
"""Computations for each op beyond which a plan is not lowered: Inductor compiles such plans for minutes."""

WORTH_A_TRY = 0.05
"""The share of the budget beyond the fixed bytes that has to be left over before a larger plan is tried."""


@dataclass(frozen=True, eq=False)
class Carried:
    """One training graph that was planned and compiled.

    Attributes:
        graph: the graph of regions that was planned.
        budget_bytes: what the step has to keep to.
        answer: the planner's answer, verified on `graph` for the planning budget that it carries.
        predicted_bytes: the peak of the code that Inductor generates for the plan, fixed bytes included.
        estimate_bytes: Inductor's own estimates for the two graphs, which know neither workspaces nor what else lives.
        tries: the planning budgets that were tried, in order, with the peak that each came to; None where there was
            no plan, or one that was not lowered.
        compiled: what Inductor then generated when it compiled the backward graph (True) and the forward graph (False).
    """

    graph: Graph
    budget_bytes: int
    answer: Answer
    predicted_bytes: int
    estimate_bytes: tuple[int, int]
    tries: tuple[tuple[int, int | None], ...]
    forward: fx.GraphModule = field(repr=False)
    backward: fx.GraphModule = field(repr=False)
    compiled: dict[bool, _compat_inductor.Generated] = field(default_factory=dict, repr=False)

    @property
    def activation_bytes(self) -> int:
        """The predicted peak above the fixed bytes: what a measurement of the step sees."""
        return self.predicted_bytes - self.graph.fixed_bytes


@dataclass(eq=False)
class Search:
    """The search for a planning budget whose plan, as Inductor runs it, fits the real one.

    Inductor's fusion holds some tensors longer than the plan, and never makes others; what its generated code allocates
    decides. A plan over the budget is asked for again with that much less, one well under it with that much more.
    Ranks that train in step go by the highest of their peaks, so that all of them ask the same.
    """

    joint: Joint
    step: Operations
    graph: Graph
    results: int
    budget: int
    ask: Callable[[Problem], Answer]
    table: Table | None
    agreed: Callable[[int], int]
    tries: list[tuple[int, int | None]] = field(default_factory=list)
    best: Carried | None = None
    workspaces: dict[str, int] = field(default_factory=dict)
    fits: int = 0
    fails: int | None = None

    def run(self) -> Carried:
        """The cheapest plan found that fits.

        Raises:
            BudgetTooSmall, NothingFound: there is none; the message says what would do.
        """
        planning: int | None = self.budget
        least: int | None = None
        while planning is not None and len(self.tries) < TRIES:
            answer = self.ask(Problem(self.graph, planning))
            peak = self._try(planning, answer)
            self.tries.append((planning, peak))
            if peak is not None:
                least = peak if least is None else min(least, peak)
            planning = self._next(planning, answer, peak)
        if self.best is not None:
            log.info("planned under Inductor: %s", _told(self.best, self.tries))
            return self._with_tries(self.best)
        if least is None:
            plan_or_raise(answer)
        over = f"the smallest of {len(self.tries)} plans needs {readable(least)}" if least else "its plans thrash"
        raise NothingFound(
            f"No plan's generated code fits {readable(self.budget)}: {over}; raise the budget, or use inner='eager'",
            answer,
        )

    def _with_tries(self, carried: Carried) -> Carried:
        return Carried(**{**vars(carried), "tries": tuple(self.tries)})

    def _try(self, planning: int, answer: Answer) -> int | None:
        """The peak of an answer's plan in the code generated for it; None without a plan worth lowering."""
        if answer.plan is None:
            return None
        if not isinstance(answer.plan, Plan):
            raise CaptureError(f"a training step needs a plan of its graph, not {type(answer.plan).__name__}")
        problem = Problem(self.graph, planning)
        verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
        computes = sum(isinstance(s, Compute) for s in answer.plan.steps)
        if computes > MOST_STEPS * len(self.step.ops):
            log.info(
                "a plan of %d steps for %d ops is not lowered: Inductor would compile it for minutes",
                computes,
                len(self.step.ops),
            )
            return None
        forward, backward = with_updates(self.joint, lower(self.step, answer.plan))
        first, second = _compat_inductor.dry_run(forward, backward, self.results)
        saved = len(forward.graph.output_node().args[0]) - self.results  # type: ignore[arg-type]
        above = step_peak(first, second, tangent_bytes(backward, saved), self.results, self._workspace)
        peak = self.agreed(self.graph.fixed_bytes + above)
        carried = Carried(
            self.graph, self.budget, answer, peak, (first.estimate_bytes, second.estimate_bytes), (), forward, backward
        )
        if peak <= self.budget and (self.best is None or (answer.cost_ns or 0) < (self.best.answer.cost_ns or 0)):
            self.best = carried
        return peak

    def _next(self, planning: int, answer: Answer, peak: int | None) -> int | None:
        """The planning budget to try next, or None."""
        if peak is None:
            # regions count more than fused code needs: what is infeasible for them may still fit
            least = answer.least_budget_bytes if answer.plan is None else None
            return least if least not in {tried for tried, _ in self.tries} else None
        reached = min(planning, answer.peak_bytes or planning)
        if peak > self.budget:
            self.fails = reached if self.fails is None else min(self.fails, reached)
            wanted = reached - (peak - self.budget)
            return wanted if wanted > self.fits else (self.fits + self.fails) // 2
        self.fits = max(self.fits, reached)
        room = self.budget - peak
        if not answer.overhead or room < WORTH_A_TRY * (self.budget - self.graph.fixed_bytes):
            return None
        wanted = max(planning, reached) + room
        return wanted if self.fails is None or wanted < self.fails else (self.fits + self.fails) // 2

    def _workspace(self, node: fx.Node) -> int:
        """Bytes that one of torch's own kernels needs while it runs in the generated code, in its layouts there."""
        key = signature(node)
        if key not in self.workspaces:
            with _compat.only_real_tensors():
                self.workspaces[key] = profile_kernels([node], self.table).kernels[node].workspace_bytes
        return self.workspaces[key]


def _told(carried: Carried, tries: list[tuple[int, int | None]]) -> str:
    return (
        f"{readable(carried.predicted_bytes)} predicted within {readable(carried.budget_bytes)}, overhead "
        f"{carried.answer.overhead:.1%}, {len(tries)} plans tried"
    )
