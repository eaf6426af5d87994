"""Reading all that a stored answer rests on, in one statement.

On SQLite the look is a prepared statement on a read-only connection of the event loop's own: tens of microseconds,
where a connection of the pool costs a thread switch for every statement. Readers of a WAL never wait for a writer;
should the file be locked all the same, the pool is asked.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import BindParameter, ColumnElement, Select, and_, bindparam, exists, func, or_, select
from sqlalchemy.dialects import sqlite

from remat_solver.knowledge import Bound

from ..identity import Caller
from .cache_key import SOLVER, Keys
from .database import Database
from .epochs import of_epoch
from .store import WHOLE, Effort, StoredPlan, names
from .tables import ACTIVE, bounds, efforts, floors, graphs, plans, requests, solves


class Snapshot(NamedTuple):
    """What a hit is put together from (see `cache.py`), and whether a solve is under way that it should join.

    Equal snapshots give equal answers. `data` are the plan's stored bytes themselves, not a checksum of them.
    """

    plan_id: str | None
    plan_method: str
    source: str
    cost_ns: int
    peak_bytes: int
    data: bytes
    bound_ns: int | None
    restricted_ns: int | None
    restricted_to: str | None
    least_bytes: int | None
    enough_bytes: int | None
    smallest_peak_bytes: int | None
    seconds: float | None
    settled: bool
    status: str
    limit: str | None
    effort_within: str
    message: str
    under_way: bool

    def plan(self, graph_key: str) -> StoredPlan | None:
        """The cheapest plan within the budget; it has not been verified."""
        if self.plan_id is None:
            return None
        return StoredPlan(
            self.plan_id, graph_key, self.plan_method, self.source, self.cost_ns, self.peak_bytes, self.data
        )

    @property
    def restricted(self) -> Bound | None:
        """The best bound of the method's own restricted search."""
        return None if self.restricted_ns is None else Bound(self.restricted_ns, names(self.restricted_to or ""))

    @property
    def enough(self) -> int | None:
        """The least budget that is known to suffice."""
        return min((b for b in (self.enough_bytes, self.smallest_peak_bytes) if b is not None), default=None)

    @property
    def effort(self) -> Effort | None:
        """What was last done about exactly this problem by this method."""
        if self.seconds is None:
            return None
        within = names(self.effort_within)
        return Effort(self.seconds, bool(self.settled), self.status, self.limit, within, self.message)


class EndedRequest(NamedTuple):
    """An ended request: its answer, and its plan as it is stored; no plan where the answer has none."""

    answer: Any
    graph_key: str
    budget_bytes: int
    data: bytes | None
    cost_ns: int | None
    peak_bytes: int | None


def _snapshot() -> Select[Any]:
    graph: BindParameter[str] = bindparam("graph")
    budget: BindParameter[int] = bindparam("budget")
    method: BindParameter[str] = bindparam("method")
    best = (
        select(plans.c.id)
        .where(
            plans.c.graph_key == graph,
            plans.c.peak_bytes <= budget,
            or_(bindparam("any_method") == 1, plans.c.method_key == method),
        )
        .order_by(plans.c.cost_ns, plans.c.peak_bytes, plans.c.id)
        .limit(1)
        .scalar_subquery()
    )
    of_solver = bounds.c.solver == SOLVER
    whole = select(func.max(bounds.c.bound_ns)).where(
        bounds.c.graph_key == graph, bounds.c.budget_bytes >= budget, bounds.c.restricted_to == WHOLE, of_solver
    )

    def restricted(column: ColumnElement[Any]) -> Any:
        return (
            select(column)
            .where(
                bounds.c.graph_key == graph,
                bounds.c.budget_bytes == budget,
                bounds.c.method_key == method,
                bounds.c.restricted_to != WHOLE,
                of_solver,
            )
            .order_by(bounds.c.bound_ns.desc(), bounds.c.restricted_to)
            .limit(1)
            .scalar_subquery()
        )

    one = select(best.label("plan_id")).subquery()
    rows = one.outerjoin(plans, plans.c.id == one.c.plan_id)
    rows = rows.outerjoin(floors, and_(floors.c.graph_key == graph, floors.c.solver == SOLVER))
    rows = rows.outerjoin(
        efforts,
        and_(
            efforts.c.graph_key == graph,
            efforts.c.budget_bytes == budget,
            efforts.c.method_key == method,
            efforts.c.solver == SOLVER,
        ),
    )
    others = plans.alias("others")
    return select(
        one.c.plan_id, plans.c.method_key, plans.c.source, plans.c.cost_ns, plans.c.peak_bytes, plans.c.data,
        whole.scalar_subquery(), restricted(bounds.c.bound_ns), restricted(bounds.c.restricted_to),
        floors.c.least_bytes, floors.c.enough_bytes,
        select(func.min(others.c.peak_bytes)).where(others.c.graph_key == graph).scalar_subquery(),
        efforts.c.seconds, efforts.c.settled, efforts.c.status, efforts.c.limit, efforts.c.restricted_to,
        efforts.c.message,
        exists().where(solves.c.flight_key == bindparam("flight"), ACTIVE),
    ).select_from(rows)  # fmt: skip


