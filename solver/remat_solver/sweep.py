"""Cost against budget: many budgets of one graph, each solve warm-started from what its neighbours found and proved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from remat_ir import (
    Answer,
    AnyPlan,
    InvalidData,
    Problem,
    Progress,
    Proof,
    Status,
    Verdict,
    certificate_for,
    plain_peak,
)
from remat_ir.problem import Subject, plain_plan_of
from remat_ir.proof import InvalidProof, carried, certifiable, prove

from .bounds import least_need
from .deadline import Deadline
from .incumbent import checked
from .knowledge import Bound, Ending, Known
from .solve import solve

_LEAST_S = 1e-3
"""Seconds of a solve that begins just as the time for all is over: 0 would be refused as a limit."""


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
    ended = "time"
    while (budget := curve.refine(done, points) if asked is None else _widest(asked, done)) is not None:
        if cancelled is not None and cancelled():
            ended = "cancel"
            break
        if deadline.passed():
            break
        done[budget] = curve.solve(budget, method, time_limit_s, deadline, options, cancelled)
        if on_answer is not None:
            on_answer(done[budget])
    for budget in asked or ():
        if budget not in done:
            done[budget] = curve.at(budget).answer(method, max_gap, Ending(ended))
    return tuple(curve.completed(done[budget]) for budget in sorted(done))


def _widest(asked: Sequence[int], done: Mapping[int, Answer]) -> int | None:
    """The next budget: the largest, the smallest, then the middle of the longest run of those not yet solved."""
    for end in (asked[-1], asked[0]):
        if end not in done:
            return end
    runs = (list(run) for solved, run in groupby(asked, key=done.__contains__) if not solved)
    longest: list[int] = max(runs, key=len, default=[])
    return longest[len(longest) // 2] if longest else None


class Curve:
    """What is known about a subject at every budget, and the solves that add to it.

    A plan serves every budget from its peak on. A bound over the whole space holds at every smaller budget, where fewer
    plans fit. A budget that holds no plan is above every smaller one. Of graphs, and of chains without a link, only
    what a certificate proves is taken over; written anew for a smaller budget it may prove more.
    """

    def __init__(self, subject: Subject, max_gap: float = 0.0) -> None:
        self.subject, self.max_gap = subject, max_gap
        self.least_bytes = least_need(subject)[0]
        self.plans: list[tuple[Verdict, AnyPlan]] = []
        self._certified = certifiable(subject)
        self._bounds: list[tuple[int, int, Proof | None]] = []  # (budget, bound over the whole space, its certificate)
        self._too_small: Proof | None = None  # for the budget one byte below `least_bytes`

    def add(self, answer: Answer) -> None:
        """Take over what an answer found and proved; of restricted bounds, nothing."""
        if answer.plan is not None and answer.peak_bytes is not None and answer.cost_ns is not None:
            self.plans.append((Verdict(answer.cost_ns, answer.peak_bytes), answer.plan))
        infeasible = answer.status is Status.INFEASIBLE
        if answer.proof is not None and not infeasible:
            self._prove(answer.budget_bytes, answer.proof)
        elif not self._certified and answer.bound_ns is not None and not answer.restricted_to:
            self.bounded(answer.budget_bytes, answer.bound_ns)
        least = answer.least_budget_bound_bytes or 0
        if infeasible:
            least = max(least, answer.budget_bytes + 1)
        if least > self.least_bytes:
            self.least_bytes, self._too_small = least, None
            if answer.proof is not None:
                with contextlib.suppress(InvalidProof):
                    below = certificate_for(Problem(self.subject, least - 1), answer.proof)
                    self._too_small = below.proof if below.bound_ns is None else None

    def bounded(self, budget_bytes: int, bound_ns: int) -> None:
        """Record a bound on the cost of every plan within a budget."""
        self._bounds.append((budget_bytes, bound_ns, None))

    def _prove(self, budget_bytes: int, proof: Proof) -> None:
        """Record what a certificate written anew for a budget proves there, if anything."""
        with contextlib.suppress(InvalidProof):
            problem = Problem(self.subject, budget_bytes)
            here = carried(proof, problem)
            bound_ns = prove(problem, here).bound_ns
            if bound_ns is not None and (budget_bytes, bound_ns, here) not in self._bounds:
                self._bounds.append((budget_bytes, bound_ns, here))

    def bound(self, budget_bytes: int) -> int:
        """The best bound known for a budget: the largest that was proved at it or above it."""
        return max((ns for at, ns, _ in self._bounds if at >= budget_bytes), default=self.subject.total_cost_ns)

    def at(self, budget_bytes: int) -> Known:
        """All that is known about one budget, in bytes, fixed ones included."""
        known = Known(Problem(self.subject, budget_bytes), infeasible=budget_bytes < self.least_bytes)
        known = known.needing(self.least_bytes, self._too_small)
        # the best bound at the next larger budget that has a certificate
        above = [(at, -ns, proof) for at, ns, proof in self._bounds if at >= budget_bytes and proof is not None]
        if above:
            self._prove(budget_bytes, min(above, key=lambda each: each[:2])[2])
        for at, bound_ns, proof in self._bounds:
            if at == budget_bytes or (at > budget_bytes and proof is None):
                known = known.with_bound(Bound(bound_ns), proof)
        if known.infeasible:
            known = replace(known, proof=self._too_small)
        known = known.sufficing(min((verdict.peak_bytes for verdict, _ in self.plans), default=None))
        for verdict, plan in self.plans:
            if verdict.peak_bytes <= budget_bytes:
                known = known.with_plan(verdict, plan)
        return known

    def solve(
        self,
        budget: int,
        method: str,
        time_limit_s: float | None,
        deadline: Deadline,
        options: Mapping[str, object] | None,
        cancelled: Callable[[], bool] | None,
        enough: Callable[[Progress], bool] | None = None,
    ) -> Answer:
        """Solve at a budget from the neighbours' plan and bound, unless they settle it, and take over the outcome.

        The whole space's certificate is taken over also where the answer reports a restricted bound. `enough` may end
        the solve at an improvement.
        """
        left, ended = max(deadline.remaining(), _LEAST_S), False
        limit = left if time_limit_s is None else min(time_limit_s, left)
        known = self.at(budget)
        if known.settled(self.max_gap):
            return checked(known.problem, known.answer(method, self.max_gap))

        def progress(news: Progress) -> None:
            nonlocal ended
            ended = ended or (enough is not None and enough(news))

        answer = solve(
            Problem(self.subject, budget),
            method=method,
            time_limit_s=None if limit == float("inf") else limit,
            max_gap=self.max_gap,
            options=options,
            start=known.plan,
            bound_ns=None if self._certified else known.whole_ns,
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
        full = replace(full, dropped_methods=answer.dropped_methods, chain_cost_ns=answer.chain_cost_ns)
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
            known, reached = self.at(left).cost_ns, self.at(right).cost_ns
            if reached is None:
                stop, height = right, most - self.bound(right)
            else:
                stop = min(peak for (cost, peak), _ in self.plans if cost <= reached)
                height = (most if known is None else known) - self.bound(right)
            middle = (left + stop) // 2
            if middle > left and middle not in done and (widest is None or (stop - left) * height > widest[0]):
                widest = (stop - left) * height, middle
        return None if widest is None else widest[1]
