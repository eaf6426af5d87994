"""The queue: the rows of `solves`, on both databases the system of record of what waits, what runs and who runs it.

put         a solve that waits, unless the same one is under way: the unique index on flights is the single flight
claim       the solve that is due, with a fencing token: the tenant by weighted fair queueing (`Turns`), of its own
            solves by priority and age
beat        a sign of life: the lease goes on from here
settle      any other write of a running solve, in the caller's transaction
take over   solves whose lease has run out wait again

A claim raises `attempt`, and `beat` and `settle` write `WHERE attempt = mine`: who has lost its claim writes nothing.
Who is alive is decided by the lease alone: `heartbeat_at` and now are both read from one clock, the database's.
Where an engine carries the work to other machines it is told, in the same transaction, that one more solve waits
(`carry`); what it is told names no solve, and nothing is believed of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, DateTime, Interval, and_, case, func, literal, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from .database import Database
from .tables import Utc, solves, tenants

Carry = Callable[[AsyncConnection, int], Awaitable[None]]
"""Tells an engine, on the connection of a transaction, that so many more solves wait."""


class Waiting(NamedTuple):
    """A tenant of which something waits.

    Attributes:
        running: the tenant's solves that run now, in all processes.
        queued_s: since when the oldest waits, in seconds since any moment that all tenants share.
        free: how many of those that wait may run now.
    """

    tenant_id: str
    weight: float
    running: int
    queued_s: float
    free: int = 1


class Turns:
    """The virtual time of each tenant: its solver seconds in this process, divided by its weight.

    One that has not waited gains nothing by it: it starts at the least virtual time of those that do wait. Each process
    counts its own seconds, and after a restart from zero; solves that run are counted in the database, for all.

    Example:
        >>> red, blue = Waiting("red", 1.0, 0, 1.0), Waiting("blue", 1.0, 0, 2.0)
        >>> turns = Turns()
        >>> [each.tenant_id for each in turns.order([red, blue])]
        ['red', 'blue']
        >>> turns.spend("red", 5.0)
        >>> [each.tenant_id for each in turns.order([red, blue])]
        ['blue', 'red']
    """

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._least = 0.0

    def order(self, waiting: Iterable[Waiting]) -> list[Waiting]:
        """Who is due, the first one first: fewest running for its weight; least served; longest waiting."""
        found = list(waiting)
        self._weights |= {each.tenant_id: each.weight for each in found}
        served = (self._spent.get(each.tenant_id, 0.0) for each in found)
        self._least = max(self._least, min(served, default=0.0))
        return sorted(found, key=self._key)

    def spend(self, tenant_id: str, seconds: float) -> None:
        """A solve of a tenant has run for so long."""
        at = max(self._spent.get(tenant_id, 0.0), self._least)
        self._spent[tenant_id] = at + seconds / self._weights.get(tenant_id, 1.0)

    def _key(self, each: Waiting) -> tuple[float, float, float, str]:
        served = max(self._spent.get(each.tenant_id, 0.0), self._least)
        return each.running / each.weight, served, each.queued_s, each.tenant_id


_COUNT_S = 1.0
_WAITING = select(func.count()).select_from(solves).where(solves.c.state == "queued")


class LostClaim(Exception):
    """Somebody else has the solve now."""


@dataclass(frozen=True)
class Claimed:
    """A solve that is ours until its `attempt` changes.

    Attributes:
        row: all of its columns.
        queued_s: seconds without a worker before this claim: since it was queued, or since the last sign of life of the
            worker that had it before.
    """

    row: Any
    queued_s: float

    @property
    def id(self) -> str:
        """Of the solve."""
        return str(self.row.id)

    @property
    def attempt(self) -> int:
        """The fencing token."""
        return int(self.row.attempt)


class Queue:
    """The solves of one database.

    Args:
        stale_after_s: seconds without a sign of life after which a solve is taken over.

    Attributes:
        carry: tells the engine; None where there is none.
        turns: which tenant is due, by the seconds that this process has given to each.
    """

    def __init__(self, database: Database, stale_after_s: float) -> None:
        self._database, self.turns, self._stale_after_s = database, Turns(), stale_after_s
        self.carry: Carry | None = None
        self._put = database.insert(solves).on_conflict_do_nothing().returning(solves.c.id)
        self._waiting, self._counted_at = 0, -float("inf")

    async def holds(self, connection: AsyncConnection, most: int) -> bool:
        """Whether so many solves wait, of all tenants.

        A count of thousands at each miss would take longer than the rest of it. So they are counted anew after a
        second, and at each call once there may be half as many: other processes let solves wait, too.
        """
        moment = self._database.clock.monotonic()
        if 2 * self._waiting >= most or moment - self._counted_at >= _COUNT_S:
            self._waiting, self._counted_at = await connection.scalar(_WAITING) or 0, moment
        return self._waiting >= most

    async def put(self, connection: AsyncConnection, values: Mapping[str, Any]) -> str | None:
        """Let a solve wait; its id, or None where the same one is under way."""
        row = {**values, "state": "queued", "queued_at": self._database.clock.now()}
        found: str | None = await connection.scalar(self._put, row)
        if found is not None:
            self._waiting += 1
            await self._carry(connection)
        return found

    async def claim(self, worker: str, ticket: int | None = None) -> Claimed | None:
        """Make the solve that is due ours; None where none is, or none may run.

        Args:
            worker: who claims it.
            ticket: the engine's job under which it is claimed: what workers of the version before look at.
        """
        async with self._database.read() as connection:  # mostly there is none, and no write is begun
            if not await self.waiting(connection):
                return None
        async with self._database.write() as connection:
            due = self.turns.order(await self.waiting(connection))
            # first what nobody else has locked; where that is nothing, a joiner may have a row for a moment
            for skip_locked in (True, False):
                for each in due:
                    found = await self._next_of(connection, each.tenant_id, skip_locked)
                    if found is not None:
                        return await self._take(connection, found, worker, ticket)
        return None

    async def waiting(self, connection: AsyncConnection) -> list[Waiting]:
        """What waits of each tenant that may have one more running."""
        waits = solves.c.state == "queued"
        query = (
            select(
                tenants.c.id,
                tenants.c.weight,
                tenants.c.most_running,
                func.count().filter(waits).label("queued"),
                func.count().filter(~waits).label("running"),
                func.min(solves.c.queued_at).filter(waits).label("since"),
            )
            .join(solves, solves.c.tenant_id == tenants.c.id)
            .where(solves.c.state.in_(("queued", "running")))
            .group_by(tenants.c.id, tenants.c.weight, tenants.c.most_running)
        )
        found = []
        for row in await connection.execute(query):
            free = row.queued if row.most_running is None else min(row.queued, row.most_running - row.running)
            if free > 0:
                found.append(Waiting(row.id, row.weight, row.running, row.since.timestamp(), free))
        return found

    async def _next_of(self, connection: AsyncConnection, tenant_id: str, skip_locked: bool) -> Any:
        """A tenant's next solve, locked; None where it may have no more running, which is counted under its lock."""
        limited = select(tenants.c.most_running).where(tenants.c.id == tenant_id, tenants.c.most_running.is_not(None))
        most = await connection.scalar(limited.with_for_update(key_share=True))
        mine = solves.c.tenant_id == tenant_id
        if most is not None:
            running = select(func.count()).select_from(solves).where(mine, solves.c.state == "running")
            if (await connection.scalar(running) or 0) >= most:
                return None
        query = (
            select(solves.c.id, func.coalesce(solves.c.heartbeat_at, solves.c.queued_at).label("since"))
            .where(mine, solves.c.state == "queued")
            .order_by(solves.c.priority.desc(), solves.c.queued_at, solves.c.id)
            .limit(1)
            .with_for_update(skip_locked=skip_locked)
        )
        return (await connection.execute(query)).first()

    async def _take(self, connection: AsyncConnection, found: Any, worker: str, ticket: int | None) -> Claimed:
        moment = self._database.clock.now()
        change = (
            update(solves)
            .where(solves.c.id == found.id)
            .values(
                state="running",
                attempt=solves.c.attempt + 1,
                worker=worker,
                ticket=ticket,
                heartbeat_at=self._moment(),
                started_at=moment,
                revision=solves.c.revision + 1,
            )
            .returning(*solves.c)
        )
        row = (await connection.execute(change)).one()
        return Claimed(row, max(0.0, (moment - found.since).total_seconds()))

    async def beat(self, claimed: Claimed, spent_s: float) -> None:
        """A sign of life, and the seconds of solving so far.

        Raises:
            LostClaim: it is ours no longer.
        """
        async with self._database.write(brief=True) as connection:
            spent = case((solves.c.spent_s < spent_s, spent_s), else_=solves.c.spent_s)  # never back
            await self.settle(connection, claimed, {"heartbeat_at": self._moment(), "spent_s": spent})

    async def settle(self, connection: AsyncConnection, claimed: Claimed, values: Mapping[str, Any]) -> None:
        """Write to a running solve of ours: what it has found, that it ends, or that it waits again.

        Raises:
            LostClaim: it is ours no longer; the transaction is to be rolled back.
        """
        mine = (solves.c.id == claimed.id, solves.c.attempt == claimed.attempt, solves.c.state == "running")
        change = update(solves).where(*mine).values(revision=solves.c.revision + 1, **values)
        if (await connection.execute(change)).rowcount != 1:
            raise LostClaim
        if values.get("state") == "queued" or (
            values.get("state") == "ended" and await self._frees(connection, claimed)
        ):
            await self._carry(connection)

    async def _frees(self, connection: AsyncConnection, claimed: Claimed) -> bool:
        """Whether the end of a solve lets another one of its tenant run, whose job found that tenant at its limit."""
        if self.carry is None:
            return False
        of_tenant = (solves.c.tenant_id == tenants.c.id, solves.c.state == "queued")
        limited = (tenants.c.id == claimed.row.tenant_id, tenants.c.most_running.is_not(None))
        return await connection.scalar(select(solves.c.id).where(*limited, *of_tenant).limit(1)) is not None

    async def take_over(self) -> int:
        """Let solves wait again whose worker has shown no sign of life for too long; how many."""
        lapsed = self._lapsed()
        if await self._database.first(select(solves.c.id).where(lapsed).limit(1)) is None:
            return 0
        return await self.put_back(lapsed)

    async def put_back(self, which: ColumnElement[bool] = solves.c.state == "running") -> int:
        """Let running solves wait again, by default all: at the start of the only process there is."""
        change = update(solves).where(which, solves.c.state == "running")
        async with self._database.write() as connection:
            waits = change.values(state="queued", worker=None, ticket=None, revision=solves.c.revision + 1)
            found = (await connection.execute(waits)).rowcount
            await self._carry(connection, found)
        return found

    def _lapsed(self) -> ColumnElement[bool]:
        """Whether the lease of a solve has run out; it begins anew where PostgreSQL was away: nobody could renew it."""
        since = self._moment(self._stale_after_s)
        lapsed = and_(solves.c.state == "running", solves.c.heartbeat_at < since)
        return lapsed if self._database.is_sqlite else and_(lapsed, func.pg_postmaster_start_time() < since)

    def _moment(self, ago_s: float = 0.0) -> ColumnElement[Any]:
        """A moment by the clock of the database: PostgreSQL's own; SQLite's is that of its machine."""
        if self._database.is_sqlite:
            return literal(self._database.machine.now() - timedelta(seconds=ago_s), Utc())
        now = func.clock_timestamp(type_=DateTime(timezone=True))
        return now - literal(timedelta(seconds=ago_s), Interval()) if ago_s else now

    async def _carry(self, connection: AsyncConnection, count: int = 1) -> None:
        if self.carry is not None and count:
            await self.carry(connection, count)
