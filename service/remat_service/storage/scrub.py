"""Reading all that is stored again: what is damaged is found, and mended where that is possible, if that is asked for.

A plan is replayed on its graph: one that is not valid is dropped, one whose row claims another cost or peak gets the
true ones. A certificate is checked on it in the same way. A sealed row that is not what was stored is dropped, what a
running solve has told is taken back; where the key is not at hand, seals are not looked at. A graph's columns are
written anew from its bytes. A graph whose bytes are damaged stays with its plans: the next POST of it writes it anew
(`requests/submit.py`), and until then nothing of it is served.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from sqlalchemy import Delete, Table, Update, delete, select, tuple_, update

from remat_ir import (
    InvalidData,
    InvalidPlan,
    Problem,
    Subject,
    certificate_for,
    graph_digest,
    read_plan,
    verify,
)
from remat_ir.proof import read_proof
from remat_ir.schema import LARGEST_INTEGER

from ..identity import Caller
from ..subjects import size_of
from .database import Database
from .packing import checksum, unpack
from .seals import Seals
from .tables import (
    bounds,
    efforts,
    floors,
    graphs,
    plans,
    profile_reports,
    profiles,
    proofs,
    requests,
    scopes,
    solves,
)

_PAGE = 500


async def scrub(database: Database, seals: Seals | None = None, apply: bool = False) -> Counter[str]:
    """Look at every row, one graph at a time, also while a service runs; returns how many of what were found.

    Args:
        apply: mend and drop; else it is only counted what would be.
    """
    found: Counter[str] = Counter()
    async with database.read() as connection:
        callers = [
            Caller("", row.id, row.salt, epoch)
            for row in (await connection.execute(select(scopes))).all()
            for epoch in range(row.epoch + 1)
        ]
        keys = list((await connection.execute(select(graphs.c.key).order_by(graphs.c.key))).scalars())
    for key in keys:
        await _scrub_graph(database, callers, key, found, apply)
    for table in (bounds, floors, efforts, solves, requests, profiles, profile_reports):
        if seals is not None:
            await _scrub_sealed(database, seals, table, found, apply)
    return found


async def _scrub_sealed(database: Database, seals: Seals, table: Table, found: Counter[str], apply: bool) -> None:
    """Drop the rows of a table that are not what was stored; of solves, what they have told."""
    keys = list(table.primary_key.columns)
    last: dict[str, Any] | None = None
    while True:
        page = select(table).order_by(*keys).limit(_PAGE)
        if last is not None:
            page = page.where(tuple_(*keys) > tuple_(*(last[key.name] for key in keys)))
        async with database.read() as connection:
            rows = [dict(row) for row in (await connection.execute(page)).mappings()]
        for row in rows:
            told = row.get("ended", True) and (table is not solves or row["plan_id"] or row["bound_ns"] is not None)
            if not told or seals.holds(table.name, row):
                continue
            found["solves mended" if table is solves else f"{table.name} dropped"] += 1
            of_row = [key == row[key.name] for key in keys] + [table.c.seal.is_not_distinct_from(row["seal"])]
            nothing = dict.fromkeys(("plan_id", "cost_ns", "peak_bytes", "bound_ns", "seal"))
            change = update(table).values(nothing) if table is solves else delete(table)
            await _change(database, apply, change.where(*of_row))
        if len(rows) < _PAGE:
            return
        last = rows[-1]


async def _change(database: Database, apply: bool, *statements: Update | Delete) -> None:
    """Carry out in one transaction what the counts say, where that is wanted."""
    if apply:
        async with database.write() as connection:
            for statement in statements:
                await connection.execute(statement)


async def _scrub_graph(database: Database, callers: list[Caller], key: str, found: Counter[str], apply: bool) -> None:
    async with database.read() as connection:
        row = (await connection.execute(select(graphs).where(graphs.c.key == key))).first()
        rows = (await connection.execute(select(plans).where(plans.c.graph_key == key).order_by(plans.c.id))).all()
        certificates = (await connection.execute(select(proofs).where(proofs.c.graph_key == key))).all()
    if row is None:  # evicted meanwhile
        return
    found["graphs"] += 1
    subject = await asyncio.to_thread(_subject, callers, key, row.data)
    if subject is None:
        found["graphs damaged, mended by their next POST"] += 1
        return
    ops, edges = size_of(subject)
    true = {"ops": ops, "edges": edges, "total_cost_ns": subject.total_cost_ns, "size_bytes": len(row.data)}
    if any(getattr(row, name) != value for name, value in true.items()):
        found["graphs mended"] += 1
        await _change(database, apply, update(graphs).where(graphs.c.key == key).values(true))
    for plan in rows:
        found["plans"] += 1
        claims = await asyncio.to_thread(_claims, subject, plan.data)
        if claims is None:
            found["plans dropped"] += 1
            await _change(database, apply, delete(plans).where(plans.c.id == plan.id, plans.c.data == plan.data))
        elif any(getattr(plan, name) != value for name, value in claims.items()):
            found["plans mended"] += 1
            await _change(database, apply, update(plans).where(plans.c.id == plan.id).values(claims))
    for proof in certificates:
        found["certificates"] += 1
        proved = await asyncio.to_thread(_proved, subject, proof.budget_bytes, proof.data)
        if proved is None:
            found["certificates dropped"] += 1
            of_row = proofs.c.id == proof.id, proofs.c.data == proof.data
            await _change(
                database, apply, delete(proofs).where(*of_row), delete(efforts).where(efforts.c.graph_key == key)
            )
        elif any(getattr(proof, name) != value for name, value in proved.items()):
            found["certificates mended"] += 1
            await _change(database, apply, update(proofs).where(proofs.c.id == proof.id).values(proved))


def _subject(callers: list[Caller], key: str, packed: bytes) -> Subject | None:
    """The graph, if its digest leads to its key for some scope and epoch."""
    try:
        subject = Problem.from_json({**unpack(packed), "budget_bytes": 0}).subject
    except (ValueError, TypeError, InvalidData):
        return None
    digest = graph_digest(subject)
    return subject if any(caller.key(digest) == key for caller in callers) else None


def _claims(subject: Subject, packed: bytes) -> dict[str, Any] | None:
    """What the row of a plan should say; None where its bytes are no valid plan of the graph."""
    try:
        verdict = verify(Problem(subject, LARGEST_INTEGER), read_plan(unpack(packed)))
    except (ValueError, TypeError, InvalidData, InvalidPlan):
        return None
    return {
        "cost_ns": verdict.cost_ns,
        "peak_bytes": verdict.peak_bytes,
        "checksum": checksum(packed),
        "size_bytes": len(packed),
    }


def _proved(subject: Subject, budget_bytes: int, packed: bytes) -> dict[str, Any] | None:
    """What the row of a certificate should say; None where its bytes prove nothing about the graph and its budget."""
    problem = Problem(subject, budget_bytes)
    try:
        proof = read_proof(unpack(packed))
        found = certificate_for(problem, proof)
        if found.proof is not proof:
            return None
    except (ValueError, TypeError, InvalidData, InvalidPlan):
        return None
    return {"bound_ns": found.bound_ns, "checksum": checksum(packed), "size_bytes": len(packed)}
