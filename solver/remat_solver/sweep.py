"""Cost against budget: many budgets of one graph, each solve warm-started from what its neighbours found and proved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from remat_ir import Answer, InvalidData, Problem, Progress, Status, Verdict, plain_peak
from remat_ir.problem import Subject, plain_plan_of
from remat_ir.proof import certifiable

from .bounds import least_need
from .deadline import Deadline
from .incumbent import checked
from .knowledge import Bound, Ending, Knowledge
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
            done[budget] = curve.at(budget).answer(method, max_gap, Ending("time"))
    return tuple(curve.completed(done[budget]) for budget in sorted(done))


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


class Curve(Knowledge):
    """What is known about a subject at every budget, and the solves that add to it."""

    def __init__(self, subject: Subject, max_gap: float = 0.0) -> None:
        super().__init__(subject, least_need(subject)[0])
        self.max_gap = max_gap

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

        The whole space's certificate is taken over also where the answer reports a restricted bound. `enough` may end
        the solve at an improvement.
        """
        known = self.at(budget)
        if known.settled(self.max_gap):
            return checked(known.problem, known.answer(method, self.max_gap))
        ended = False

        def progress(news: Progress) -> None:
            nonlocal ended
            ended = ended or (enough is not None and enough(news))

        answer = solve(
            Problem(self.subject, budget),
            method=method,
            time_limit_s=time_limit_s,
            max_gap=self.max_gap,
            options=options,
            start=known.plan,
            bound_ns=None if certifiable(self.subject) else known.whole_ns,
            proof=known.proof,
            on_progress=progress,
            cancelled=lambda: ended or (cancelled is not None and cancelled()),
        )
        self.add(answer)
        return answer

    def completed(self, answer: Answer) -> Answer:
        """An answer with all that its neighbours add to it."""
        known = self.at(answer.budget_bytes)
        if answer.bound_ns is not None and answer.plan is not None:
            whole = answer.proof is None or answer.proof.digest == answer.digest
            proof = None if answer.restricted_to and whole else answer.proof
            known = known.with_bound(Bound(answer.bound_ns, answer.restricted_to), proof)
        reason = answer.message if known.infeasible == (answer.status is Status.INFEASIBLE) else ""
        ending = Ending(answer.limit, answer.restricted_to or None, reason)
        full = known.answer(answer.method, self.max_gap, ending, seconds=answer.seconds, digest=answer.digest)
        full = replace(full, dropped_methods=answer.dropped_methods)
        if full.status is Status.NOTHING_FOUND and answer.claims_infeasible:
            full = replace(full, claimed_by=answer.claimed_by)
        if full.status is Status.INFEASIBLE:
            return checked(known.problem, full)
        if (full.bound_ns, full.cost_ns, full.restricted_to) == (answer.bound_ns, answer.cost_ns, answer.restricted_to):
            full = replace(
                full, message=answer.message, claimed_bound_ns=answer.claimed_bound_ns, claimed_by=answer.claimed_by
            )
        return checked(known.problem, full)

    def refine(self, done: Mapping[int, Answer], points: int) -> int | None:
        """The next budget of the curve by refinement, or None when it is done.

        After the plain peak and the least need: the middle of the widest step, its width in bytes from one point to
        the smallest peak known to reach the next point's cost, times its height, which is the cost at its low end less
        the bound at its high end. A low end without a plan counts half as much again as
        the most expensive plan costs.
        """
        high, low = plain_peak(self.subject), self.least_bytes
        if not done:
            self.plans.append((Verdict(self.subject.total_cost_ns, high), plain_plan_of(self.subject)))
            return high
        if len(done) >= points or low >= high:
            return None
        ends = sorted({low, *(budget for budget in done if budget >= low), high})
        if len(done) == 1:
            return ends[0] if ends[0] not in done else None
        most = max(verdict.cost_ns for verdict, _ in self.plans) * 3 // 2
        widest: tuple[int, int] | None = None
        for left, right in pairwise(ends):
            known, reached = self.best(left), self.best(right)
            if reached is None:
                stop, height = right, most - self.bound(right)
            else:
                stop = min(peak for (cost, peak), _ in self.plans if cost <= reached[0])
                height = (most if known is None else known[0]) - self.bound(right)
            middle = (left + stop) // 2
            if middle > left and middle not in done and (widest is None or (stop - left) * height > widest[0]):
                widest = (stop - left) * height, middle
        return None if widest is None else widest[1]
