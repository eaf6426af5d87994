"""Cost against budget: many budgets of one graph, each solve warm-started from what its neighbours found and proved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from remat_ir import Answer, AnyPlan, InvalidData, Problem, Progress, Status, plain_peak
from remat_ir.subject import Subject, plain_plan_of

from .bounds import least_need
from .deadline import Deadline
from .incumbent import Incumbent
from .solve import solve


def sweep(
    subject: Subject,
    budgets: Sequence[int] | None = None,
    *,
    points: int = 9,
    method: str = "auto",
    time_limit_s: float | None = 60.0,
    total_s: float | None = None,
    max_gap: float = 0.001,
    options: Mapping[str, object] | None = None,
    on_answer: Callable[[Answer], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> tuple[Answer, ...]:
    """Plan a subject at several budgets, or along the whole trade-off curve.

    The least cost never rises with the budget. So a plan found at one budget serves every larger one, a bound proved at
    one holds at every smaller one, and what is infeasible at one is so at every smaller one: the solves use it, and the
    answers are at least as good as all of them together allow.

    Args:
        budgets: in bytes, fixed bytes included, in any order; None means the curve by refinement: after both ends,
            the gap in which cost is least certain is split, `points` solves in all.
        method, max_gap, options: of each solve.
        time_limit_s, total_s: seconds for each solve, and for all; what is out of time is answered with what the others
            say about it.
        on_answer: called after each solve.
        cancelled: polled; once it returns True the sweep ends with what it has.

    Returns:
        One answer per budget, budgets ascending.

    Raises:
        InvalidData: no budgets, or whatever `solve` refuses.
    """
    if budgets is not None and not budgets:
        raise InvalidData("a sweep needs at least one budget", "/budgets")
    if points < 2:
        raise InvalidData(f"a curve needs at least 2 points, not {points}", "/points")
    curve = Curve(subject, max_gap)
    deadline = Deadline(total_s)
    asked = sorted(set(budgets)) if budgets is not None else None
    done: dict[int, Answer] = {}
    while (budget := curve.refine(done, points) if asked is None else _widest(asked, done)) is not None:
        if deadline.passed() or (cancelled is not None and cancelled()):
            break
        limit = min(time_limit_s or float("inf"), deadline.remaining())
        done[budget] = curve.solve(budget, method, None if limit == float("inf") else limit, options, cancelled)
        if on_answer is not None:
            on_answer(done[budget])
    for budget in asked or ():
        if budget not in done:
            done[budget] = replace(curve.incumbent(budget).answer(method), limit="time")
    return tuple(curve.settled(done[budget]) for budget in sorted(done))


def _widest(asked: Sequence[int], done: Mapping[int, Answer]) -> int | None:
    """The next budget: the largest, the smallest, then the middle of the longest run of those not yet solved."""
    for end in (asked[-1], asked[0]):
        if end not in done:
            return end
    best: list[int] = []
    run: list[int] = []
    for budget in asked:
        run = [] if budget in done else [*run, budget]
        best = run if len(run) > len(best) else best
    return best[len(best) // 2] if best else None


class Curve:
    """What is known about the least cost as a function of the budget: plans by their peaks, bounds by their budgets."""

    def __init__(self, subject: Subject, max_gap: float = 0.0) -> None:
        self.subject, self.max_gap = subject, max_gap
        self._plans: list[tuple[int, int, AnyPlan]] = []  # (peak, cost, plan)
        self._bounds: list[tuple[int, int]] = []  # (budget, bound over the whole space)
        self._infeasible = least_need(subject)[0] - 1  # the largest budget that is proved too small
        self._reason = ""

    def add(self, answer: Answer) -> None:
        """Take over what an answer found and proved."""
        if answer.plan is not None and answer.peak_bytes is not None and answer.cost_ns is not None:
            self._plans.append((answer.peak_bytes, answer.cost_ns, answer.plan))
        if answer.bound_ns is not None and not answer.restricted_to:
            self.bounded(answer.budget_bytes, answer.bound_ns)
        if answer.status is Status.INFEASIBLE and answer.budget_bytes > self._infeasible:
            self._infeasible, self._reason = answer.budget_bytes, answer.message
        if answer.least_budget_bound_bytes is not None:
            self._infeasible = max(self._infeasible, answer.least_budget_bound_bytes - 1)

    def bounded(self, budget: int, bound_ns: int) -> None:
        """Record a bound on the cost of every plan within a budget."""
        self._bounds.append((budget, bound_ns))

    def best(self, budget: int) -> tuple[int, AnyPlan] | None:
        """The cheapest known plan within a budget, with its cost."""
        fitting = [(cost, i) for i, (peak, cost, _) in enumerate(self._plans) if peak <= budget]
        return (min(fitting)[0], self._plans[min(fitting)[1]][2]) if fitting else None

    def bound(self, budget: int) -> int:
        """The best bound known for a budget: the largest that was proved at it or above it."""
        return max((bound for at, bound in self._bounds if at >= budget), default=self.subject.total_cost_ns)

    def infeasible(self, budget: int) -> bool:
        """Whether a budget is proved too small."""
        return budget <= self._infeasible

    def incumbent(self, budget: int) -> Incumbent:
        """All that is known about a budget, as an incumbent."""
        found = Incumbent(Problem(self.subject, budget), Deadline(None), self.max_gap)
        found.needs_at_least(self._infeasible + 1)
        if self.infeasible(budget):
            found.prove_infeasible(
                self._reason or f"No plan fits: every plan needs at least {self._infeasible + 1} bytes."
            )
        if self._plans:
            found.suffices(min(peak for peak, _, _ in self._plans))
        if (known := self.best(budget)) is not None:
            found.offer(known[1], "neighbour")
        found.raise_bound(self.bound(budget), "neighbour")
        return found

    def solve(
        self,
        budget: int,
        method: str,
        time_limit_s: float | None,
        options: Mapping[str, object] | None = None,
        cancelled: Callable[[], bool] | None = None,
        enough: Callable[[Progress], bool] | None = None,
    ) -> Answer:
        """Solve at a budget from the neighbours' plan and bound, unless they settle it, and take over the outcome.

        Whole-space bounds are taken over also where the answer reports a restricted one. `enough` may end the solve at
        an improvement.
        """
        known = self.incumbent(budget)
        if known.stopped():
            return replace(known.answer(method), seconds=0.0)
        ended = False

        def progress(news: Progress) -> None:
            nonlocal ended
            if news.whole_bound_ns is not None:
                self.bounded(budget, news.whole_bound_ns)
            ended = ended or (enough is not None and enough(news))

        answer = solve(
            Problem(self.subject, budget),
            method=method,
            time_limit_s=time_limit_s,
            max_gap=self.max_gap,
            options=options,
            start=known.plan,
            bound_ns=known.bound_ns,
            on_progress=progress,
            cancelled=lambda: ended or (cancelled is not None and cancelled()),
        )
        self.add(answer)
        return answer

    def settled(self, answer: Answer) -> Answer:
        """An answer with all that its neighbours add to it."""
        known = self.incumbent(answer.budget_bytes)
        if answer.bound_ns is not None and answer.restricted_to and answer.plan is not None:
            known.raise_bound(answer.bound_ns, "own", answer.restricted_to)
        merged = known.answer(answer.method)
        if merged.status is Status.NOTHING_FOUND:
            return replace(answer, least_budget_bytes=merged.least_budget_bytes, bound_ns=merged.bound_ns)
        ended = merged.status in (Status.OPTIMAL, Status.INFEASIBLE) or merged.limit == "gap"
        status = Status.CANCELLED if not ended and answer.limit == "cancel" else merged.status
        limit = merged.limit if ended else answer.limit
        return replace(merged, seconds=answer.seconds, limit=limit, status=status)

    def refine(self, done: Mapping[int, Answer], points: int) -> int | None:
        """The next budget of the curve by refinement, or None when it is done.

        After the plain peak and the least need: the middle of the widest step, its width in bytes from one point to
        the smallest peak known to reach the next point's cost, times its height, which is the cost at its low end less
        the bound at its high end. A low end without a plan counts as half as dear again as the dearest plan.
        """
        high, low = plain_peak(self.subject), self._infeasible + 1
        if not done:
            self._take_plain(high)
            return high
        if len(done) >= points or low >= high:
            return None
        ends = sorted({low, *(budget for budget in done if budget >= low), high})
        if len(done) == 1:
            return ends[0] if ends[0] not in done else None
        dearest = max(cost for _, cost, _ in self._plans) * 3 // 2
        widest: tuple[int, int] | None = None
        for left, right in pairwise(ends):
            known, reached = self.best(left), self.best(right)
            if reached is None:
                stop, height = right, dearest - self.bound(right)
            else:
                stop = min(peak for peak, cost, _ in self._plans if cost <= reached[0])
                height = (dearest if known is None else known[0]) - self.bound(right)
            middle = (left + stop) // 2
            if middle > left and middle not in done and (widest is None or (stop - left) * height > widest[0]):
                widest = (stop - left) * height, middle
        return None if widest is None else widest[1]

    def _take_plain(self, peak: int) -> None:
        self._plans.append((peak, self.subject.total_cost_ns, plain_plan_of(self.subject)))
