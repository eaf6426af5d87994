"""Reading every stored graph and plan again: what is damaged is found, and mended where that is possible.

A plan is replayed on its graph: one that is not valid is dropped, one whose row claims another cost or peak gets the
true ones. A graph's columns are written anew from its bytes. A graph whose bytes are damaged stays with its plans: the
next POST of it writes it anew (`requests/submit.py`), and until then nothing of it is served.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from sqlalchemy import delete, select, update

from remat_ir import InvalidData, InvalidPlan, Problem, Subject, graph_digest, read_plan, verify
from remat_ir.read import LARGEST_INTEGER

from ..identity import Caller
from ..subjects import size_of
from .database import Database
from .packing import checksum, unpack
from .tables import graphs, plans, scopes


async def scrub(database: Database) -> Counter[str]:
    """Look at every row, one graph at a time, also while a service runs; returns how many of what were found."""
    found: Counter[str] = Counter()
    async with database.read() as connection:
        callers = [
            Caller("", row.id, row.salt, epoch)
            for row in (await connection.execute(select(scopes))).all()
            for epoch in range(row.epoch + 1)
        ]
        keys = list((await connection.execute(select(graphs.c.key).order_by(graphs.c.key))).scalars())
    for key in keys:
        await _scrub_graph(database, callers, key, found)
    return found


async def _scrub_graph(database: Database, callers: list[Caller], key: str, found: Counter[str]) -> None:
    async with database.read() as connection:
        row = (await connection.execute(select(graphs).where(graphs.c.key == key))).first()
        rows = (await connection.execute(select(plans).where(plans.c.graph_key == key).order_by(plans.c.id))).all()
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
        async with database.write() as connection:
            await connection.execute(update(graphs).where(graphs.c.key == key).values(true))
    for plan in rows:
        found["plans"] += 1
        claims = await asyncio.to_thread(_claims, subject, plan.data)
        if claims is None:
            found["plans dropped"] += 1
            async with database.write() as connection:
                await connection.execute(delete(plans).where(plans.c.id == plan.id, plans.c.data == plan.data))
        elif any(getattr(plan, name) != value for name, value in claims.items()):
            found["plans mended"] += 1
            async with database.write() as connection:
                await connection.execute(update(plans).where(plans.c.id == plan.id).values(claims))


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
