"""Graphs and what is found about them, by salted key, as written; and all that an answer rests on, in one statement.

All bytes in the store are net of fixed bytes: a plan's peak and a budget are what the step needs beyond them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Select,
    Table,
    and_,
    bindparam,
    case,
    delete,
    exists,
    false,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import AnyPlan, Verdict, Written
from remat_solver import solver_version

from ..identity import Caller, Keys, size_of
from .database import Database
from .seals import WHOLE, Claim, Effort, Floor, Seals, column
from .tables import ACTIVE, bounds, efforts, floors, graphs, of_epoch, plans, problems, proofs, requests, solves
from .verifier import CheckedProof, Verifier, checksum, pack, subject_text


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
    restricted_to: str


_graph: BindParameter[str] = bindparam("graph")
_budget: BindParameter[int] = bindparam("budget")
_method: BindParameter[str] = bindparam("method")
_solver: BindParameter[str] = bindparam("solver")
_GRAPH_KEY = select(graphs.c.key).where(graphs.c.key == _graph).with_for_update(read=True, key_share=True)
_GRAPH = select(graphs.c.data).where(graphs.c.key == _graph)


def _columns_of(net: Written, structure_key: str) -> dict[str, Any]:
    packed = pack(subject_text(net))
    ops, edges = size_of(net.subject)
    return {
        "structure_key": structure_key,
        "ops": ops,
        "edges": edges,
        "total_cost_ns": net.subject.total_cost_ns,
        "data": packed,
        "size_bytes": len(packed),
    }


class Snapshot(NamedTuple):
    """What a hit is put together from (see `cache.py`), and whether a solve is under way that it should join.

    Equal snapshots give equal answers: plan and certificates are there with their stored bytes themselves, not with a
    checksum of them, and sealed rows with their seals.

    Attributes:
        plan: the cheapest within the budget.
        claim, restricted: the best bounds without a certificate: for every plan, and of the method's own search.
        proof: the certificate of the best bound at this budget or a larger one.
        too_small: a certificate that no plan fits a budget: the next one from here upwards, or else downwards.
        inside: as `proof`, of the space to which the method is restricted; or that this space is empty.
        plain_bytes: what plain training of the graph needs, where that is known.
    """

    plan: StoredPlan | None
    claim: Claim | None
    restricted: Claim | None
    floor: Floor | None
    effort: Effort | None
    proof: StoredProof | None
    too_small: StoredProof | None
    inside: StoredProof | None
    under_way: bool
    plain_bytes: int | None

    @property
    def saved_bytes(self) -> int:
        """What training by the plan needs less than plain training; 0 where that is not known."""
        return 0 if self.plan is None else max(0, (self.plain_bytes or 0) - self.plan.peak_bytes)


class EndedRequest(NamedTuple):
    """An ended request: its answer, its plan and its certificate as they are stored, each None where it has none."""

    id: str
    tenant_id: str
    answer: Any
    graph_key: str
    budget_bytes: int
    fixed_bytes: int
    plan_id: str | None
    proof_id: str | None
    seal: str | None
    data: bytes | None
    cost_ns: int | None
    peak_bytes: int | None
    proof: bytes | None
    proved_ns: int | None
    proved_within: str | None


Row = StoredPlan | StoredProof | Claim | Floor | Effort
"""A row that an answer rests on."""
_TABLES: dict[Any, Table] = {StoredPlan: plans, StoredProof: proofs, Claim: bounds, Floor: floors, Effort: efforts}
_COLUMNS = {kind: tuple(table.c[name] for name in kind._fields) for kind, table in _TABLES.items()}


def _snapshot(without: Sequence[Row] = ()) -> Select[Any]:
    """The query; of bounds, floors and certificates it passes over some rows, and then takes no effort."""
    best = (
        select(plans.c.id)
        .where(
            plans.c.graph_key == _graph,
            plans.c.peak_bytes <= _budget,
            or_(bindparam("any_method") == 1, plans.c.method_key == _method),
        )
        .order_by(plans.c.cost_ns, plans.c.peak_bytes, plans.c.id)
        .limit(1)
        .scalar_subquery()
    )
    no_floor = [false()] if any(isinstance(row, Floor) for row in without) else []
    no_effort = [false()] if without else []
    floor = select(*_COLUMNS[Floor]).where(floors.c.graph_key == _graph, floors.c.solver == _solver, *no_floor)
    effort = select(*_COLUMNS[Effort]).where(
        efforts.c.graph_key == _graph,
        efforts.c.budget_bytes == _budget,
        efforts.c.method_key == _method,
        efforts.c.solver == _solver,
        *no_effort,
    )
    parts: list[Any] = [
        *_claims([row for row in without if isinstance(row, Claim)]),
        floor.subquery(),
        effort.subquery(),
        *_certificates([row.id for row in without if isinstance(row, StoredProof)]),
    ]
    one = select(best.label("plan_id")).subquery()
    rows: Any = one.outerjoin(plans, plans.c.id == one.c.plan_id)
    for each in parts:
        rows = rows.outerjoin(each, true())
    under_way = exists().where(solves.c.flight_key == bindparam("flight"), ACTIVE)
    plain = select(graphs.c.plain_peak_bytes).where(graphs.c.key == _graph).scalar_subquery()
    columns = (*_COLUMNS[StoredPlan], *(c for each in parts for c in each.c))
    return select(*columns, under_way, plain).select_from(rows)


def _claims(without: Sequence[Claim]) -> tuple[Any, Any]:
    """The best bounds without a certificate: for every plan, and of the method's own search."""
    same = [[bounds.c[name] == getattr(row, name) for name in _OF_CLAIM] for row in without]
    of_graph = and_(bounds.c.graph_key == _graph, bounds.c.solver == _solver, *(~and_(*each) for each in same))
    claim = _first(
        select(*_COLUMNS[Claim])
        .where(of_graph, bounds.c.budget_bytes >= _budget, bounds.c.restricted_to == WHOLE)
        .order_by(bounds.c.bound_ns.desc(), bounds.c.budget_bytes)
    )
    restricted = _first(
        select(*_COLUMNS[Claim])
        .where(
            of_graph,
            bounds.c.budget_bytes == _budget,
            bounds.c.method_key == _method,
            bounds.c.restricted_to != WHOLE,
        )
        .order_by(bounds.c.bound_ns.desc(), bounds.c.restricted_to)
    )
    return claim, restricted


