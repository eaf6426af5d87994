"""Writing and reading what was found and proved: graphs, plans and proofs, by salted key.

All bytes in the store are net of fixed bytes: a plan's peak and a budget are what the step needs beyond them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import bindparam, delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import AnyPlan, Problem, Verdict

from ..subjects import size_of
from .cache_key import SOLVER, Keys
from .claims import Claims
from .database import Database
from .tables import graphs, plans, problems, proofs
from .verifier import checksum, pack


class StoredPlan(NamedTuple):
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


class StoredProof(NamedTuple):
    """A row of `proofs`: a certificate, and the bound that it is said to prove at its budget; None: no plan fits."""

    id: str
    graph_key: str
    budget_bytes: int
    bound_ns: int | None
    data: bytes


PROOF_COLUMNS = tuple(proofs.c[name] for name in StoredProof._fields)
PLAN_COLUMNS = tuple(plans.c[name] for name in StoredPlan._fields)
_GRAPH_KEY = select(graphs.c.key).where(graphs.c.key == bindparam("graph"))
_GRAPH = select(graphs.c.data).where(graphs.c.key == bindparam("graph"))


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

    def __init__(self, database: Database, claims: Claims) -> None:
        self._database, self._claims = database, claims

    async def put_graph(self, connection: AsyncConnection, keys: Keys, net: Problem) -> None:
        """Keep the subject of a net problem, and the problem's name; what is there already stays."""
        moment = self._database.clock.now()
        known = await connection.scalar(_GRAPH_KEY, {"graph": keys.graph})
        if known is None:
            row = {"key": keys.graph, "created_at": moment, "used_at": moment, **_columns_of(net, keys.structure)}
            await connection.execute(self._database.insert_new(graphs), row)
        await connection.execute(
            self._database.insert_new(problems),
            {"key": keys.problem, "graph_key": keys.graph, "budget_bytes": net.budget_bytes},
        )

    async def replace_graph(self, connection: AsyncConnection, keys: Keys, net: Problem) -> None:
        """Write a graph anew whose row is damaged; what was found about it stays."""
        row = _columns_of(net, keys.structure)
        await connection.execute(update(graphs).where(graphs.c.key == keys.graph).values(row))

    async def graph_row(self, connection: AsyncConnection, key: str) -> bytes | None:
        """The packed graph."""
        data: bytes | None = await connection.scalar(_GRAPH, {"graph": key})
        return data

    async def put_plan(
        self, connection: AsyncConnection, graph_key: str, method_key: str, source: str, plan: AnyPlan, verdict: Verdict
    ) -> tuple[str, str]:
        """Keep a verified plan; returns its id and checksum, the older row's where the same plan is there."""
        packed = pack(plan.to_json())
        digest, moment = checksum(packed), self._database.clock.now()
        row = {
            "id": self._database.clock.new_id(),
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
        await self._claims.raise_floor(connection, graph_key, 0, verdict.peak_bytes)
        return stored, digest

    async def put_proof(
        self, connection: AsyncConnection, graph_key: str, net_budget: int, bound_ns: int | None, packed: bytes
    ) -> str:
        """Keep a checked certificate, packed; returns its id, the older row's where the same one is there."""
        digest = checksum(packed)
        row = {
            "id": self._database.clock.new_id(),
            "graph_key": graph_key,
            "budget_bytes": net_budget,
            "bound_ns": bound_ns,
            "solver": SOLVER,
            "data": packed,
            "checksum": digest,
            "size_bytes": len(packed),
            "created_at": self._database.clock.now(),
        }
        again = {key: row[key] for key in ("data", "bound_ns", "size_bytes")}
        stored: str | None = await connection.scalar(
            self._database.insert(proofs)
            .values(row)
            .on_conflict_do_update(
                index_elements=[proofs.c.graph_key, proofs.c.budget_bytes, proofs.c.checksum], set_=again
            )
            .returning(proofs.c.id)
        )
        assert stored is not None
        return stored

    async def best_proofs(self, connection: AsyncConnection, graph_key: str, net_budget: int) -> list[StoredProof]:
        """The certificates at a budget or a larger one: that no plan fits, and of the greatest bound, if there are."""
        above = (proofs.c.graph_key == graph_key, proofs.c.budget_bytes >= net_budget)
        found = []
        for of_kind in (proofs.c.bound_ns.is_(None), proofs.c.bound_ns.is_not(None)):
            query = select(*PROOF_COLUMNS).where(*above, of_kind)
            query = query.order_by(proofs.c.bound_ns.desc(), proofs.c.budget_bytes, proofs.c.id).limit(1)
            found += [StoredProof(*row) for row in await connection.execute(query)]
        return found

    async def own_proof(self, connection: AsyncConnection, graph_key: str, net_budget: int) -> tuple[str, int] | None:
        """The row of the best certificate of exactly this budget, and the bound that it is said to prove."""
        query = select(proofs.c.id, proofs.c.bound_ns).where(
            proofs.c.graph_key == graph_key, proofs.c.budget_bytes == net_budget, proofs.c.bound_ns.is_not(None)
        )
        row = (await connection.execute(query.order_by(proofs.c.bound_ns.desc(), proofs.c.id).limit(1))).first()
        return None if row is None else (row.id, row.bound_ns)

    async def proof(self, connection: AsyncConnection, proof_id: str) -> StoredProof | None:
        """A certificate by its id."""
        row = (await connection.execute(select(*PROOF_COLUMNS).where(proofs.c.id == proof_id))).first()
        return None if row is None else StoredProof(*row)

    async def drop_proof(self, connection: AsyncConnection, row: StoredProof) -> None:
        """Forget a certificate that proves nothing, or not what its row says, unless it was written anew meanwhile."""
        same = proofs.c.data == row.data, proofs.c.bound_ns.is_not_distinct_from(row.bound_ns)
        await connection.execute(delete(proofs).where(proofs.c.id == row.id, *same))

    async def best_plan(
        self, connection: AsyncConnection, graph_key: str, net_budget: int, method_key: str | None
    ) -> StoredPlan | None:
        """The cheapest plan within a budget; of any method where `method_key` is None."""
        found = await self.plans_within(connection, graph_key, net_budget, method_key, 1)
        return found[0] if found else None

    async def plans_within(
        self,
        connection: AsyncConnection,
        graph_key: str,
        net_budget: int,
        method_key: str | None,
        most: int | None = None,
    ) -> list[StoredPlan]:
        """The plans within a budget, cheapest first; all of them are read only where the cheapest is damaged."""
        query = (
            select(*PLAN_COLUMNS)
            .where(plans.c.graph_key == graph_key, plans.c.peak_bytes <= net_budget)
            .order_by(plans.c.cost_ns, plans.c.peak_bytes, plans.c.id)
            .limit(most)
        )
        if method_key is not None:
            query = query.where(plans.c.method_key == method_key)
        return [StoredPlan._make(row) for row in (await connection.execute(query)).all()]

    async def plan(self, connection: AsyncConnection, plan_id: str) -> StoredPlan | None:
        """A plan by its id."""
        row = (await connection.execute(select(*PLAN_COLUMNS).where(plans.c.id == plan_id))).first()
        return None if row is None else StoredPlan._make(row)

    async def drop_plan(self, connection: AsyncConnection, row: StoredPlan) -> None:
        """Forget a plan that the verifier has refused, unless it was written anew meanwhile."""
        same = plans.c.data == row.data, plans.c.cost_ns == row.cost_ns, plans.c.peak_bytes == row.peak_bytes
        await connection.execute(delete(plans).where(plans.c.id == row.id, *same))

    async def touch(self, connection: AsyncConnection, graph_key: str, plan_id: str | None) -> None:
        """Note that they were of use, for eviction."""
        moment = self._database.clock.now()
        await connection.execute(update(graphs).where(graphs.c.key == graph_key).values(used_at=moment))
        if plan_id is not None:
            await connection.execute(update(plans).where(plans.c.id == plan_id).values(used_at=moment))
