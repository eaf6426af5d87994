"""The queue's protocol, the same on both databases: put, claim, beat, settle, take over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta

import pytest
from sqlalchemy import func, select, text, update

from remat_ir import Problem
from remat_service.context import Context
from remat_service.errors import RateLimited
from remat_service.requests.parse import Ask
from remat_service.requests.read import find_request
from remat_service.requests.submit import Submission
from remat_service.settings import Settings
from remat_service.solving.record import Outcome, SolveRecord, read_claim
from remat_service.storage.queue import Claimed, LostClaim
from remat_service.storage.tables import events, solves, tenants
from remat_service.tenants.keys import add_tenant, caller_of, default_caller
from service.database import process
from service.serving import small, training_graph


@pytest.fixture
async def context(url: str) -> AsyncIterator[Context]:
    """A process of the service over it, which solves nothing by itself."""
    async with process(url, stale_after_s=3, heartbeat_s=0.5) as made:
        yield made


async def _queued(context: Context, count: int, tenant: str = "default", priority: int = 0) -> list[str]:
    """Solves of a tenant, written as a server writes them."""
    async with context.database.write() as connection:
        caller = await default_caller(connection)
        if tenant != "default":
            known = await connection.scalar(select(tenants.c.id).where(tenants.c.name == tenant))
            caller = await caller_of(connection, known or await add_tenant(connection, tenant))
        there = int(await connection.scalar(select(func.count()).select_from(solves)) or 0)
    ids = []
    for i in range(count):
        ask = Ask(small(there + i), time_limit_s=5, method="checkpoint-all", priority=priority)
        request_id = await Submission(context, caller, ask).submit()
        ids.append(str((await find_request(context, caller, request_id)).solve_id))
    return ids


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
    ids = await _queued(context, 3)
    found = [one for one in await asyncio.gather(*(context.queue.claim(f"w{i}") for i in range(10))) if one]
    assert sorted(one.id for one in found) == sorted(ids)
    assert {one.attempt for one in found} == {1}
    assert await context.queue.claim("late") is None


async def test_the_same_solve_waits_once(context: Context) -> None:
    """Ten of the same problem at once are one row, whoever comes first."""
    async with context.database.write() as connection:
        caller = await default_caller(connection)
    ask = Ask(small(0), time_limit_s=5, method="checkpoint-all")
    await asyncio.gather(*(Submission(context, caller, ask).submit() for _ in range(10)))
    async with context.database.read() as connection:
        assert await connection.scalar(select(func.count()).select_from(solves)) == 1


async def test_a_row_that_is_locked_is_waited_for_where_there_is_no_other(context: Context) -> None:
    """A joiner holds the only solve for a moment: the claim comes behind it, and is not lost."""
    (solve_id,) = await _queued(context, 1)
    async with context.database.write() as connection:
        await connection.execute(select(solves.c.id).where(solves.c.id == solve_id).with_for_update())
        claim = asyncio.create_task(context.queue.claim("worker"))
        await asyncio.sleep(0.3)
        assert not claim.done()
    assert (await claim).id == solve_id


async def test_who_lost_the_claim_writes_nothing(context: Context) -> None:
    """A worker that was thought dead comes back: its signs of life and its findings are refused."""
    await _queued(context, 1)
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
    await _queued(context, 1)
    claimed = await _claimed(context)
    slow = type("Slow", (type(context.clock),), {"now": lambda self: context.clock.now() - timedelta(hours=1)})()
    context.database.machine, context.database.clock = context.clock, slow
    await context.queue.beat(claimed, 0.0)
    assert await context.queue.take_over() == 0


async def test_spent_seconds_never_go_back(context: Context) -> None:
    """A sign of life that was on its way while more was written changes only the lease."""
    await _queued(context, 1)
    claimed = await _claimed(context)
    await context.queue.beat(claimed, 5.0)
    await context.queue.beat(claimed, 4.0)
    async with context.database.read() as connection:
        assert await connection.scalar(select(solves.c.spent_s)) == 5.0


async def test_a_tenant_at_its_limit_waits_and_the_next_one_runs(context: Context) -> None:
    """Claims at once never take more than its quota; the end of one makes way for the next."""
    first = await _queued(context, 3)
    others = await _queued(context, 1, "others")
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
    red = await _queued(context, 4, "red")
    blue = await _queued(context, 4, "blue")
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
    await _queued(context, 2)
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

    await _queued(context, 1)
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
        async with servers[0].database.write() as connection:
            caller = await default_caller(connection)
            await connection.execute(update(tenants).values(most_queued=3))
        asks = [Ask(Problem(training_graph(5, cost=2000 + i), 10**9), time_limit_s=5) for i in range(12)]
        taken = await asyncio.gather(
            *(Submission(servers[i % len(servers)], caller, ask).submit() for i, ask in enumerate(asks)),
            return_exceptions=True,
        )
        assert sum(isinstance(found, RateLimited) for found in taken) == 9
        async with servers[0].database.read() as connection:
            assert await connection.scalar(select(func.count()).select_from(solves)) == 3


def test_silence_outlasts_a_heartbeat() -> None:
    """A setting under which live workers would be taken for dead is refused in a sentence."""
    with pytest.raises(ValueError, match="at least three times REMAT_HEARTBEAT_S"):
        Settings(stale_after_s=5, heartbeat_s=2)
