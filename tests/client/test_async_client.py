"""The asynchronous client on a real service: one problem, many, and what becomes of refusals, lies and deadlines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from client.liar import Asked, Said, in_turn, lying
from remat.errors import InvalidResponse, NotAllowed, ServiceError, Unreachable
from remat.planning.async_client import AsyncRemat
from remat.planning.greedy import greedy_answer
from remat.planning.http import Timeouts
from remat_ir import Answer, InvalidData, Problem, Status, budget_at, plain_peak, verify
from service.serving import Service, eventually, hard_graph, serving, training_graph


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A running service."""
    with serving(tmp_path_factory.mktemp("service"), workers=2) as running:
        yield running


def problems(count: int) -> list[Problem]:
    """Small ones, with as many budgets; every third is asked for twice."""
    graph = training_graph(6)
    budgets = [budget_at(graph, 0.5 + 0.5 * i / count) for i in range(count)]
    return [Problem(graph, budget) for i, budget in enumerate(budgets) for _ in range(2 if i % 3 == 0 else 1)]


@pytest.mark.thorough
async def test_many_problems_in_their_order(service: Service) -> None:
    """Each answer is its problem's, verified; equal ones are one solve."""
    asked = problems(12)
    async with AsyncRemat(service.url, at_once=5) as client:
        answers = await client.solve_many(asked, time_limit_s=10.0)
    assert [answer.budget_bytes for answer in answers] == [problem.budget_bytes for problem in asked]
    for problem, answer in zip(asked, answers, strict=True):
        verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
    assert service.metric("remat_solve_seconds_count") <= 12


@pytest.mark.thorough
async def test_answers_come_as_they_are_ready(service: Service) -> None:
    """A long solve does not hold up the others; who stops listening does not end it."""
    hard = hard_graph(60, 3)
    quick = Problem(training_graph(7), plain_peak(training_graph(7)))
    asked = [Problem(hard, budget_at(hard, 0.4)), quick]
    async with AsyncRemat(service.url) as client:
        async for i, answer in client.solve_each(asked, method="staged", time_limit_s=40.0, max_gap=0.0):
            assert i == 1
            assert isinstance(answer, Answer)
            break
    listed = service.http.get("/v1/solves", params={"limit": 2}).json()["solves"]
    under_way = [row for row in listed if row["status"] in ("queued", "running")]
    assert len(under_way) == 1
    service.http.post(f"/v1/solves/{under_way[0]['id']}/cancel", json={})
    eventually(lambda: service.get(under_way[0]["id"], 0)[0] == 200)


@pytest.mark.thorough
async def test_a_refused_problem_does_not_take_the_others_along(tmp_path: Path) -> None:
    """One over the service's caps: its error stands in its place, the rest is solved; `solve_many` raises it.

    That nothing fits is an answer.
    """
    graphs = (training_graph(4), hard_graph(80, 1), training_graph(5))
    asked = [*(Problem(graph, plain_peak(graph)) for graph in graphs), Problem(training_graph(6), 1)]
    with serving(tmp_path, workers=1, most_ops=40) as small:
        async with AsyncRemat(small.url) as client:
            found = dict([pair async for pair in client.solve_each(asked)])
            assert isinstance(found[1], ServiceError)
            assert all(isinstance(found[i], Answer) for i in (0, 2, 3))
            assert found[3].status is Status.INFEASIBLE
            with pytest.raises(ServiceError, match="ops"):
                await client.solve_many(asked)


@pytest.mark.thorough
async def test_deadlines_retries_and_checks_are_those_of_the_blocking_client() -> None:
    """A server that hangs is left in time, one that fails is asked again with the same key, a liar is not believed."""
    problem = Problem(training_graph(4), plain_peak(training_graph(4)))
    with lying(in_turn(Said(hang=True))) as hanging:
        async with AsyncRemat(hanging.url, timeouts=Timeouts(read=0.3, write=0.3), patience_s=0.5) as client:
            with pytest.raises(Unreachable):
                await client.solve(problem, time_limit_s=0.5)
    with lying(in_turn(Said(503), Said(401))) as failing:
        async with AsyncRemat(failing.url) as client:
            with pytest.raises(NotAllowed):
                await client.solve(problem)
        keys = {request.headers["idempotency-key"] for request in failing.asked}
        assert (len(failing.asked), len(keys)) == (2, 1)
    with lying(in_turn(Said(200, {"status": "optimal"}))) as liar:
        async with AsyncRemat(liar.url) as client:
            with pytest.raises(InvalidResponse):
                await client.solve(problem)


async def test_options_are_checked_at_the_call() -> None:
    """A misspelt one is named with what was meant; so is a URL that is none."""
    async with AsyncRemat("http://127.0.0.1:9") as client:
        with pytest.raises(InvalidData, match="time_limit_s"):
            await client.solve(Problem(training_graph(4), 1), time_limit=5.0)  # type: ignore[call-arg]
    with pytest.raises(InvalidData):
        AsyncRemat("not a url")


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:9"])
async def test_offline_asks_nobody(url: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("REMAT_OFFLINE", "1")
    with pytest.raises(InvalidData, match="REMAT_OFFLINE is set"):
        AsyncRemat(url)


async def test_problems_wait_for_their_turn_and_not_for_a_connection() -> None:
    """Many more than may be under way at once, by a slow service: all are answered, none is given up for want of a
    connection."""
    graph = training_graph(4)
    problem = Problem(graph, plain_peak(graph))
    answer, lock = greedy_answer(problem).to_json(), threading.Lock()
    now, most = 0, 0

    def script(_: Asked) -> Said:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.6)
        with lock:
            now -= 1
        return Said(200, answer)

    with lying(script) as slow:
        async with AsyncRemat(slow.url, at_once=2, timeouts=Timeouts(connect=0.1)) as client:
            found = await asyncio.gather(*(client.solve(problem, time_limit_s=0.1) for _ in range(12)))
    assert [each.cost_ns for each in found] == [answer["cost_ns"]] * 12
    assert (most, len(slow.asked)) == (2, 12)


@pytest.mark.thorough
async def test_a_cancelled_wait_leaves_at_once(service: Service) -> None:
    """The task ends; the solve can be found again by its id."""
    graph = hard_graph(60, 4)
    async with AsyncRemat(service.url) as client:
        task = asyncio.create_task(
            client.solve(Problem(graph, budget_at(graph, 0.4)), method="staged", time_limit_s=30.0, max_gap=0.0)
        )
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        newest = service.http.get("/v1/solves", params={"limit": 1}).json()["solves"][0]
        assert newest["status"] in ("queued", "running")
        service.http.post(f"/v1/solves/{newest['id']}/cancel", json={})
        answer = await client.wait(newest["id"])
        assert answer.status.ended
