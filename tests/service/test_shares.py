"""What a tenant may take from the others: nothing, however urgent its solves are, and however many."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import update

from remat_service.context import Context
from remat_service.errors import Unavailable
from remat_service.identity import Caller
from remat_service.requests.parse import Ask
from remat_service.requests.read import find_request
from remat_service.requests.submit import Submission
from remat_service.storage.tables import solves, tenants
from remat_service.tenants.keys import add_tenant, caller_of
from service.database import process
from service.serving import at_peak, eventually, open_problem, serving, training_graph
from service.test_tenants import Tenant, cli


@pytest.fixture
async def context(url: str) -> AsyncIterator[Context]:
    """A process of the service over it, with room for four in the queue."""
    async with process(url, most_queued=4) as made:
        yield made


async def _tenant(context: Context, name: str, weight: float = 1.0) -> Caller:
    async with context.database.write() as connection:
        return await caller_of(connection, await add_tenant(connection, name, weight=weight))


async def _ask(context: Context, caller: Caller, cost: int, priority: int = 0) -> str:
    problem = at_peak(training_graph(5, cost=cost))
    ask = Ask(problem, time_limit_s=5, method="checkpoint-all", priority=priority)
    request_id = await Submission(context, caller, ask).submit()
    return str((await find_request(context, caller, request_id)).solve_id)


async def _set(context: Context, solve_id: str, state: str) -> None:
    async with context.database.write() as connection:
        await connection.execute(
            update(solves).where(solves.c.id == solve_id).values(state=state, heartbeat_at=context.clock.now())
        )


async def _claimed(context: Context) -> str | None:
    found = await context.queue.claim("a worker")
    return None if found is None else found.id


async def test_priority_orders_a_tenants_own_solves_alone(context: Context) -> None:
    """A tenant's urgent solves: the most urgent of them first, and never before another tenant's turn."""
    red, blue = await _tenant(context, "red"), await _tenant(context, "blue")
    usual = await _ask(context, red, 1000)
    urgent = await _ask(context, red, 1001, priority=100)
    theirs = await _ask(context, blue, 1002, priority=-100)
    assert await _claimed(context) == urgent  # of the two tenants the one that waits longer
    assert await _claimed(context) == theirs
    assert await _claimed(context) == usual
    assert await _claimed(context) is None


@pytest.mark.thorough
async def test_with_one_worker_tenants_take_turns_by_weight(context: Context) -> None:
    """Nothing runs when a solve is chosen: what each has been given decides, in the ratio of the weights."""
    callers = {name: await _tenant(context, name, weight) for name, weight in (("red", 1.0), ("blue", 2.0))}
    names, served = {}, []
    for i, (name, caller) in enumerate(callers.items()):
        for j in range(2):
            names[await _ask(context, caller, 1000 + 10 * i + j, priority=100 * (name == "red"))] = name
    for i in range(9):
        due = await _claimed(context)
        name = names[due]
        served.append(name)
        await _set(context, due, "ended")
        context.queue.turns.spend(callers[name].tenant_id, 5.0)
        names[await _ask(context, callers[name], 2000 + i, priority=100 * (name == "red"))] = name
    assert (served.count("red"), served.count("blue")) == (3, 6)


async def test_a_full_queue_refuses_those_who_filled_it(context: Context) -> None:
    """One tenant takes every place in the queue: it gets no more, and the other still gets its share."""
    red, blue = await _tenant(context, "red"), await _tenant(context, "blue")
    for i in range(4):
        await _ask(context, red, 1000 + i)
    with pytest.raises(Unavailable, match="the queue is full"):
        await _ask(context, red, 2000)
    await _ask(context, blue, 3000)
    await _ask(context, blue, 3001)
    with pytest.raises(Unavailable, match="the queue is full"):
        await _ask(context, blue, 3002)
    async with context.database.write() as connection:
        await connection.execute(update(tenants).where(tenants.c.name == "red").values(disabled=True))
    await _ask(context, blue, 3002)


@pytest.mark.thorough
def test_urgent_solves_of_one_tenant_keep_no_other_waiting(tmp_path: Path) -> None:
    """Six solves of the highest priority, one worker: another tenant's solve is the second that runs."""
    with serving(tmp_path, workers=1, require_keys="true") as service:
        red, blue = (Tenant(service, cli(service, "keys", "create", name, "--new-tenant")) for name in ("red", "blue"))
        flood = []
        for seed in range(6):
            asked = red.post(open_problem(seed), 0, method="staged", time_limit_s=2, max_gap=0, priority=100)
            flood.append(asked.json()["id"])
        running = 'remat_tenant_solves_running{tenant="red"} 1.0'
        eventually(lambda: running in service.http.get("/metrics").text)
        mine = blue.post(at_peak(training_graph(6)), 0, method="greedy").json()
        text = service.http.get("/metrics").text
        assert 'remat_tenant_queue_depth{tenant="blue"} 1.0' in text
        assert 'remat_tenant_oldest_queued_seconds{tenant="blue"}' in text
        blue.http.get(f"/v1/solves/{mine['id']}", params={"wait": 30})
        ended = [red.http.get(f"/v1/solves/{each}").status_code for each in flood]
        assert blue.http.get(f"/v1/solves/{mine['id']}").status_code == 200
        assert ended.count(200) <= 2, ended
        assert service.metric("remat_tenant_solver_seconds_total") > 0
        for each in flood:
            red.http.post(f"/v1/solves/{each}/cancel")