_SNAPSHOT = _snapshot()
_ENDED_REQUEST = (
    select(
        requests.c.answer,
        requests.c.graph_key,
        requests.c.budget_bytes,
        plans.c.data,
        plans.c.cost_ns,
        plans.c.peak_bytes,
    )
    .select_from(requests.outerjoin(plans, plans.c.id == requests.c.plan_id))
    .where(
        requests.c.id == bindparam("id"),
        requests.c.tenant_id == bindparam("tenant"),
        requests.c.ended.is_(True),
        of_epoch(bindparam("epoch")),
        or_(requests.c.plan_id.is_(None), plans.c.id.is_not(None)),
    )
)
_IDEMPOTENCY_KEY = select(requests.c.id).where(
    requests.c.tenant_id == bindparam("tenant"), requests.c.idempotency_key == bindparam("key")
)
_GRAPH = select(graphs.c.data).where(graphs.c.key == bindparam("graph"))

_NAMED = sqlite.dialect(paramstyle="named")


class SnapshotReader:
    """Looks; never writes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._own: sqlite3.Connection | None = None
        compiled = [
            (query, query.compile(dialect=_NAMED)) for query in (_SNAPSHOT, _ENDED_REQUEST, _IDEMPOTENCY_KEY, _GRAPH)
        ]
        self._texts = {query: (str(statement), statement.params) for query, statement in compiled}

    async def read(self, keys: Keys, net_budget: int) -> Snapshot:
        """What an answer to this problem by this method rests on now."""
        named = {"graph": keys.graph, "budget": net_budget, "method": keys.method, "flight": keys.flight}
        row = await self._row(_SNAPSHOT, named | {"any_method": int(keys.method == "auto")})
        return Snapshot._make(row)

    async def ended_request(self, caller: Caller, request_id: str) -> EndedRequest | None:
        """A request that has ended; None where there is none, its plan is gone, or its epoch is over."""
        row = await self._row(_ENDED_REQUEST, {"id": request_id, "tenant": caller.tenant_id, "epoch": caller.epoch})
        if row is None:
            return None
        found = EndedRequest._make(row)  # SQLite's own reader leaves JSON as text
        return found._replace(answer=json.loads(found.answer)) if isinstance(found.answer, str) else found

    async def graph_row(self, key: str) -> bytes | None:
        """The stored bytes of a graph."""
        row = await self._row(_GRAPH, {"graph": key})
        return None if row is None else bytes(row[0])

    async def has_idempotency_key(self, tenant_id: str, key: str) -> bool:
        """Whether a request with this idempotency key is there."""
        return await self._row(_IDEMPOTENCY_KEY, {"tenant": tenant_id, "key": key}) is not None

    async def _row(self, query: Select[Any], named: Mapping[str, object]) -> Any:
        if self._database.is_sqlite:
            try:
                if self._own is None:
                    path = self._database.engine.url.database or ":memory:"
                    self._own = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None, timeout=0.0)
                statement, constants = self._texts[query]
                return self._own.execute(statement, {**constants, **named}).fetchone()
            except sqlite3.Error:
                self.close()
        async with self._database.read() as connection:
            return (await connection.execute(query, dict(named))).first()

    def close(self) -> None:
        """Close the connection."""
        if self._own is not None:
            self._own.close()
            self._own = None
