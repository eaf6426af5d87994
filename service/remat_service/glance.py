"""One quick look at all that a stored answer rests on: is every row of it still what it was?

On SQLite the look is a prepared statement on a read-only connection of the event loop's own: tens of microseconds,
where a connection of the pool costs a thread switch for every statement. Readers of a WAL never wait for a writer;
should the file be locked all the same, there is no look, and the long way is taken.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import BindParameter, Select, bindparam, exists, func, or_, select
from sqlalchemy.dialects import sqlite

from .database import Database
from .identity import SOLVER, Keys
from .store import WHOLE
from .tables import ACTIVE, bounds, efforts, floors, plans, requests, solves


class Footing(NamedTuple):
    """What a hit was put together from (see `cache.py`), and whether a solve is under way that it should join.

    Equal footings give equal answers. `data` are the plan's stored bytes themselves, not a checksum of them.
    """

    plan_id: str | None
    data: bytes | None
    cost_ns: int | None
    peak_bytes: int | None
    bound_ns: int | None
    restricted_ns: int | None
    least_bytes: int | None
    enough_bytes: int | None
    smallest_peak_bytes: int | None
    effort_at: object
    under_way: bool


class Given(NamedTuple):
    """An ended request: its answer, and its plan as it is stored; no plan where the answer has none."""

    answer: Any
    graph_key: str
    budget_bytes: int
    data: bytes | None
    cost_ns: int | None
    peak_bytes: int | None


def _footing() -> Select[Any]:
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
    restricted = select(func.max(bounds.c.bound_ns)).where(
        bounds.c.graph_key == graph, bounds.c.budget_bytes == budget, bounds.c.method_key == method,
        bounds.c.restricted_to != WHOLE, of_solver,
    )  # fmt: skip
    floor = (floors.c.graph_key == graph, floors.c.solver == SOLVER)
    effort = select(efforts.c.created_at).where(
        efforts.c.graph_key == graph, efforts.c.budget_bytes == budget, efforts.c.method_key == method,
        efforts.c.solver == SOLVER,
    )  # fmt: skip
    one = select(best.label("plan_id")).subquery()
    return select(
        one.c.plan_id, plans.c.data, plans.c.cost_ns, plans.c.peak_bytes,
        whole.scalar_subquery(), restricted.scalar_subquery(),
        select(floors.c.least_bytes).where(*floor).scalar_subquery(),
        select(floors.c.enough_bytes).where(*floor).scalar_subquery(),
        select(func.min(plans.c.peak_bytes)).where(plans.c.graph_key == graph).correlate(None).scalar_subquery(),
        effort.scalar_subquery(),
        exists().where(solves.c.flight_key == bindparam("flight"), ACTIVE),
    ).select_from(one.outerjoin(plans, plans.c.id == one.c.plan_id))  # fmt: skip


_FOOTING = _footing()
_GIVEN = (
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
        or_(requests.c.plan_id.is_(None), plans.c.id.is_not(None)),
    )
)
_RETRIED = select(requests.c.id).where(
    requests.c.tenant_id == bindparam("tenant"), requests.c.idempotency_key == bindparam("key")
)


_NAMED = sqlite.dialect(paramstyle="named")


class Glance:
    """Looks; never writes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._own: sqlite3.Connection | None = None
        compiled = [(query, query.compile(dialect=_NAMED)) for query in (_FOOTING, _GIVEN, _RETRIED)]
        self._texts = {query: (str(statement), statement.params) for query, statement in compiled}

    async def footing(self, keys: Keys, net_budget: int) -> Footing | None:
        """What an answer to this problem by this method rests on now; None where no look was to be had."""
        named = {"graph": keys.graph, "budget": net_budget, "method": keys.method, "flight": keys.flight}
        row = await self._row(_FOOTING, named | {"any_method": int(keys.method == "auto")})
        return None if row is None else Footing._make(row)

    async def given(self, tenant_id: str, request_id: str) -> Given | None:
        """A request that has ended; None where there is none, or its plan is gone, or no look was to be had."""
        row = await self._row(_GIVEN, {"id": request_id, "tenant": tenant_id})
        if row is None:
            return None
        found = Given._make(row)  # SQLite's own reader leaves JSON as text
        return found._replace(answer=json.loads(found.answer)) if isinstance(found.answer, str) else found

    async def retried(self, tenant_id: str, key: str) -> bool:
        """Whether a request with this idempotency key may be there."""
        try:
            return await self._look(_RETRIED, {"tenant": tenant_id, "key": key}) is not None
        except sqlite3.Error:
            return True

    async def _row(self, query: Select[Any], named: Mapping[str, object]) -> Any:
        try:
            return await self._look(query, named)
        except sqlite3.Error:
            return None

    async def _look(self, query: Select[Any], named: Mapping[str, object]) -> Any:
        if not self._database.is_sqlite:
            async with self._database.read() as connection:
                return (await connection.execute(query, dict(named))).first()
        if self._own is None:
            path = self._database.engine.url.database or ":memory:"
            self._own = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None, timeout=0.0)
        statement, constants = self._texts[query]
        return self._own.execute(statement, {**constants, **named}).fetchone()

    def close(self) -> None:
        """Close the connection."""
        if self._own is not None:
            self._own.close()
            self._own = None
