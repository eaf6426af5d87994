"""A look into the store before a request is queued: it ends in time, and what it finds counts from then on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from remat.planning.options import SolveOptions
from remat.planning.sources import ServicePlanner
from remat_ir import Graph, Problem, budget_at, plain_peak
from remat_service.storage.verifier import Verifier, pack, written
from remat_solver import solve
from service.serving import Service, checked, eventually, hard_graph, open_problem, served, serving, training_graph

GRAPH = hard_graph(16, 7)


short = served(workers=1, look_up_s=0)
"""A service with one worker whose looks have no time for any certificate that it has not checked before."""


@pytest.fixture(scope="module")
def known(short: Service) -> dict[str, Any]:
    """The answer to a small budget, next to the certificate of a large one, and a worker that is busy otherwise."""
    _, large = short.post(at(0.9), time_limit_s=20, max_gap=0.01)
    assert large["proof"] is not None
    _, found = short.post(at(0.6), time_limit_s=20, max_gap=0.2)
    assert found["plan"] is not None
    _, long = short.post(open_problem(3), wait=0, method="staged", time_limit_s=300, max_gap=0)
    eventually(lambda: short.get(long["id"], 0)[1]["status"] == "running")
    return found


def at(share: float) -> Problem:
    return Problem(GRAPH, budget_at(GRAPH, share))


def test_the_best_stored_plan_counts_from_the_queue_on(short: Service, known: dict[str, Any]) -> None:
    """A new budget of a known graph is queued at once, and given up while it waits: the stored plan is the answer."""
    problem = at(0.72)
    before = _parts(short)
    status, posted = short.post(problem, wait=0, time_limit_s=20, max_gap=0)
    assert (status, posted["status"], posted["cost_ns"]) == (202, "queued", known["cost_ns"])
    assert _parts(short) > before
    given = short.http.post(f"/v1/solves/{posted['id']}/cancel").json()
    answer = checked(problem, given)
    assert (answer.cost_ns, given["status"]) == (known["cost_ns"], "cancelled")


@pytest.mark.thorough
def test_a_queue_limit_that_ends_answers_with_it(short: Service, known: dict[str, Any]) -> None:
    """The request has waited too long for a worker: not without a plan."""
    problem = at(0.73)
    _, posted = short.post(problem, wait=0, time_limit_s=20, max_gap=0, queue_limit_s=0.2)
    ended = eventually(lambda: (found := short.get(posted["id"], 1))[0] == 200 and found[1])
    assert checked(problem, ended).cost_ns == known["cost_ns"]


@pytest.mark.thorough
def test_a_client_whose_time_is_up_has_it(short: Service, known: dict[str, Any]) -> None:
    """A time limit of a second, and no worker is free."""
    answer = ServicePlanner(short.url, patience_s=0.5).plan(at(0.74), SolveOptions(time_limit_s=1.0, max_gap=0.0))
    assert answer.plan is not None
    assert answer.cost_ns == known["cost_ns"]


@pytest.mark.thorough
def test_what_had_no_time_before_the_queue_is_checked_behind_it(tmp_path: Path) -> None:
    """An answer that the store has, but for its certificate's check, is found by the solve that was queued for it."""
    graph = training_graph(12, cost=2003)
    problem = Problem(graph, plain_peak(graph) - 1)
    with serving(tmp_path, workers=1, look_up_s=0) as service:
        _, first = service.post(problem, time_limit_s=20)
        service.stop()
        service.start()  # with nothing in memory
        status, second = service.post(problem, time_limit_s=20)
        assert status == 200
        assert checked(problem, second).cost_ns == first["cost_ns"]
        assert (second["status"], second["bound_ns"]) == (first["status"], first["bound_ns"])
        assert (first["cache"], second["cache"]) == ("miss", "hit")  # nothing was solved for it


@pytest.mark.thorough
def test_a_limit_that_is_over_before_anything_is_found_is_a_miss(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, look_up_s=0) as service:
        _, ended = service.post(open_problem(5), time_limit_s=0.03)
        assert (ended["status"], ended["cache"], ended.get("plan")) == ("nothing_found", "miss", None)


def _parts(service: Service) -> float:
    """Looks that had no time for all there is."""
    return service.metric('remat_store_look_seconds_count{found="part"}')


def _certificate(graph: Graph) -> tuple[Problem, bytes]:
    problem = Problem(graph, budget_at(graph, 0.6))
    answer = solve(problem, time_limit_s=20.0, max_gap=0.02)
    return problem, pack(written(answer.proof.to_json()))


@pytest.mark.thorough
async def test_a_check_that_began_goes_on_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has no time leaves it, who has waits for the same one; none is begun next to it, or that takes too long."""
    monkeypatch.setattr("remat_service.storage.verifier._SMALL_BYTES", 1)  # in a thread, as large ones are
    problem, packed = _certificate(GRAPH)
    verifier = Verifier()
    with pytest.raises(TimeoutError):
        await verifier.proof("a", problem, packed, 0.0)
    with pytest.raises(TimeoutError):
        await verifier.proof("b", problem, packed, 100.0)
    both = await asyncio.gather(verifier.proof("a", problem, packed), verifier.proof("a", problem, packed, 100.0))
    assert both[0] is not None
    assert both[0] is both[1]
    with pytest.raises(TimeoutError):
        await verifier.proof("b", problem, packed, 1e-9)
    assert await verifier.proof("a", problem, packed, 0.0) is both[0]
    assert await verifier.proof("b", problem, packed) is not None
