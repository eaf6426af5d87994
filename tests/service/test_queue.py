"""The queue's protocol, the same on both databases: put, claim, beat, settle, take over, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import func, select, text, update

from remat_ir import Problem
from remat_service.context import Context
from remat_service.errors import RateLimited, Unavailable
from remat_service.identity import Caller
from remat_service.requests.parse import Ask
from remat_service.requests.submit import Submission
from remat_service.solving.record import Outcome, SolveRecord, read_claim
from remat_service.storage.eviction import evict
from remat_service.storage.queue import Claimed, LostClaim
from remat_service.storage.tables import events, requests, solves, tenants
from remat_service.tenants.keys import add_tenant, caller_of
from service.database import default_tenant, postgres, process, queued
from service.serving import at_peak, eventually, open_problem, serving, small, training_graph
from service.test_tenants import Tenant, cli


@pytest.fixture
async def context(url: str) -> AsyncIterator[Context]:
    """A process of the service over it, which solves nothing by itself."""
    async with process(url, stale_after_s=3, heartbeat_s=0.5) as made:
        yield made


async def _tenant(context: Context, name: str, weight: float = 1.0) -> Caller:
    async with context.database.write() as connection:
        return await caller_of(connection, await add_tenant(connection, name, weight=weight))


async def _several(context: Context, count: int, tenant: str = "default") -> list[str]:
    """Solves of a tenant, which may be a new one."""
    async with context.database.read() as connection:
        there = int(await connection.scalar(select(func.count()).select_from(solves)) or 0)
    caller = await (default_tenant(context) if tenant == "default" else _tenant(context, tenant))
    return [await queued(context, caller, small(there + i)) for i in range(count)]


async def _due(context: Context) -> str | None:
    found = await context.queue.claim("worker")
    return None if found is None else found.id


async def _claimed(context: Context, worker: str = "worker") -> Claimed:
    found = await context.queue.claim(worker)
    assert found is not None
    return found


async def _silent(context: Context, seconds: float) -> None:
    """Every worker was heard of so long ago."""
    async with context.database.write() as connection:
        moment = await connection.scalar(select(context.queue._moment(seconds)))
        await connection.execute(update(solves).where(solves.c.state == "running").values(heartbeat_at=moment))


async def _state(context: Context, solve_id: str) -> str:
    async with context.database.read() as connection:
        return str(await connection.scalar(select(solves.c.state).where(solves.c.id == solve_id)))


async def test_a_solve_is_claimed_once(context: Context) -> None:
    """Of ten claims at once of three solves, three get one each, the oldest first; the others get none."""
    ids = await _several(context, 3)
    found = [one for one in await asyncio.gather(*(context.queue.claim(f"w{i}") for i in range(10))) if one]
    assert sorted(one.id for one in found) == sorted(ids)
    assert {one.attempt for one in found} == {1}
    assert await context.queue.claim("late") is None


async def test_the_same_solve_waits_once(context: Context) -> None:
    """Ten of the same problem at once are one row, whoever comes first."""
    caller = await default_tenant(context)
    ask = Ask(small(0), time_limit_s=5, method="checkpoint-all")
    await asyncio.gather(*(Submission(context, caller, ask).submit() for _ in range(10)))
    async with context.database.read() as connection:
        assert await connection.scalar(select(func.count()).select_from(solves)) == 1


async def test_a_row_that_is_locked_is_waited_for_where_there_is_no_other(context: Context) -> None:
    """A joiner holds the only solve for a moment: the claim comes behind it, and is not lost."""
    (solve_id,) = await _several(context, 1)
    async with context.database.write() as connection:
        await connection.execute(select(solves.c.id).where(solves.c.id == solve_id).with_for_update())
        claim = asyncio.create_task(context.queue.claim("worker"))
        await asyncio.sleep(0.3)
        assert not claim.done()
    assert (await claim).id == solve_id


async def test_who_lost_the_claim_writes_nothing(context: Context) -> None:
    """A worker that was thought dead comes back: its signs of life and its findings are refused."""
    await _several(context, 1)
    old = await _claimed(context, "old")
    await context.queue.beat(old, 1.0)
    await _silent(context, 2.0)
    assert await context.queue.take_over() == 0
    await _silent(context, 4.0)
    if not context.database.is_sqlite:  # no lease is older than PostgreSQL
        async with context.database.read() as connection:
            age = text("SELECT extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())")
            await asyncio.sleep(max(0.0, 3.1 - float(await connection.scalar(age))))
    assert await context.queue.take_over() == 1
    assert await context.queue.take_over() == 0
    for new in (None, "new"):
        if new is not None:
            assert (await _claimed(context, new)).attempt == old.attempt + 1
        with pytest.raises(LostClaim):
            await context.queue.beat(old, 2.0)
        with pytest.raises(LostClaim):
            async with context.database.write() as connection:
                await context.queue.settle(connection, old, {"cost_ns": 1, "state": "ended"})
    async with context.database.read() as connection:
        row = (await connection.execute(select(solves))).one()
    assert (row.cost_ns, row.spent_s, row.state, row.worker) == (None, 1.0, "running", "new")


async def test_a_lease_goes_by_the_clock_of_the_database(context: Context) -> None:
    """A worker whose own clock is an hour slow is not taken for dead."""
    await _several(context, 1)
    claimed = await _claimed(context)
    slow = type("Slow", (type(context.clock),), {"now": lambda self: context.clock.now() - timedelta(hours=1)})()
    context.database.machine, context.database.clock = context.clock, slow
    await context.queue.beat(claimed, 0.0)
    assert await context.queue.take_over() == 0


async def test_spent_seconds_never_go_back(context: Context) -> None:
    """A sign of life that was on its way while more was written changes only the lease."""
    await _several(context, 1)
    claimed = await _claimed(context)
    await context.queue.beat(claimed, 5.0)
    await context.queue.beat(claimed, 4.0)
    async with context.database.read() as connection:
        assert await connection.scalar(select(solves.c.spent_s)) == 5.0


async def test_a_tenant_at_its_limit_waits_and_the_next_one_runs(context: Context) -> None:
    """Claims at once never take more than its quota; the end of one makes way for the next."""
    first = await _several(context, 3)
    others = await _several(context, 1, "others")
    async with context.database.write() as connection:
        await connection.execute(update(tenants).where(tenants.c.name == "default").values(most_running=1))
    found = [one for one in await asyncio.gather(*(context.queue.claim(f"w{i}") for i in range(6))) if one]
    assert sorted(one.id for one in found) == sorted([first[0], *others])
    running = next(one for one in found if one.id == first[0])
    async with context.database.write() as connection:
        await context.queue.settle(connection, running, {"state": "ended"})
    assert (await _claimed(context)).id == first[1]


async def test_weights_and_priorities_that_change_while_solves_wait_count(context: Context) -> None:
    """What is due is decided at the claim: by the weights and the priorities of that moment."""
    red = await _several(context, 4, "red")
    blue = await _several(context, 4, "blue")
    async with context.database.write() as connection:
        await connection.execute(update(tenants).where(tenants.c.name == "blue").values(weight=3.0))
        await connection.execute(update(solves).where(solves.c.id == red[3]).values(priority=1))
    order = [(await _claimed(context)).id for _ in range(5)]
    assert order[0] == red[3]
    assert sum(one in blue for one in order) == 3


async def test_what_is_carried_comes_and_goes_with_its_transaction(context: Context) -> None:
    """An engine is told of each solve that waits, once, in the transaction that lets it wait."""
    told: list[int] = []

    async def carry(connection: object, count: int) -> None:
        told.append(count)

    context.queue.carry = carry
    await _several(context, 2)
    assert told == [1, 1]
    async with context.database.write() as connection:
        await connection.execute(update(tenants).values(most_running=1))
    claimed = await _claimed(context)
    async with context.database.write() as connection:
        await context.queue.settle(connection, claimed, {"state": "queued"})
    assert told == [1, 1, 1]
    claimed = await _claimed(context)
    async with context.database.write() as connection:
        await context.queue.settle(connection, claimed, {"state": "ended"})  # its tenant was at its limit
    assert told == [1, 1, 1, 1]
    claimed = await _claimed(context)
    async with context.database.write() as connection:
        await context.queue.settle(connection, claimed, {"state": "ended"})
    assert told == [1, 1, 1, 1]


async def test_a_takeover_keeps_the_bound_and_counts_its_own_wait(context: Context) -> None:
    """The next worker's solver begins below what the last one's has claimed: what is told never goes back, but where a
    plan refutes it. The first run is no wait.
    """

    async def told(record: SolveRecord, outcome: Outcome, bound_ns: int) -> tuple[int, list[int]]:
        frame = {"type": "progress", "bound_ns": bound_ns, "whole_bound_ns": bound_ns, "restricted_to": []}
        await record.take(outcome, frame)
        async with context.database.read() as connection:
            points = (await connection.execute(select(events.c.bound_ns).order_by(events.c.seq))).scalars()
            return int(await connection.scalar(select(solves.c.bound_ns)) or 0), list(points)

    await _several(context, 1)
    async with context.database.write() as connection:
        await connection.execute(update(solves).values(queued_at=context.clock.now() - timedelta(hours=1)))
    old = await read_claim(context, await _claimed(context))
    assert 3590 < old.queued_s < 3700
    least = old.net.subject.total_cost_ns
    assert (await told(SolveRecord(context, old), Outcome(old.net, "auto", "d", 0), least + 90))[0] == least + 90
    assert await context.queue.put_back() == 1
    new = await read_claim(context, await _claimed(context))
    assert new.queued_s < 100
    record, outcome = SolveRecord(context, new), Outcome(new.net, "auto", "d", 0)
    for said, kept in ((least + 40, least + 90), (least + 95, least + 95), (least + 60, least + 95)):
        bound, points = await told(record, outcome, said)
        assert bound == kept
        assert points == sorted(set(points))


async def test_quotas_are_exact_between_servers(url: str) -> None:
    """Twelve POSTs at once through two servers, three allowed: three are queued, nine refused."""
    async with AsyncExitStack() as stack:
        count = 2 if "postgresql" in url else 1
        servers = [await stack.enter_async_context(process(url)) for _ in range(count)]
        caller = await default_tenant(servers[0])
        async with servers[0].database.write() as connection:
            await connection.execute(update(tenants).values(most_queued=3))
        asks = [Ask(Problem(training_graph(5, cost=2000 + i), 10**9), time_limit_s=5) for i in range(12)]
        taken = await asyncio.gather(
            *(Submission(servers[i % len(servers)], caller, ask).submit() for i, ask in enumerate(asks)),
            return_exceptions=True,
        )
        assert sum(isinstance(found, RateLimited) for found in taken) == 9
        async with servers[0].database.read() as connection:
            assert await connection.scalar(select(func.count()).select_from(solves)) == 3


@pytest.mark.thorough
async def test_no_graph_is_evicted_from_under_a_solve_that_is_being_queued() -> None:
    """On PostgreSQL, where the one does not see yet what the other writes: the solve would go with its graph."""
    with postgres() as url:
        async with process(url, store_bytes=0) as context:
            first = await queued(context, await default_tenant(context), small(3000))
            async with context.database.write() as connection:
                row = (await connection.execute(select(solves).where(solves.c.id == first))).one()
                await connection.execute(update(solves).values(state="ended"))
                await connection.execute(update(requests).values(ended=True, ended_at=context.clock.now()))
            async with context.database.write() as connection:
                second = await context.queue.put(connection, {**row._mapping, "id": context.clock.new_id()})
                assert second is not None
                evicting = asyncio.create_task(evict(context.database, context.settings, context.metrics))
                waits = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
                while not evicting.done() and not (await context.database.rows(waits))[0][0]:
                    await asyncio.sleep(0.01)
            assert await evicting == 0
            assert await _state(context, second) == "queued"
            async with context.database.write() as connection:
                await connection.execute(update(solves).values(state="ended"))
            assert await evict(context.database, context.settings, context.metrics) == 1


# ---- shares: what a tenant may take from the others


async def test_priority_orders_a_tenants_own_solves_alone(context: Context) -> None:
    """A tenant's urgent solves: the most urgent of them first, and never before another tenant's turn."""
    red, blue = await _tenant(context, "red"), await _tenant(context, "blue")
    usual = await queued(context, red, small(1000))
    urgent = await queued(context, red, small(1001), priority=100)
    theirs = await queued(context, blue, small(1002), priority=-100)
    assert await _due(context) == urgent  # of the two tenants the one that waits longer
    assert await _due(context) == theirs
    assert await _due(context) == usual
    assert await _due(context) is None


@pytest.mark.thorough
async def test_with_one_worker_tenants_take_turns_by_weight(context: Context) -> None:
    """Nothing runs when a solve is chosen: what each has been given decides, in the ratio of the weights."""
    callers = {name: await _tenant(context, name, weight) for name, weight in (("red", 1.0), ("blue", 2.0))}
    names, served = {}, []
    for i, (name, caller) in enumerate(callers.items()):
        for j in range(2):
            names[await queued(context, caller, small(1000 + 10 * i + j), priority=100 * (name == "red"))] = name
    for i in range(9):
        due = await _due(context)
        name = names[due]
        served.append(name)
        async with context.database.write() as connection:
            await connection.execute(update(solves).where(solves.c.id == due).values(state="ended"))
        context.queue.turns.spend(callers[name].tenant_id, 5.0)
        names[await queued(context, callers[name], small(2000 + i), priority=100 * (name == "red"))] = name
    assert (served.count("red"), served.count("blue")) == (3, 6)


async def test_a_full_queue_refuses_those_who_filled_it(url: str) -> None:
    """One tenant takes every place in the queue: it gets no more, and the other still gets its share."""
    async with process(url, most_queued=4) as context:
        red, blue = await _tenant(context, "red"), await _tenant(context, "blue")
        for i in range(4):
            await queued(context, red, small(i))
        with pytest.raises(Unavailable, match="the queue is full"):
            await queued(context, red, small(4))
        await queued(context, blue, small(5))
        await queued(context, blue, small(6))
        with pytest.raises(Unavailable, match="the queue is full"):
            await queued(context, blue, small(7))
        async with context.database.write() as connection:
            await connection.execute(update(tenants).where(tenants.c.name == "red").values(disabled=True))
        await queued(context, blue, small(7))


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