def _certificates(without: Sequence[str]) -> tuple[Any, ...]:
    """That of the best bound; the nearest one that says that no plan fits; that of the method's own space."""
    of_graph = [proofs.c.graph_key == _graph]
    if without:
        of_graph.append(proofs.c.id.not_in(without))
    whole, above = proofs.c.restricted_to == WHOLE, proofs.c.budget_bytes >= _budget
    empty = proofs.c.bound_ns.is_(None)

    def best(*space: ColumnElement[bool]) -> Any:
        return _first(
            select(*_COLUMNS[StoredProof])
            .where(*of_graph, above, *space)
            .order_by(case((empty, 0), else_=1), proofs.c.bound_ns.desc(), proofs.c.budget_bytes, proofs.c.id)
        )

    too_small = _first(
        select(*_COLUMNS[StoredProof])
        .where(*of_graph, empty, whole)
        .order_by(
            case((above, 0), else_=1),
            case((above, proofs.c.budget_bytes), else_=-proofs.c.budget_bytes),
            proofs.c.id,
        )
    )
    return best(whole, ~empty), too_small, best(~whole, proofs.c.restricted_to == bindparam("space"))


def _first(query: Select[Any]) -> Any:
    return query.limit(1).subquery()


_PARTS: tuple[Any, ...] = (StoredPlan, Claim, Claim, Floor, Effort, StoredProof, StoredProof, StoredProof)
"""What is made of the columns of a snapshot, in their order; the first of a part is null where there is none."""


def _read(row: Sequence[Any] | None) -> Snapshot:
    assert row is not None  # a row of nulls where there is nothing
    parts: list[Any] = []
    start = 0
    for make in _PARTS:
        values = row[start : start + len(make._fields)]
        parts.append(None if values[0] is None else make(*values))
        start += len(make._fields)
    return Snapshot._make([*parts, bool(row[start]), row[start + 1]])


