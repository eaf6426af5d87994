"""`/v1/operator`: what an operator sees and changes of all tenants, under a scope of its own; changes are recorded."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request
from sqlalchemy import select

from remat_ir.document import Array, Document, Flag, Integer, Member, Number, Text

from ...identity import ASKING, ID, OPERATE, Caller
from ...requests import operate
from ...requests.completion import cancel_tenant
from ...storage.tables import tenants
from ...tenants import keys
from ...tenants.keys import record
from ...tenants.quotas import QUOTAS
from ..authentication import Here, caller_with
from ..body import no_body, read_document
from ..schemas import Ended, KeyList, KeyMade, SolvesOfAll, TenantList, TenantRow, body, refusals

_LIMIT = Member(Integer(), None, "None removes the limit.", nullable=True)
TENANT_CHANGE = Document(
    "TenantChange",
    "request",
    "What is to change of a tenant; what is not named stays.",
    {
        "weight": Member(Number(above=0), None, "Share of the workers, against other tenants.", nullable=True),
        "disabled": Member(Flag(), None, "Refuse its keys, and end what it has under way.", nullable=True),
        "store_names": Member(
            Flag(), None, "Whether names of its ops are stored; false deletes those that are.", nullable=True
        ),
        **dict.fromkeys(QUOTAS, _LIMIT),
    },
)
TENANT_REQUEST = Document(
    "TenantRequest",
    "request",
    "A tenant to make.",
    {
        "name": Member(Text(100)),
        "group": Member(Text(100), None, "The sharing group that it joins.", nullable=True),
        "weight": Member(Number(above=0), 1.0, "Share of the workers, against other tenants."),
    },
)
KEY_REQUEST = Document(
    "KeyRequest",
    "request",
    "A key to make.",
    {
        "tenant": Member(Text(100)),
        "label": Member(Text(100), None, "For people.", nullable=True),
        "scopes": Member(Array(Text(20), 1, 3), ("solve", "read"), "solve, read, operate."),
        "days": Member(Number(above=0), None, "Days until it expires.", nullable=True),
    },
)

router = APIRouter(prefix="/v1/operator", tags=["operator"])
Operator = Annotated[Caller, Depends(caller_with(OPERATE))]
Name = Annotated[str, Path(max_length=100, description="Name of a tenant.")]


def _who(caller: Caller) -> str:
    return f"key {caller.key_id} of {caller.tenant}" if caller.key_id else caller.tenant


@router.get("/overview", summary="Who works, and what waits", response_model=operate.Overview, responses=refusals())
async def get_overview(context: Here, caller: Operator) -> Any:
    """Version, workers alive and busy, the queue by tenant, the store."""
    return await operate.overview(context)


@router.get("/solves", summary="Solves of all tenants", response_model=SolvesOfAll, responses=refusals())
async def list_all_solves(
    context: Here,
    caller: Operator,
    tenant: Annotated[str | None, Query(max_length=100, description="Only this tenant's.")] = None,
    state: Annotated[Literal["queued", "running", "ended"] | None, Query(description="Only these.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Any:
    """Newest first."""
    async with context.database.read() as connection:
        return {"solves": await operate.list_solves(connection, tenant, state, limit)}


@router.post(
    "/solves/{solve_id}/cancel", summary="End a solve", response_model=Ended, responses=refusals(404, 408, 413, 415)
)
async def end_solve(
    request: Request, context: Here, solve_id: Annotated[str, Path(pattern=ID.pattern)], caller: Operator
) -> Any:
    """Every request that waits for it is answered with what was found so far."""
    await no_body(request)
    return {"requests": await operate.end_solves(context, _who(caller), [solve_id])}


@router.get("/tenants", summary="Tenants and their quotas", response_model=TenantList, responses=refusals())
async def list_tenants(context: Here, caller: Operator) -> Any:
    """By name."""
    async with context.database.read() as connection:
        rows = (await connection.execute(select(tenants).order_by(tenants.c.name))).all()
    return {"tenants": [_tenant(row) for row in rows]}


@router.post(
    "/tenants",
    summary="Make a tenant",
    response_model=TenantRow,
    responses=refusals(404, 408, 413, 415),
    openapi_extra=body(TENANT_REQUEST, {"name": "vision", "weight": 2.0}),
)
async def add_tenant(request: Request, context: Here, caller: Operator) -> Any:
    """With a scope of its own, or in a sharing group."""
    found = await read_document(request, TENANT_REQUEST)
    async with context.database.write() as connection:
        await keys.add_tenant(connection, found["name"], found.get("group"), found.get("weight", 1.0))
        await record(connection, _who(caller), "tenants add", found)
        return _tenant(await keys.tenant_row(connection, found["name"]))


@router.patch(
    "/tenants/{name}",
    summary="Change a tenant",
    response_model=TenantRow,
    responses=refusals(404, 408, 413, 415),
    openapi_extra=body(TENANT_CHANGE, {"most_running": 4, "most_queued": None}),
)
async def change_tenant(request: Request, context: Here, name: Name, caller: Operator) -> Any:
    """Its weight and quotas, each by itself; `disabled` also ends what it has under way."""
    found = await read_document(request, TENANT_CHANGE)
    changes = {key: value for key, value in found.items() if value is not None or key in QUOTAS}
    async with context.database.write() as connection:
        row = await operate.change_tenant(connection, _who(caller), name, changes)
    if changes.get("disabled"):
        await cancel_tenant(context, row.id)
    return _tenant(row)


@router.get("/keys", summary="API keys", response_model=KeyList, responses=refusals())
async def list_keys(context: Here, caller: Operator) -> Any:
    """Never a secret: ids, tenants, first characters, scopes, ends."""
    async with context.database.read() as connection:
        rows = await keys.all_keys(connection)
    return {
        "keys": [
            {
                "id": row.id,
                "tenant": row.name,
                "label": row.label,
                "prefix": row.prefix,
                "scopes": row.scopes.split(),
                "expires_at": None if row.expires_at is None else row.expires_at.isoformat(),
                "revoked": row.revoked_at is not None,
            }
            for row in rows
        ]
    }


@router.post(
    "/keys",
    summary="Make an API key",
    response_model=KeyMade,
    responses=refusals(404, 408, 413, 415),
    openapi_extra=body(KEY_REQUEST, {"tenant": "vision", "scopes": ["solve", "read"], "days": 90}),
)
async def add_key(request: Request, context: Here, caller: Operator) -> Any:
    """The key is shown this once."""
    found = await read_document(request, KEY_REQUEST)
    scopes = list(found.get("scopes", ASKING))
    days = found.get("days")
    expires_at = None if days is None else keys.after(days)
    async with context.database.write() as connection:
        key_id, key = await keys.add_key(connection, found["tenant"], found.get("label") or "", scopes, expires_at)
        about = {"tenant": found["tenant"], "scopes": scopes, "key": key_id}
        await record(connection, _who(caller), "keys create", about)
    return {"id": key_id, "key": key}


@router.delete("/keys/{key_id}", summary="End an API key", status_code=204, responses=refusals(404))
async def revoke_key(context: Here, key_id: Annotated[str, Path(max_length=32)], caller: Operator) -> None:
    """Servers notice within two seconds."""
    async with context.database.write() as connection:
        tenant = await keys.revoke_key(connection, key_id)
        await record(connection, _who(caller), "keys revoke", {"key": key_id, "tenant": tenant})


def _tenant(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("name", "weight", "disabled", "store_names", *QUOTAS)}
