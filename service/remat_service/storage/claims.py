"""What is claimed and cannot be checked anew: bounds without a certificate, floors, efforts. Each row is sealed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import Verdict

from .cache_key import SOLVER
from .database import Database
from .seals import Seals
from .tables import bounds, efforts, floors

WHOLE = ""
"""`restricted_to` of a bound that holds for every plan."""


class Claim(NamedTuple):
    """A row of `bounds`: a bound without a certificate, in its space, and who says it."""

    budget_bytes: int
    method_key: str
    restricted_to: str
    bound_ns: int
    source: str | None
    seal: str | None

    @property
    def within(self) -> tuple[str, ...]:
        """The space that it holds in."""
        return names(self.restricted_to)


class Floor(NamedTuple):
    """A row of `floors`: what is claimed to be necessary, 0 for nothing, and what is known to suffice."""

    least_bytes: int
    enough_bytes: int | None
    seal: str | None


class Effort(NamedTuple):
    """A row of `efforts`: what was last done about one problem by one method."""

    seconds: float
    settled: bool
    status: str
    limit: str | None
    restricted_to: str
    message: str
    seal: str | None = None

    @property
    def within(self) -> tuple[str, ...]:
        """The space that it has searched."""
        return names(self.restricted_to)


def names(restricted_to: str) -> tuple[str, ...]:
    """Restrictions as a tuple, from a column."""
    return tuple(restricted_to.split(",")) if restricted_to else ()


def column(restricted_to: Sequence[str]) -> str:
    """Restrictions as a column."""
    return ",".join(restricted_to)


CLAIM_COLUMNS = tuple(bounds.c[name] for name in Claim._fields)
FLOOR_COLUMNS = tuple(floors.c[name] for name in Floor._fields)
EFFORT_COLUMNS = tuple(efforts.c[name] for name in Effort._fields)


class Claims:
    """The sealed rows of the cache; every method takes the connection of the caller's transaction."""

    def __init__(self, database: Database, seals: Seals) -> None:
        self._database, self.seals = database, seals

    async def raise_bound(
        self,
        connection: AsyncConnection,
        graph_key: str,
        net_budget: int,
        bound_ns: int,
        source: str,
        method_key: str = "",
        restricted_to: Sequence[str] = (),
    ) -> None:
        """Keep a bound that has no certificate; a restricted one under its restriction and method, never for all plans.

        Args:
            source: who claims it.
        """
        row = {
            "graph_key": graph_key,
            "budget_bytes": net_budget,
            "method_key": method_key if restricted_to else "",
            "restricted_to": column(restricted_to),
            "solver": SOLVER,
            "bound_ns": bound_ns,
            "source": source[:100],
        }
        insert = self._database.insert(bounds).values(
            self.seals.sealed("bounds", row) | {"created_at": self._database.clock.now()}
        )
        await connection.execute(
            insert.on_conflict_do_update(
                index_elements=list(bounds.primary_key.columns),
                set_={name: insert.excluded[name] for name in ("bound_ns", "source", "seal", "created_at")},
                where=bounds.c.bound_ns < insert.excluded.bound_ns,
            )
        )

    async def drop_refuted(self, connection: AsyncConnection, graph_key: str, verdict: Verdict) -> None:
        """Forget every claim about a graph that a verified plan of this cost and peak shows to be wrong, and how solves
        of that graph ended: they may have rested on it.
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
            delete(floors).where(floors.c.graph_key == graph_key, floors.c.least_bytes > verdict.peak_bytes)
        )
        await self.drop_efforts(connection, graph_key)

    async def claim(self, connection: AsyncConnection, graph_key: str, net_budget: int) -> Claim | None:
        """The best bound for every plan within a budget that is claimed: any at this budget or a larger one holds."""
        query = (
            select(*CLAIM_COLUMNS)
            .where(
                bounds.c.graph_key == graph_key,
                bounds.c.budget_bytes >= net_budget,
                bounds.c.restricted_to == WHOLE,
                bounds.c.solver == SOLVER,
            )
            .order_by(bounds.c.bound_ns.desc(), bounds.c.budget_bytes)
            .limit(1)
        )
        row = (await connection.execute(query)).first()
        claim = None if row is None else Claim(*row)
        return claim if claim is not None and self.holds_claim(graph_key, claim) else None

    async def raise_floor(
        self, connection: AsyncConnection, graph_key: str, least_bytes: int, enough_bytes: int | None
    ) -> None:
        """Keep what is claimed about the least budget, and what is known to suffice."""
        key = {"graph_key": graph_key, "solver": SOLVER}
        fresh = {**key, "least_bytes": 0, "enough_bytes": None}
        insert = self._database.insert(floors).values(self.seals.sealed("floors", fresh))
        await connection.execute(insert.on_conflict_do_nothing())
        of_graph = (floors.c.graph_key == graph_key, floors.c.solver == SOLVER)
        row = (await connection.execute(select(*FLOOR_COLUMNS).where(*of_graph).with_for_update())).one()
        known = Floor(*row)
        if not self.holds_floor(graph_key, known):
            known = Floor(0, None, None)
        enough = min((b for b in (known.enough_bytes, enough_bytes) if b is not None), default=None)
        merged = {"least_bytes": max(known.least_bytes, least_bytes), "enough_bytes": enough}
        if known.seal is None or merged != {"least_bytes": known.least_bytes, "enough_bytes": known.enough_bytes}:
            await connection.execute(update(floors).where(*of_graph).values(self.seals.sealed("floors", key | merged)))

    async def floor(self, connection: AsyncConnection, graph_key: str) -> tuple[int | None, int | None]:
        """(claimed to be necessary, known to suffice) for a graph, either None where nothing is known."""
        of_graph = (floors.c.graph_key == graph_key, floors.c.solver == SOLVER)
        row = (await connection.execute(select(*FLOOR_COLUMNS).where(*of_graph))).first()
        known = None if row is None else Floor(*row)
        if known is None or not self.holds_floor(graph_key, known):
            return None, None
        return known.least_bytes or None, known.enough_bytes

    async def put_effort(
        self, connection: AsyncConnection, graph_key: str, net_budget: int, method_key: str, effort: Effort
    ) -> None:
        """Keep how a solve ended; the longest one stands, and a settled one for good."""
        key = {"graph_key": graph_key, "budget_bytes": net_budget, "method_key": method_key, "solver": SOLVER}
        row = self.seals.sealed("efforts", key | effort._asdict())
        insert = self._database.insert(efforts).values(row | {"created_at": self._database.clock.now()})
        fresh = (*Effort._fields, "created_at")
        await connection.execute(
            insert.on_conflict_do_update(
                index_elements=list(efforts.primary_key.columns),
                set_={name: insert.excluded[name] for name in fresh},
                where=(insert.excluded.settled | (efforts.c.seconds <= insert.excluded.seconds))
                & (~efforts.c.settled | insert.excluded.settled),
            )
        )

    def holds_claim(self, graph_key: str, claim: Claim) -> bool:
        """Whether a claim is what was stored."""
        return self.seals.holds("bounds", {"graph_key": graph_key, "solver": SOLVER, **claim._asdict()})

    def holds_floor(self, graph_key: str, floor: Floor) -> bool:
        """Whether a floor is what was stored."""
        return self.seals.holds("floors", {"graph_key": graph_key, "solver": SOLVER, **floor._asdict()})

    def holds_effort(self, graph_key: str, net_budget: int, method_key: str, effort: Effort) -> bool:
        """Whether an effort is what was stored."""
        key = {"graph_key": graph_key, "budget_bytes": net_budget, "method_key": method_key, "solver": SOLVER}
        return self.seals.holds("efforts", key | effort._asdict())

    async def drop(self, connection: AsyncConnection, graph_key: str, row: Claim | Floor | Effort) -> None:
        """Forget a row that is not what was stored; of efforts, those of the graph."""
        if isinstance(row, Claim):
            key = {"graph_key": graph_key, "solver": SOLVER, **row._asdict()}
            same = bounds.c.seal.is_not_distinct_from(row.seal)
            await connection.execute(
                delete(bounds).where(*(c == key[c.name] for c in bounds.primary_key.columns), same)
            )
        elif isinstance(row, Floor):
            same = floors.c.seal.is_not_distinct_from(row.seal)
            await connection.execute(
                delete(floors).where(floors.c.graph_key == graph_key, floors.c.solver == SOLVER, same)
            )
        else:
            await self.drop_efforts(connection, graph_key)

    async def drop_efforts(self, connection: AsyncConnection, graph_key: str) -> None:
        """Forget how solves of a graph ended."""
        await connection.execute(delete(efforts).where(efforts.c.graph_key == graph_key))