_OF_CLAIM = "budget_bytes", "method_key", "restricted_to"
_OF_REQUEST = EndedRequest._fields[:9]
SAME_STRUCTURE = and_(graphs.c.structure_key == bindparam("structure"), graphs.c.key != bindparam("graph"))
"""Graphs of the same structure with other costs."""
_SNAPSHOT = _snapshot()
_WITH_GRAPH = _SNAPSHOT.add_columns(_GRAPH.scalar_subquery(), exists(select(graphs.c.key).where(SAME_STRUCTURE)))
_ENDED_REQUEST = (
    select(
        *(requests.c[name] for name in _OF_REQUEST),
        *(plans.c[name] for name in ("data", "cost_ns", "peak_bytes")),
        proofs.c.data.label("proof"),
        proofs.c.bound_ns.label("proved_ns"),
        proofs.c.restricted_to.label("proved_within"),
    )
    .select_from(
        requests.outerjoin(plans, plans.c.id == requests.c.plan_id).outerjoin(
            proofs, proofs.c.id == requests.c.proof_id
        )
    )
    .where(
        requests.c.id == bindparam("id"),
        requests.c.tenant_id == bindparam("tenant"),
        requests.c.ended.is_(True),
        of_epoch(bindparam("epoch")),
        or_(requests.c.plan_id.is_(None), plans.c.id.is_not(None)),
        or_(requests.c.proof_id.is_(None), proofs.c.id.is_not(None)),
    )
)
_IDEMPOTENCY_KEY = select(requests.c.id).where(
    requests.c.tenant_id == bindparam("tenant"), requests.c.idempotency_key == bindparam("key")
)


def _named(keys: Keys, net_budget: int) -> dict[str, object]:
    return {
        "graph": keys.graph, "budget": net_budget, "method": keys.method, "flight": keys.flight,
        "any_method": int(keys.any_method), "solver": solver_version(), "space": column(keys.restriction),
    }  # fmt: skip


def _key(graph_key: str, net_budget: int = 0, method_key: str = "") -> dict[str, Any]:
    """The key of a claim, a floor or an effort: a solver whose source differs uses none of them."""
    return {"graph_key": graph_key, "budget_bytes": net_budget, "method_key": method_key, "solver": solver_version()}


