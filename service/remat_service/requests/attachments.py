"""What a job says of a request once it runs by its plan: the run as it was measured, and what its ops are called.

Names are stored only for tenants that want it (`tenants.store_names`): they are words of the model's own code.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from typing import Any, Literal

from sqlalchemy import bindparam, delete, select
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import InvalidData, readable
from remat_ir.document import Array, Document, Integer, Member, Text

from ..context import Context
from ..errors import Forbidden, TooLarge
from ..identity import Caller
from ..storage.tables import attachments, graphs, requests, tenants
from ..tenants.quotas import check_stored_bytes
from .read import find_request

Kind = Literal["run", "names"]

MOST_OPS = 1_000_000
MOST_BYTES = 4 * 2**20
"""Of one request, compressed: names and places of 100,000 ops in repeated blocks took 0.2 MB."""

_PLACE = Text(300)
RUN_REPORT = Document(
    "RunReport",
    "request",
    "A training step by the plan, as the job measured it. Bytes are those above what is there throughout.",
    {
        "predicted_bytes": Member(Integer()),
        "measured_bytes": Member(Integer()),
        "predicted_ns": Member(Integer(), None, nullable=True),
        "measured_ns": Member(Integer(), None, nullable=True),
        "device": Member(Text(200), None, nullable=True),
    },
)
OP_NAMES = Document(
    "OpNames",
    "request",
    "What the ops of the graph are called, and where in the model's code they stand.",
    {
        "names": Member(Array(_PLACE, 1, MOST_OPS)),
        "where": Member(Array(_PLACE, 1, MOST_OPS), None, "A file and a line for each op.", nullable=True),
    },
)
_DOCUMENTS: dict[Kind, Document] = {"run": RUN_REPORT, "names": OP_NAMES}
_ATTACHED = select(attachments).where(attachments.c.request_id == bindparam("id"))
_STORES_NAMES = select(tenants.c.store_names).where(tenants.c.id == bindparam("tenant"))


async def stores_names(context: Context, caller: Caller) -> bool:
    """Whether names of the ops of this tenant's graphs are stored."""
    row = await context.database.first(_STORES_NAMES, tenant=caller.tenant_id)
    return row is not None and bool(row.store_names)


async def attach(context: Context, caller: Caller, request_id: str, kind: Kind, said: dict[str, Any]) -> None:
    """Store what was said of a request, in place of what was said before.

    Raises:
        NotFound: there is no such request of this tenant's.
        Forbidden: names, and this tenant stores none.
        InvalidData: not one name for each op.
        TooLarge: more than `MOST_BYTES`.
        RateLimited: over the tenant's quota of stored bytes.
    """
    row = await find_request(context, caller, request_id)
    if kind == "names":
        async with context.database.read() as connection:
            await _check_names(connection, caller, row, said)
    data = await asyncio.to_thread(_packed, said)
    if len(data) > MOST_BYTES:
        raise TooLarge(f"the names take {readable(len(data))}, and {readable(MOST_BYTES)} are stored at most")
    async with context.database.write() as connection:
        await check_stored_bytes(connection, caller)  # locks the tenant's row, so that nobody is switching names off
        if kind == "names":  # again: an operator may have switched it off meanwhile
            await _check_names(connection, caller, row, said)
        new = {"request_id": request_id, "kind": kind, "data": data, "size_bytes": len(data)}
        new["created_at"] = context.clock.now()
        await connection.execute(context.database.upsert(attachments, new, ("data", "size_bytes", "created_at")))


def _packed(said: dict[str, Any]) -> bytes:
    return zlib.compress(json.dumps(said, separators=(",", ":")).encode())


async def _check_names(connection: AsyncConnection, caller: Caller, row: Any, said: dict[str, Any]) -> None:
    if not await connection.scalar(_STORES_NAMES, {"tenant": caller.tenant_id}):
        raise Forbidden(
            f"the names of this tenant's ops are not stored; an operator lets them be stored by "
            f"`remat-service tenants names {caller.tenant or 'NAME'} on`"
        )
    ops = await connection.scalar(select(graphs.c.ops).where(graphs.c.key == row.graph_key))
    for member in ("names", "where"):
        given = said.get(member)
        if ops is not None and given is not None and len(given) != ops:
            raise InvalidData(f"{member} has {len(given)} entries for {ops} ops", f"/{member}")


async def attached(context: Context, caller: Caller, request_id: str) -> dict[Kind, dict[str, Any] | None]:
    """What was said of a request, None where nothing was.

    Raises:
        NotFound: there is no such request of this tenant's.
    """
    await find_request(context, caller, request_id)
    found: dict[Kind, dict[str, Any] | None] = {"run": None, "names": None}
    for row in await context.database.rows(_ATTACHED, id=request_id):
        document = _DOCUMENTS[row.kind]
        said = await asyncio.to_thread(_unpacked, document, row.data)
        found[row.kind] = {name: said.get(name) for name in document.members} | {
            "created_at": row.created_at.isoformat()
        }
    return found


def _unpacked(document: Document, data: bytes) -> dict[str, Any]:
    return document.read(json.loads(zlib.decompress(data)))


async def drop_names(connection: AsyncConnection, tenant_id: str) -> None:
    """Delete the names of a tenant's ops."""
    mine = select(requests.c.id).where(requests.c.tenant_id == tenant_id)
    await connection.execute(
        delete(attachments).where(attachments.c.kind == "names", attachments.c.request_id.in_(mine))
    )
