"""What a solver child's end means, however it came to it."""

from __future__ import annotations

import pytest

from remat_ir import Answer, Problem, Status
from remat_service.solving.record import Outcome
from service.serving import training_graph


def _outcome(**answer: object) -> Outcome:
    net = Problem(training_graph(3), 10_000)
    outcome = Outcome(net, "auto", "d", 0)
    if answer:
        outcome.ended(Answer(method="auto", budget_bytes=10_000, **answer).to_json(), None)
    return outcome


@pytest.mark.parametrize(
    ("cost", "status"), [(5, Status.FEASIBLE), (None, Status.NOTHING_FOUND)], ids=["plan", "no plan"]
)
def test_stopped_at_the_deadline_is_no_cancel(cost: int | None, status: Status) -> None:
    """A child that had to be told that its time was up says `cancel`; the answer says `time`."""
    said = _outcome(status=Status.CANCELLED, limit="cancel", cost_ns=cost)
    late = said.final("deadline", out_of_time=True)
    assert (late.status, late.limit) == (status, "time")
    asked = said.final(None, out_of_time=False)
    assert (asked.status, asked.limit) == (Status.CANCELLED, "cancel")


@pytest.mark.parametrize(
    ("reason", "limit"), [("memory", "memory"), ("killed", "time"), ("terminated", "time"), ("deadline", "time")]
)
def test_killed_without_an_answer(reason: str, limit: str) -> None:
    """What the watchdog did is what stopped it."""
    found = _outcome().final(reason, out_of_time=False)
    assert (found.status, found.limit) == (Status.NOTHING_FOUND, limit)


def test_died_or_failed() -> None:
    """Without a reason from outside, a dead child has failed, and so has one that says so."""
    assert _outcome().final(None, out_of_time=False).status is Status.FAILED
    broken = _outcome()
    broken.failed("failed", "KeyError: 3")
    assert broken.final(None, out_of_time=False).message == "KeyError: 3"


def test_restricted_bounds_stay_inside() -> None:
    """A bound of a restricted search is never taken for one on every plan, and what has no certificate is a claim."""
    inside = _outcome(status=Status.OPTIMAL, cost_ns=9, bound_ns=9, restricted_to=("persistent-schedules",))
    assert inside.claim is None
    total = training_graph(3).total_cost_ns
    outside = _outcome(status=Status.FEASIBLE, cost_ns=total + 9, bound_ns=total + 7)
    assert (outside.claim, outside.proved_ns) == ((total + 7, "auto"), None)
    outside.proved(total + 8)
    outside.claimed(total + 8, "staged")
    assert (outside.claim, outside.proved_ns) == ((total + 7, "auto"), total + 8)
    outside.claimed(total + 9, "staged")
    assert outside.claim == (total + 9, "staged")
