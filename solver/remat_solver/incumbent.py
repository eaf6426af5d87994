"""The best plan and the best bound so far: the one place that methods write to, from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from remat_ir import Answer, AnyPlan, Problem, Progress, Status, gap_of, problem_digest, verify

from .deadline import Deadline


class Incumbent:
    """What a solve has found and proved so far; every plan passes the judge on its way in.

    Methods offer plans and raise bounds; whoever started the solve reads the answer. Improvements are reported as
    `Progress`. All methods may be called from several threads.

    Attributes:
        problem: the original problem, on which plans are judged.
        deadline: when to stop.
        plan, cost_ns, peak_bytes: the best plan, or None.
        bound_ns: proved for every plan of the whole space.
    """

    def __init__(
        self,
        problem: Problem,
        deadline: Deadline,
        max_gap: float = 0.0,
        on_progress: Callable[[Progress], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        self.problem = problem
        self.deadline = deadline
        self.max_gap = max_gap
        self.plan: AnyPlan | None = None
        self.cost_ns: int | None = None
        self.peak_bytes: int | None = None
        self.bound_ns = problem.subject.total_cost_ns
        self.least_budget_bytes: int | None = None
        self.least_budget_bound_bytes: int | None = None
        self.infeasible = False
        self.reason = ""
        self._notes: list[str] = []
        self._restricted: dict[tuple[str, ...], int] = {}
        self._exhausted: tuple[str, ...] | None = None
        self._on_progress = on_progress
        self._cancelled = cancelled
        self._limit: str | None = None
        self._closed = False
        self._lock = threading.RLock()

    def offer(self, plan: AnyPlan, source: str) -> bool:
        """Take a plan if it is cheaper than the incumbent, after the judge has passed it.

        Raises:
            InvalidPlan: the plan breaks a rule or the budget: a bug in whoever made it.
        """
        verdict = verify(self.problem, plan)
        with self._lock:
            if self._closed:
                return False
            if self.cost_ns is not None and verdict.cost_ns >= self.cost_ns:
                return False
            self.plan, self.cost_ns, self.peak_bytes = plan, verdict.cost_ns, verdict.peak_bytes
            if self.least_budget_bytes is None or verdict.peak_bytes < self.least_budget_bytes:
                self.least_budget_bytes = verdict.peak_bytes
            self._report(source, plan)
            return True

    def raise_bound(self, bound_ns: int, source: str, within: tuple[str, ...] = ()) -> None:
        """Record a proved lower bound on the cost; `within` names the restrictions inside which it holds."""
        with self._lock:
            if self._closed:
                return
            if within:
                if bound_ns > self._restricted.get(within, -1):
                    self._restricted[within] = bound_ns
                    self._report(source)
            elif bound_ns > self.bound_ns:
                self.bound_ns = bound_ns
                self._report(source)

    def prove_infeasible(self, reason: str, least_budget_bound_bytes: int | None = None) -> None:
        """Record that no plan of the whole space fits the budget; `reason` is one sentence for a person."""
        with self._lock:
            self.infeasible, self.reason = True, reason
            self.needs_at_least(least_budget_bound_bytes)

    def nothing_within(self, restriction: tuple[str, ...], reason: str) -> None:
        """Record that a restricted space holds no plan; the whole space may."""
        with self._lock:
            self._exhausted, self.reason = restriction, reason

    def needs_at_least(self, budget_bytes: int | None) -> None:
        """Record that every plan of the whole space needs at least this budget."""
        with self._lock:
            if budget_bytes is not None and budget_bytes > (self.least_budget_bound_bytes or 0):
                self.least_budget_bound_bytes = budget_bytes

    def suffices(self, budget_bytes: int) -> None:
        """Record that a plan with this peak is known."""
        with self._lock:
            if self.least_budget_bytes is None or budget_bytes < self.least_budget_bytes:
                self.least_budget_bytes = budget_bytes

    def best_bound(self) -> tuple[int, tuple[str, ...]]:
        """The bound to report and the restrictions it needs: none, if the whole-space bound is within the gap."""
        with self._lock:
            bound = self.bound_ns
            within: tuple[str, ...] = ()
            if self.cost_ns is not None and gap_of(self.cost_ns, bound) <= self.max_gap:
                return min(bound, self.cost_ns), within
            for names, restricted in sorted(self._restricted.items()):
                if restricted > bound:
                    bound, within = restricted, names
            # a plan from outside a restriction may be cheaper than the restricted optimum
            return (bound if self.cost_ns is None else min(bound, self.cost_ns)), within

    def stopped(self) -> bool:
        """Whether there is a reason to stop: infeasible, gap reached, cancelled, or out of time."""
        with self._lock:
            if self.infeasible or self._closed:
                return True
            if self.cost_ns is not None and gap_of(self.cost_ns, self.best_bound()[0]) <= self.max_gap:
                return True
            if self._cancelled is not None and self._cancelled():
                self._limit = "cancel"
                return True
            if self.deadline.passed():
                self._limit = self._limit or "time"
                return True
            return False

    @property
    def exhausted(self) -> bool:
        """Whether a restricted space is known to hold no plan."""
        return self._exhausted is not None

    def close(self) -> None:
        """Have everybody who works on this incumbent stop: there is nothing left to do, or something broke.

        Plans and bounds that still come are not taken.
        """
        with self._lock:
            self._closed = True

    def stop_for(self, limit: str) -> None:
        """Record what ended the solve from outside: "memory", for one."""
        with self._lock:
            self._limit = limit

    def note(self, sentence: str) -> None:
        """Add a sentence for a person to the answer's message."""
        with self._lock:
            self._notes.append(sentence)

    def answer(self, method: str) -> Answer:
        """What there is to say now, as the final answer of a solve."""
        with self._lock:
            total = self.problem.subject.total_cost_ns
            bound, within = self.best_bound()
            gap = None if self.cost_ns is None else gap_of(self.cost_ns, bound)
            status, limit = self._ending(bound)
            return Answer(
                status=status,
                method=method,
                budget_bytes=self.problem.budget_bytes,
                seconds=round(self.deadline.elapsed(), 6),
                limit=limit,
                restricted_to=within if self._exhausted is None else self._exhausted,
                least_budget_bytes=self.least_budget_bytes,
                least_budget_bound_bytes=self.least_budget_bound_bytes,
                digest=problem_digest(self.problem),
                message=" ".join([self._message(status, limit, gap), *self._notes]),
                plan=self.plan,
            ).priced(total, self.cost_ns, None if self.infeasible else bound, self.peak_bytes)

    def _ending(self, bound_ns: int) -> tuple[Status, str | None]:
        if self.infeasible:
            return Status.INFEASIBLE, None
        if self.cost_ns is None:
            if self._limit == "cancel":
                return Status.CANCELLED, "cancel"
            return Status.NOTHING_FOUND, None if self._exhausted is not None else self._limit
        if bound_ns >= self.cost_ns:
            return Status.OPTIMAL, None
        if gap_of(self.cost_ns, bound_ns) <= self.max_gap:
            return Status.FEASIBLE, "gap"
        return (Status.CANCELLED if self._limit == "cancel" else Status.FEASIBLE), self._limit

    def _message(self, status: Status, limit: str | None, gap: float | None) -> str:
        if status is Status.OPTIMAL:
            return "No plan costs less."
        if gap is not None:
            ends = {
                "gap": "the gap that was asked for is reached",
                "time": "the time is up",
                "cancel": "cancelled",
                "memory": "the solver's memory is used up",
                None: "the method has run to its end",
            }
            return f"A plan within {100 * gap:.3g} % of the best possible; {ends[limit]}."
        if self.reason:
            return self.reason
        if limit == "time":
            return "No plan was found in the time given, and none was proved impossible; give it more time."
        return "The method has run to its end without a plan."

    def _report(self, source: str, plan: AnyPlan | None = None) -> None:
        if self._on_progress is not None:
            bound, within = self.best_bound()
            elapsed = self.deadline.elapsed()
            self._on_progress(Progress(elapsed, self.cost_ns, bound, source, plan, within, self.bound_ns))