class Store:
    """The cache's tables: what takes a connection works in the caller's transaction; all else is one statement."""

    def __init__(self, database: Database, seals: Seals, verifier: Verifier) -> None:
        self._database, self._seals, self._verifier = database, seals, verifier

    async def put_graph(
        self, connection: AsyncConnection, keys: Keys, net: Written, budget_bytes: int, absent: bool = False
    ) -> None:
        """Keep the subject of a net problem, and the problem's name; what is there stays.

        It is not evicted before the end of the transaction.

        Args:
            absent: it was not there a moment ago, and is not looked for again before it is packed.
        """
        moment = self._database.clock.now()
        if absent or await connection.scalar(_GRAPH_KEY, {"graph": keys.graph}) is None:
            row = {"key": keys.graph, "created_at": moment, "used_at": moment, **_columns_of(net, keys.structure)}
            await connection.execute(self._database.insert_new(graphs), row)
        await connection.execute(
            self._database.insert_new(problems),
            {"key": keys.problem, "graph_key": keys.graph, "budget_bytes": budget_bytes},
        )

    async def replace_graph(self, connection: AsyncConnection, keys: Keys, net: Written) -> None:
        """Write a graph anew whose row is damaged; what was found about it stays."""
        row = _columns_of(net, keys.structure)
        await connection.execute(update(graphs).where(graphs.c.key == keys.graph).values(row))

    async def put_plain_peak(self, connection: AsyncConnection, key: str, plain_bytes: int) -> None:
        """Note what plain training of a graph needs, without fixed bytes."""
        unknown = graphs.c.key == key, graphs.c.plain_peak_bytes.is_(None)
        await connection.execute(update(graphs).where(*unknown).values(plain_peak_bytes=plain_bytes))

    async def graph_row(self, key: str) -> bytes | None:
        """The packed graph."""
        row = await self._database.first(_GRAPH, graph=key)
        return None if row is None else row.data

    async def put_plan(
        self, connection: AsyncConnection, graph_key: str, method_key: str, source: str, plan: AnyPlan, verdict: Verdict
    ) -> str:
        """Keep a verified plan; returns its id, the older row's where the same plan is there."""
        packed, digest = self._verifier.packed(graph_key, plan, verdict)
        moment = self._database.clock.now()
        row = {
            "id": self._database.clock.new_id(),
            "graph_key": graph_key,
            "method_key": method_key,
            "source": source[:100],
            "solver": solver_version(),
            "cost_ns": verdict.cost_ns,
            "peak_bytes": verdict.peak_bytes,
            "data": packed,
            "checksum": digest,
            "size_bytes": len(packed),
            "created_at": moment,
            "used_at": moment,
        }
        # data again: a row whose bytes were damaged is made whole by the same plan found anew
        again = ("data", "cost_ns", "peak_bytes", "used_at", "size_bytes")
        same = (plans.c.graph_key, plans.c.method_key, plans.c.checksum)
        stored = str(await connection.scalar(self._database.upsert(plans, row, again, same).returning(plans.c.id)))
        await self.raise_floor(connection, graph_key, 0, verdict.peak_bytes)
        return stored

    async def put_proof(self, connection: AsyncConnection, graph_key: str, net_budget: int, proof: CheckedProof) -> str:
        """Keep a checked certificate; returns its id, the older row's where the same one is there."""
        digest = checksum(proof.data, proof.space)
        row = {
            "id": self._database.clock.new_id(),
            "graph_key": graph_key,
            "budget_bytes": net_budget,
            "restricted_to": proof.space,
            "bound_ns": proof.bound_ns,
            "solver": solver_version(),
            "data": proof.data,
            "checksum": digest,
            "size_bytes": len(proof.data),
            "created_at": self._database.clock.now(),
        }
        again = ("data", "restricted_to", "bound_ns", "size_bytes")
        same = (proofs.c.graph_key, proofs.c.budget_bytes, proofs.c.checksum)
        return str(await connection.scalar(self._database.upsert(proofs, row, again, same).returning(proofs.c.id)))

    async def own_proof(self, connection: AsyncConnection, graph_key: str, net_budget: int) -> tuple[str, int] | None:
        """The row of the best certificate of the whole space and exactly this budget, and what it is said to prove."""
        query = select(proofs.c.id, proofs.c.bound_ns).where(
            proofs.c.graph_key == graph_key,
            proofs.c.budget_bytes == net_budget,
            proofs.c.restricted_to == WHOLE,
            proofs.c.bound_ns.is_not(None),
        )
        row = (await connection.execute(query.order_by(proofs.c.bound_ns.desc(), proofs.c.id).limit(1))).first()
        return None if row is None else (row.id, row.bound_ns)

    async def proof(self, proof_id: str) -> StoredProof | None:
        """A certificate by its id."""
        row = await self._database.first(select(*_COLUMNS[StoredProof]).where(proofs.c.id == proof_id))
        return None if row is None else StoredProof._make(row)

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
        row = _key(graph_key, net_budget, method_key if restricted_to else "") | {
            "restricted_to": column(restricted_to),
            "bound_ns": bound_ns,
            "source": source[:100],
        }
        row = self._seals.sealed("bounds", row) | {"created_at": self._database.clock.now()}
        changed = ("bound_ns", "source", "seal", "created_at")
        higher = self._database.upsert(bounds, row, changed, where=lambda new: bounds.c.bound_ns < new.bound_ns)
        await connection.execute(higher)

    async def drop_refuted(self, connection: AsyncConnection, graph_key: str, verdict: Verdict) -> None:
        """Forget every claim about a graph that a verified plan of this cost and peak shows to be wrong."""
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

    async def raise_floor(
        self, connection: AsyncConnection, graph_key: str, least_bytes: int, enough_bytes: int | None
    ) -> None:
        """Keep what is claimed about the least budget, and what is known to suffice."""
        key = {"graph_key": graph_key, "solver": solver_version()}
        fresh = {**key, "least_bytes": 0, "enough_bytes": None}
        await connection.execute(self._database.insert_new(floors), self._seals.sealed("floors", fresh))
        known = await self._floor(connection, graph_key, locked=True)
        enough = min((b for b in (known.enough_bytes, enough_bytes) if b is not None), default=None)
        merged = {"least_bytes": max(known.least_bytes, least_bytes), "enough_bytes": enough}
        if known.seal is None or merged != {"least_bytes": known.least_bytes, "enough_bytes": known.enough_bytes}:
            change = update(floors).where(*(floors.c[name] == value for name, value in key.items()))
            await connection.execute(change.values(self._seals.sealed("floors", key | merged)))

    async def enough(self, connection: AsyncConnection, graph_key: str) -> int | None:
        """What budget is known to suffice for a graph."""
        return (await self._floor(connection, graph_key)).enough_bytes

    async def _floor(self, connection: AsyncConnection, graph_key: str, locked: bool = False) -> Floor:
        """What is claimed about a graph's least budget: nothing where the row is not there, or not what was stored."""
        query = select(*_COLUMNS[Floor]).where(floors.c.graph_key == graph_key, floors.c.solver == solver_version())
        row = (await connection.execute(query.with_for_update() if locked else query)).first()
        known = None if row is None else Floor._make(row)
        return known if known is not None and self.holds(known, graph_key) else Floor(0, None, None)

    async def put_effort(
        self, connection: AsyncConnection, graph_key: str, net_budget: int, method_key: str, effort: Effort
    ) -> None:
        """Keep how a solve ended; the longest one stands, and a settled one for good."""
        row = self._seals.sealed("efforts", _key(graph_key, net_budget, method_key) | effort._asdict())
        row |= {"created_at": self._database.clock.now()}

        def stands(new: Any) -> ColumnElement[bool]:
            longer: ColumnElement[bool] = efforts.c.seconds <= new.seconds
            return and_(or_(new.settled, longer), or_(~efforts.c.settled, new.settled))

        await connection.execute(self._database.upsert(efforts, row, (*Effort._fields, "created_at"), where=stands))

    def holds(self, row: Claim | Floor | Effort, graph_key: str, net_budget: int = 0, method_key: str = "") -> bool:
        """Whether a row is what was stored; an effort says neither its budget nor its method."""
        return self._seals.holds(_TABLES[type(row)].name, _key(graph_key, net_budget, method_key) | row._asdict())

    async def drop_efforts(self, connection: AsyncConnection, graph_key: str) -> None:
        """Forget how solves of a graph ended."""
        await connection.execute(delete(efforts).where(efforts.c.graph_key == graph_key))

    async def drop(self, connection: AsyncConnection, graph_key: str, row: Row) -> None:
        """Forget a row that is not what was stored, unless it was written anew meanwhile; of efforts, the graph's."""
        if isinstance(row, Effort):
            await self.drop_efforts(connection, graph_key)
            return
        table = _TABLES[type(row)]
        same = row._asdict() | {"graph_key": graph_key, "solver": solver_version()}
        if isinstance(row, (StoredPlan, StoredProof)):
            del same["solver"]  # of whichever version
        await connection.execute(delete(table).where(*(table.c[name] == value for name, value in same.items())))

    async def plans_within(self, keys: Keys, net_budget: int) -> list[StoredPlan]:
        """The plans within a budget that the method may use, cheapest first."""
        query = select(*_COLUMNS[StoredPlan]).where(plans.c.graph_key == keys.graph, plans.c.peak_bytes <= net_budget)
        if not keys.any_method:
            query = query.where(plans.c.method_key == keys.method)
        rows = await self._database.rows(query.order_by(plans.c.cost_ns, plans.c.peak_bytes, plans.c.id))
        return [StoredPlan._make(row) for row in rows]

    async def plan(self, plan_id: str) -> StoredPlan | None:
        """A plan by its id."""
        row = await self._database.first(select(*_COLUMNS[StoredPlan]).where(plans.c.id == plan_id))
        return None if row is None else StoredPlan._make(row)

    async def touch(self, connection: AsyncConnection, graph_key: str, plan_id: str | None) -> None:
        """Note that they were of use, for eviction."""
        moment = self._database.clock.now()
        await connection.execute(update(graphs).where(graphs.c.key == graph_key).values(used_at=moment))
        if plan_id is not None:
            await connection.execute(update(plans).where(plans.c.id == plan_id).values(used_at=moment))

    async def snapshot(self, keys: Keys, net_budget: int, without: Sequence[Row] = ()) -> Snapshot:
        """What an answer to this problem rests on now; `without` some rows also without efforts, which rest on them."""
        query = _snapshot(without) if without else _SNAPSHOT
        return _read(await self._database.first(query, **_named(keys, net_budget)))

    async def snapshot_with_graph(self, keys: Keys, net_budget: int) -> tuple[Snapshot, bytes | None, bool]:
        """The same, the stored bytes of the graph, and whether there are others of its structure."""
        row: Any = await self._database.first(_WITH_GRAPH, **_named(keys, net_budget), structure=keys.structure)
        return _read(row), row[-2], bool(row[-1])

    async def ended_request(self, caller: Caller, request_id: str) -> EndedRequest | None:
        """A request that has ended; None where there is none, its plan is gone, or its epoch is over."""
        named = {"id": request_id, "tenant": caller.tenant_id, "epoch": caller.epoch}
        row = await self._database.first(_ENDED_REQUEST, **named)
        return None if row is None else EndedRequest._make(row)

    async def has_idempotency_key(self, tenant_id: str, key: str) -> bool:
        """Whether a request with this idempotency key is there."""
        return await self._database.first(_IDEMPOTENCY_KEY, tenant=tenant_id, key=key) is not None
