"""Writing and reading what was found and proved: graphs, plans, bounds, floors and efforts, by salted key.

All bytes in the store are net of fixed bytes: a plan's peak and a budget are what the step needs beyond them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import case, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import AnyPlan, Problem, Verdict

from ..identity import new_id
from ..subjects import size_of
from .cache_key import SOLVER, Keys
from .database import Database
from .packing import checksum, pack
from .tables import bounds, efforts, floors, graphs, now, plans, problems

WHOLE = ""
"""`restricted_to` of a bound that holds for every plan."""


@dataclass(frozen=True)
class StoredPlan:
    """A row of `plans`."""

    id: str
    graph_key: str
    method_key: str
    source: str
    cost_ns: int
    peak_bytes: int
    data: bytes

    @property
    def claimed(self) -> Verdict:
        """What the row says that the verifier will find."""
        return Verdict(self.cost_ns, self.peak_bytes)


@dataclass(frozen=True)
class Effort:
    """What was last done about one problem by one method."""

    seconds: float
    settled: bool
    status: str
    limit: str | None
    restricted_to: tuple[str, ...]
    message: str


def names(restricted_to: str) -> tuple[str, ...]:
    """Restrictions as a tuple, from a column."""
    return tuple(restricted_to.split(",")) if restricted_to else ()


def column(restricted_to: Sequence[str]) -> str:
    """Restrictions as a column."""
    return ",".join(restricted_to)


_PLAN_COLUMNS = (plans.c.id, plans.c.graph_key, plans.c.method_key, plans.c.source, plans.c.cost_ns, plans.c.peak_bytes)


def _stored(row: Any) -> StoredPlan:
    return StoredPlan(*row)


def _columns_of(net: Problem, structure_key: str) -> dict[str, Any]:
    packed = pack({net.kind: net.subject.to_json()})
    ops, edges = size_of(net.subject)
    return {
        "structure_key": structure_key,
        "ops": ops,
        "edges": edges,
        "total_cost_ns": net.subject.total_cost_ns,
        "data": packed,
        "size_bytes": len(packed),
    }


class Store:
    """The cache's tables; every method takes the connection of the caller's transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def put_graph(self, connection: AsyncConnection, keys: Keys, net: Problem) -> None:
        """Keep the subject of a net problem, and the problem's name; what is there already stays."""
        moment = now()
        known = await connection.scalar(select(graphs.c.key).where(graphs.c.key == keys.graph))
        if known is None:
            row = {"key": keys.graph, "created_at": moment, "used_at": moment, **_columns_of(net, keys.structure)}
            await connection.execute(self._database.insert(graphs).values(row).on_conflict_do_nothing())
        await connection.execute(
            self._database.insert(problems)
            .values(key=keys.problem, graph_key=keys.graph, budget_bytes=net.budget_bytes)
            .on_conflict_do_nothing()
        )

    async def replace_graph(self, connection: AsyncConnection, keys: Keys, net: Problem) -> None:
        """Write a graph anew whose row is damaged; what was found about it stays."""
        row = _columns_of(net, keys.structure)
        await connection.execute(update(graphs).where(graphs.c.key == keys.graph).values(row))

    async def graph_row(self, connection: AsyncConnection, key: str) -> bytes | None:
        """The packed graph."""
        data: bytes | None = await connection.scalar(select(graphs.c.data).where(graphs.c.key == key))
        return data

    async def total_cost(self, connection: AsyncConnection, key: str) -> int | None:
        """The cost of each op of a graph once, in ns."""
        total: int | None = await connection.scalar(select(graphs.c.total_cost_ns).where(graphs.c.key == key))
        return total

    async def put_plan(
        self, connection: AsyncConnection, graph_key: str, method_key: str, source: str, plan: AnyPlan, verdict: Verdict
    ) -> tuple[str, str]:
        """Keep a verified plan; returns its id and checksum, the older row's where the same plan is there."""
        packed = pack(plan.to_json())
        digest, moment = checksum(packed), now()
        row = {
            "id": new_id(),
            "graph_key": graph_key,
            "method_key": method_key,
            "source": source[:100],
            "solver": SOLVER,
            "cost_ns": verdict.cost_ns,
            "peak_bytes": verdict.peak_bytes,
            "data": packed,
            "checksum": digest,
            "size_bytes": len(packed),
            "created_at": moment,
            "used_at": moment,
        }
        insert = self._database.insert(plans).values(row)
        # data again: a row whose bytes were damaged is made whole by the same plan found anew
        again = {key: row[key] for key in ("data", "cost_ns", "peak_bytes", "used_at", "size_bytes")}
        stored: str | None = await connection.scalar(
            insert.on_conflict_do_update(
                index_elements=[plans.c.graph_key, plans.c.method_key, plans.c.checksum], set_=again
            ).returning(plans.c.id)
        )
        assert stored is not None
        return stored, digest

    async def best_plan(
        self, connection: AsyncConnection, graph_key: str, net_budget: int, method_key: str | None
    ) -> StoredPlan | None:
        """The cheapest plan within a budget; of any method where `method_key` is None."""
        query = (
            select(*_PLAN_COLUMNS, plans.c.data)
            .where(plans.c.graph_key == graph_key, plans.c.peak_bytes <= net_budget)
            .order_by(plans.c.cost_ns, plans.c.peak_bytes, plans.c.id)
            .limit(1)
        )
        if method_key is not None:
            query = query.where(plans.c.method_key == method_key)
        row = (await connection.execute(query)).first()
        return None if row is None else _stored(row)

    async def plans_within(
        self, connection: AsyncConnection, graph_key: str, net_budget: int, method_key: str | None
    ) -> list[StoredPlan]:
        """Every plan within a budget, cheapest first; read only where the cheapest is damaged."""
        query = (
            select(*_PLAN_COLUMNS, plans.c.data)
            .where(plans.c.graph_key == graph_key, plans.c.peak_bytes <= net_budget)
            .order_by(plans.c.cost_ns, plans.c.peak_bytes, plans.c.id)
        )
        if method_key is not None:
            query = query.where(plans.c.method_key == method_key)
        return [_stored(row) for row in (await connection.execute(query)).all()]

    async def plan(self, connection: AsyncConnection, plan_id: str) -> StoredPlan | None:
        """A plan by its id."""
        row = (await connection.execute(select(*_PLAN_COLUMNS, plans.c.data).where(plans.c.id == plan_id))).first()
        return None if row is None else _stored(row)

    async def drop_plan(self, connection: AsyncConnection, plan_id: str) -> None:
        """Forget a plan that the verifier has refused."""
        await connection.execute(delete(plans).where(plans.c.id == plan_id))

    async def touch(self, connection: AsyncConnection, graph_key: str, plan_id: str | None) -> None:
        """Note that they were of use, for eviction."""
        moment = now()
        await connection.execute(update(graphs).where(graphs.c.key == graph_key).values(used_at=moment))
        if plan_id is not None:
            await connection.execute(update(plans).where(plans.c.id == plan_id).values(used_at=moment))

    async def raise_bound(
        self,
        connection: AsyncConnection,
        graph_key: str,
        net_budget: int,
        bound_ns: int,
        method_key: str = "",
        restricted_to: Sequence[str] = (),
    ) -> None:
        """Keep a proved bound; a restricted one under its restriction and method, never as a bound on all plans."""
        insert = self._database.insert(bounds).values(
            graph_key=graph_key,
            budget_bytes=net_budget,
            method_key=method_key if restricted_to else "",
            restricted_to=column(restricted_to),
            solver=SOLVER,
            bound_ns=bound_ns,
            created_at=now(),
        )
        await connection.execute(
            insert.on_conflict_do_update(
                index_elements=list(bounds.primary_key.columns),
                set_={"bound_ns": insert.excluded.bound_ns, "created_at": insert.excluded.created_at},
                where=bounds.c.bound_ns < insert.excluded.bound_ns,
            )
        )

    async def drop_refuted(self, connection: AsyncConnection, graph_key: str, verdict: Verdict) -> None:
        """Forget every bound and floor of a graph that a verified plan of this cost and peak shows to be wrong, and how
        solves of that graph ended: they may have rested on them.
        """
        await connection.execute(
            delete(bounds).where(
                bounds.c.graph_key == graph_key,
                bounds.c.restricted_to == WHOLE,
                bounds.c.budget_bytes >= verdict.peak_bytes,
                bounds.c.bound_ns > verdict.cost_ns,
            )
        )
        await connection.execute(
            update(floors)
            .where(floors.c.graph_key == graph_key, floors.c.least_bytes > verdict.peak_bytes)
            .values(least_bytes=0)
        )
        await connection.execute(delete(efforts).where(efforts.c.graph_key == graph_key))

    async def whole_bound(self, connection: AsyncConnection, graph_key: str, net_budget: int) -> int | None:
        """The best bound for every plan within a budget: any bound proved at this budget or a larger one holds."""
        bound: int | None = await connection.scalar(
            select(func.max(bounds.c.bound_ns)).where(
                bounds.c.graph_key == graph_key,
                bounds.c.budget_bytes >= net_budget,
                bounds.c.restricted_to == WHOLE,
                bounds.c.solver == SOLVER,
            )
        )
        return bound

    async def raise_floor(
        self, connection: AsyncConnection, graph_key: str, least_bytes: int, enough_bytes: int | None
    ) -> None:
        """Keep what is proved about the least budget, and what is known to suffice."""
        insert = self._database.insert(floors).values(
            graph_key=graph_key, solver=SOLVER, least_bytes=least_bytes, enough_bytes=enough_bytes
        )
        least, enough = floors.c.least_bytes, floors.c.enough_bytes
        new_least, new_enough = insert.excluded.least_bytes, insert.excluded.enough_bytes
        await connection.execute(
            insert.on_conflict_do_update(
                index_elements=[floors.c.graph_key, floors.c.solver],
                set_={
                    "least_bytes": _choose(least, new_least, new_least > least),
                    "enough_bytes": _choose(enough, new_enough, (enough.is_(None)) | (new_enough < enough)),
                },
            )
        )

    async def floor(self, connection: AsyncConnection, graph_key: str) -> tuple[int | None, int | None]:
        """(proved necessary, known to suffice) for a graph, either None where nothing is known."""
        row = (
            await connection.execute(
                select(floors.c.least_bytes, floors.c.enough_bytes).where(
                    floors.c.graph_key == graph_key, floors.c.solver == SOLVER
                )
            )
        ).first()
        smallest: int | None = await connection.scalar(
            select(func.min(plans.c.peak_bytes)).where(plans.c.graph_key == graph_key)
        )
        least, enough = (None, None) if row is None else (row.least_bytes, row.enough_bytes)
        known = [number for number in (enough, smallest) if number is not None]
        return least, min(known) if known else None

    async def put_effort(
        self, connection: AsyncConnection, graph_key: str, net_budget: int, method_key: str, effort: Effort
    ) -> None:
        """Keep how a solve ended; the longest one stands, and a settled one for good."""
        insert = self._database.insert(efforts).values(
            graph_key=graph_key,
            budget_bytes=net_budget,
            method_key=method_key,
            solver=SOLVER,
            seconds=effort.seconds,
            settled=effort.settled,
            status=effort.status,
            limit=effort.limit,
            restricted_to=column(effort.restricted_to),
            message=effort.message,
            created_at=now(),
        )
        fresh = ("seconds", "settled", "status", "limit", "restricted_to", "message", "created_at")
        await connection.execute(
            insert.on_conflict_do_update(
                index_elements=list(efforts.primary_key.columns),
                set_={name: insert.excluded[name] for name in fresh},
                where=(insert.excluded.settled | (efforts.c.seconds <= insert.excluded.seconds))
                & (~efforts.c.settled | insert.excluded.settled),
            )
        )


def _choose(old: Any, new: Any, better: Any) -> Any:
    return case((better, new), else_=old)
