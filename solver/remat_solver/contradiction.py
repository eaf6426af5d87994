"""Whether all that was found and proved can be true, and what is done where it cannot: the instance is written out.

A proof that a verified plan refutes is logged, and so is an invalid plan of a method. `Evidence` holds all bounds and
plans of one subject, from any source, against each other.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remat_ir import (
    Answer,
    AnyPlan,
    InvalidPlan,
    Problem,
    Progress,
    RematError,
    Status,
    Subject,
    Verdict,
    problem_digest,
    verify,
)
from remat_ir.restrictions import contains, described

LOG = logging.getLogger("remat.contradiction")
"""Gets one error for each contradiction and each invalid plan of a method, with the path of the instance."""


NO_PLAN_NS = 1 << 62
"""A bound above every cost: that a space holds no plan at all."""


class Contradiction(RematError):
    """A proof and a verified plan disagree: a bug. Raised only where `RaiseContradictions` is installed."""


class RaiseContradictions(logging.Handler):
    """Makes each contradiction end whatever met it; tests and benchmarks add it to `LOG`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Raise what was logged.

        Raises:
            Contradiction: always.
        """
        raise Contradiction(record.getMessage())


def refuted(
    problem: Problem, plan: AnyPlan | None, cost_ns: int | None, bound_ns: int, within: Sequence[str] = ()
) -> bool:
    """Whether a verified plan of this cost lies in the space of a bound that is above the cost."""
    if plan is None or cost_ns is None or bound_ns <= cost_ns:
        return False
    return contains(problem.subject, plan, within)


def report_bound(problem: Problem, plan: AnyPlan | None, bound_ns: int, within: Sequence[str], source: str) -> None:
    """Log that a bound is above the cost of a verified plan of its space."""
    cost = None
    if plan is not None:
        with contextlib.suppress(InvalidPlan):
            cost = verify(problem, plan).cost_ns
    claim = f"{source} claims that no {described(within)} costs less than {bound_ns} ns, and one costs {cost} ns"
    _report(problem, plan, claim, {"bound_ns": bound_ns, "within": list(within), "source": source})


def report_budget(problem: Problem, plan: AnyPlan | None, least_bytes: int, peak_bytes: int, source: str) -> None:
    """Log that a budget which is claimed to be necessary is above the peak of a known plan."""
    claim = f"{source} claims that every plan needs {least_bytes} bytes, and one needs {peak_bytes}"
    _report(problem, plan, claim, {"least_budget_bound_bytes": least_bytes, "source": source})


def report_plan(problem: Problem, plan: AnyPlan | None, source: str, error: InvalidPlan) -> None:
    """Log that a method has made a plan that does not verify."""
    claim = f"a plan of {source} does not verify and is dropped: {error}"
    _report(problem, plan, claim, {"source": source}, "a method is wrong")


def _report(
    problem: Problem, plan: AnyPlan | None, claim: str, details: dict[str, object], what: str = "a proof is wrong"
) -> None:
    digest = problem_digest(problem)
    instance = {
        "claim": claim,
        **details,
        "problem": problem.to_json(),
        "plan": None if plan is None else plan.to_json(),
    }
    path = Path(tempfile.gettempdir()) / f"remat-contradiction-{digest.rpartition(':')[2][:16]}.json"
    try:
        with open(path, "w", opener=_private) as file:
            json.dump(instance, file)
        where = str(path)
    except OSError as error:
        where = f"nowhere, since {error}"
    LOG.error("%s: %s; problem %s, instance in %s", what, claim, digest, where)


def _private(path: str, flags: int) -> int:
    """Open a file of the shared temporary folder for its owner alone, and follow no link that another left there."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


_ANY_BUDGET = 2**53


@dataclass(frozen=True)
class BoundClaim:
    """A claim that within a budget no plan of a space costs less; `NO_PLAN_NS` claims that there is none."""

    budget_bytes: int
    bound_ns: int
    within: tuple[str, ...]
    source: str

    def __str__(self) -> str:
        claim = "exists" if self.bound_ns >= NO_PLAN_NS else f"costs less than {self.bound_ns} ns"
        return f"{self.source}: no {described(self.within)} within {self.budget_bytes} bytes {claim}"


@dataclass(frozen=True)
class PlanClaim:
    """A verified plan, or a claim that there is one: of this peak and, where it is said, of this cost."""

    peak_bytes: int
    cost_ns: int | None
    plan: AnyPlan | None
    source: str

    def __str__(self) -> str:
        what = "a plan" if self.plan is None else "a verified plan"
        cost = "" if self.cost_ns is None else f" costs {self.cost_ns} ns and"
        return f"{self.source}: {what}{cost} needs {self.peak_bytes} bytes"


