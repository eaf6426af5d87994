"""The best plan and the best bound so far: the one place that methods write to, from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from remat_ir import Answer, AnyPlan, Problem, Progress, Status, gap_of, problem_digest, verify
from remat_ir.restrictions import gap_sentence, optimal_sentence

from .contradiction import refuted, report_bound, report_budget
from .deadline import Deadline

NO_PLAN_NS = 1 << 62
"""A bound above every cost: that a space holds no plan at all."""


class Incumbent:
    """What a solve has found and proved so far; every plan passes the judge on its way in.

    Methods offer plans and raise bounds; whoever started the solve reads the answer. Improvements are reported as
    `Progress`. All methods may be called from several threads.

    A verified plan refutes every bound above its cost in the spaces that it lies in: such a bound is logged with its
    instance and forgotten, and nothing more is taken from its source (`remat_solver.contradiction`).

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
        self._sources: dict[tuple[str, ...], str] = {}
        self._distrusted: set[str] = set()
        self._searched: tuple[str, ...] | None = None
        self._exhausted = False
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
            self._refute(plan, verdict.cost_ns)
            self._report(source, plan)
            return True

    def raise_bound(self, bound_ns: int, source: str, within: tuple[str, ...] = ()) -> None:
        """Record a proved lower bound on the cost; `within` names the restrictions inside which it holds."""
        with self._lock:
            if self._closed or source in self._distrusted:
                return
            known = self._restricted.get(within, -1) if within else self.bound_ns
            if bound_ns <= known:
                return
            if self.plan is not None and refuted(self.problem, self.plan, self.cost_ns, bound_ns, within):
                report_bound(self.problem, self.plan, bound_ns, within, source)
                self._distrusted.add(source)
                return
            self._sources[within] = source
            if within:
                self._restricted[within] = bound_ns
            else:
                self.bound_ns = bound_ns
            self._report(source)

    def _refute(self, plan: AnyPlan, cost_ns: int) -> None:
        """Forget the bounds that a new plan shows to be wrong, and a claim that there is no plan."""
        for within, bound in [((), self.bound_ns), *sorted(self._restricted.items())]:
            if not refuted(self.problem, plan, cost_ns, bound, within):
                continue
            source = self._sources.get(within, "a bound")
            report_bound(self.problem, plan, bound, within, source)
            self._distrusted.add(source)
            if within:
                del self._restricted[within]
            else:
                self.bound_ns = self.problem.subject.total_cost_ns
        if self.infeasible:
            report_budget(self.problem, plan, self.problem.budget_bytes + 1, self.peak_bytes or 0, self.reason)
            self.infeasible, self.reason = False, ""
        self._needs_no_more(plan)

    def _needs_no_more(self, plan: AnyPlan | None) -> None:
        """Forget a budget that is claimed to be necessary and that a known plan does not need."""
        claimed, known = self.least_budget_bound_bytes, self.least_budget_bytes
        if claimed is not None and known is not None and claimed > known:
            report_budget(self.problem, plan, claimed, known, "a bound on the budget")
            self.least_budget_bound_bytes = None

    def prove_infeasible(self, reason: str, least_budget_bound_bytes: int | None = None) -> None:
        """Record that no plan of the whole space fits the budget; `reason` is one sentence for a person."""
        with self._lock:
            if self.plan is not None:
                report_budget(self.problem, self.plan, self.problem.budget_bytes + 1, self.peak_bytes or 0, reason)
                return
            self.infeasible, self.reason = True, reason
            self.needs_at_least(least_budget_bound_bytes)

    def nothing_within(self, restriction: tuple[str, ...], reason: str) -> None:
        """Record a proof that a restricted space holds no plan; the whole space may."""
        with self._lock:
            if refuted(self.problem, self.plan, self.cost_ns, NO_PLAN_NS, restriction):
                assert self.plan is not None
                report_bound(self.problem, self.plan, NO_PLAN_NS, restriction, reason)
                return
            self._exhausted = True
            self.ends_without_plan(reason, restriction)

    def ends_without_plan(self, reason: str, searched: tuple[str, ...] = ()) -> None:
        """Record that a method has run to its end without a plan, in the space that it searched; nothing is proved."""
        with self._lock:
            self._searched, self.reason = searched, reason

    def needs_at_least(self, budget_bytes: int | None) -> None:
        """Record that every plan of the whole space needs at least this budget."""
        with self._lock:
            if budget_bytes is not None and budget_bytes > (self.least_budget_bound_bytes or 0):
                self.least_budget_bound_bytes = budget_bytes
                self._needs_no_more(self.plan)

    def suffices(self, budget_bytes: int) -> None:
        """Record that a plan with this peak is known."""
        with self._lock:
            if self.least_budget_bytes is None or budget_bytes < self.least_budget_bytes:
                self.least_budget_bytes = budget_bytes
                self._needs_no_more(None)

    def best_bound(self) -> tuple[int, tuple[str, ...]]:
        """The bound to report and the restrictions it needs: none, if the whole-space bound is within the gap."""
        with self._lock:
            bound = self.bound_ns
            within: tuple[str, ...] = ()
            if self.plan is None and self._searched:
                # the space that was searched, and what is proved for it or for a larger one
                larger = [at for names, at in self._restricted.items() if set(names) <= set(self._searched)]
                return max([bound, *larger]), self._searched
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
        return self._exhausted

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
                restricted_to=within,
                least_budget_bytes=self.least_budget_bytes,
                least_budget_bound_bytes=self.least_budget_bound_bytes,
                digest=problem_digest(self.problem),
                message=" ".join([self._message(status, limit, gap, within), *self._notes]),
                plan=self.plan,
            ).priced(total, self.cost_ns, None if self.infeasible else bound, self.peak_bytes)

    def _ending(self, bound_ns: int) -> tuple[Status, str | None]:
        if self.infeasible:
            return Status.INFEASIBLE, None
        if self.cost_ns is None:
            if self._limit == "cancel":
                return Status.CANCELLED, "cancel"
            return Status.NOTHING_FOUND, None if self._searched is not None else self._limit
        if bound_ns >= self.cost_ns:
            return Status.OPTIMAL, None
        if gap_of(self.cost_ns, bound_ns) <= self.max_gap:
            return Status.FEASIBLE, "gap"
        return (Status.CANCELLED if self._limit == "cancel" else Status.FEASIBLE), self._limit

    def _message(self, status: Status, limit: str | None, gap: float | None, within: tuple[str, ...]) -> str:
        if status is Status.OPTIMAL:
            return optimal_sentence(within)
        if gap is not None:
            ends = {
                "gap": "the gap that was asked for is reached",
                "time": "the time is up",
                "cancel": "cancelled",
                "memory": "the solver's memory is used up",
                None: "the method has run to its end",
            }
            return gap_sentence(gap, within, ends[limit])
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
