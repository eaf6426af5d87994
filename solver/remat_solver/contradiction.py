"""What is done with a proof that a verified plan refutes, and with an invalid plan: the instance is written out."""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from remat_ir import AnyPlan, InvalidPlan, Problem, RematError, problem_digest, verify
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
    cost = None if plan is None else _cost_of(problem, plan)
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


def _cost_of(problem: Problem, plan: AnyPlan) -> int | None:
    with contextlib.suppress(InvalidPlan):
        return verify(problem, plan).cost_ns
    return None


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
        path.write_text(json.dumps(instance))
        where = str(path)
    except OSError as error:
        where = f"nowhere, since {error}"
    LOG.error("%s: %s; problem %s, instance in %s", what, claim, digest, where)