@dataclass(frozen=True)
class Refutation:
    """A bound and what contradicts it, on one subject."""

    subject: Subject
    bound: BoundClaim
    known: PlanClaim

    def __str__(self) -> str:
        return f"{self.bound}; {self.known}"

    def to_json(self) -> dict[str, Any]:
        """The instance written out: the problem, the bound, and the plan where there is one."""
        bound, known = self.bound, self.known
        return {
            "claim": str(self),
            "problem": Problem(self.subject, bound.budget_bytes).to_json(),
            "bound_ns": None if bound.bound_ns >= NO_PLAN_NS else bound.bound_ns,
            "within": list(bound.within),
            "bound_source": bound.source,
            "cost_ns": known.cost_ns,
            "peak_bytes": known.peak_bytes,
            "plan_source": known.source,
            "plan": None if known.plan is None else known.plan.to_json(),
        }


class Evidence:
    """Bounds and plans of one subject under any budgets.

    A bound proved under a budget holds under every smaller one, so each plan is compared with all bounds whose budget
    is at least its peak; with a restricted bound only where the plan is seen to lie in its space.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._bounds: dict[tuple[int, tuple[str, ...], str], int] = {}
        self._known: dict[PlanClaim, None] = {}

    def bound(self, budget_bytes: int, bound_ns: int, within: tuple[str, ...], source: str) -> None:
        """Take a lower bound; of the same source, space and budget the highest counts."""
        key = (budget_bytes, within, source)
        self._bounds[key] = max(bound_ns, self._bounds.get(key, bound_ns))

    def infeasible(self, budget_bytes: int, within: tuple[str, ...], source: str) -> None:
        """Take a claim that no plan of a space fits a budget."""
        self.bound(budget_bytes, NO_PLAN_NS, within, source)

    def needs(self, least_bytes: int, source: str) -> None:
        """Take a claim that every plan needs at least so many bytes."""
        self.infeasible(least_bytes - 1, (), source)

    def plan(self, plan: AnyPlan, source: str) -> Verdict:
        """Take a plan, replayed here; what it costs and needs.

        Raises:
            InvalidPlan: it breaks a rule.
        """
        verdict = verify(Problem(self.subject, _ANY_BUDGET), plan)
        self._known[PlanClaim(verdict.peak_bytes, verdict.cost_ns, plan, source)] = None
        return verdict

    def known(self, peak_bytes: int, cost_ns: int | None, source: str) -> None:
        """Take a claim that a plan fits so many bytes, of this cost where it is said."""
        self._known[PlanClaim(peak_bytes, cost_ns, None, source)] = None

    def progress(self, budget_bytes: int, news: Progress, source: str) -> None:
        """Take what a running solve reports."""
        if news.plan is not None:
            self.plan(news.plan, f"{source} ({news.source})")
        if news.bound_ns is not None and (news.cost_ns is None or news.bound_ns < news.cost_ns):
            # at the cost it may have been lowered to it: what was proved is in `whole_bound_ns` or in the answer
            self.bound(budget_bytes, news.bound_ns, news.restricted_to, source)
        if news.whole_bound_ns is not None:
            self.bound(budget_bytes, news.whole_bound_ns, (), source)

    def answer(self, answer: Answer, source: str) -> None:
        """Take what an ended solve says."""
        if answer.plan is not None:
            self.plan(answer.plan, source)
        if answer.bound_ns is not None:
            self.bound(answer.budget_bytes, answer.bound_ns, answer.restricted_to, source)
        if answer.claimed_bound_ns is not None:
            self.bound(answer.budget_bytes, answer.claimed_bound_ns, answer.restricted_to, source)
        if answer.status is Status.INFEASIBLE or answer.claims_infeasible:
            self.infeasible(answer.budget_bytes, answer.restricted_to, source)
        if answer.least_budget_bound_bytes is not None:
            self.needs(answer.least_budget_bound_bytes, source)
        if answer.least_budget_bytes is not None:
            self.known(answer.least_budget_bytes, None, source)

    @property
    def comparisons(self) -> int:
        """How many pairs of a bound and a plan there are to compare."""
        return len(self._bounds) * len(self._known)

    def refutations(self) -> tuple[Refutation, ...]:
        """Every bound that cannot be true, each with the cheapest plan that shows it."""
        cheapest = sorted(self._known, key=lambda k: (k.cost_ns is None, k.cost_ns, k.peak_bytes, k.source))
        found = []
        for (budget, within, source), value in sorted(self._bounds.items()):
            bound = BoundClaim(budget, value, within, source)
            known = next((k for k in cheapest if self._refutes(k, bound)), None)
            if known is not None:
                found.append(Refutation(self.subject, bound, known))
        return tuple(found)

    def _refutes(self, known: PlanClaim, bound: BoundClaim) -> bool:
        cost = NO_PLAN_NS - 1 if known.cost_ns is None else known.cost_ns
        if known.peak_bytes > bound.budget_bytes or cost >= bound.bound_ns:
            return False
        if not bound.within:
            return True
        return known.plan is not None and contains(self.subject, known.plan, bound.within)
