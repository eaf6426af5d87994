"""Sharing groups: whose stored plans, bounds and measured costs a tenant uses, and who uses its own.

A scope holds the salt of all keys under which something is stored. A tenant has a scope of its own; a group is a scope
of several. In a group all members find what any of them has stored while in it, under equal keys: graphs without
names, plans, bounds, measured costs. Requests, ids, lists, quotas and API keys stay each tenant's own. What a tenant
has stored before it joins stays in its own scope: it is not shared, and found again once the tenant leaves.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ..clock import SYSTEM
from ..errors import Conflict, Invalid, NotFound
from ..storage.tables import requests, scopes, solves, tenants

_OF_GROUP, _OF_TENANT = "group:", "tenant:"


@dataclass(frozen=True)
class Group:
    """A sharing group as an operator sees it."""

    name: str
    everyone: bool
    members: tuple[str, ...]


def group_of(scope_name: str) -> str | None:
    """The group that a scope belongs to, or None for a tenant's own."""
    return scope_name.removeprefix(_OF_GROUP) if scope_name.startswith(_OF_GROUP) else None


async def create_group(connection: AsyncConnection, name: str, everyone: bool = False) -> None:
    """Make a group; with `everyone`, all tenants that are in no group join it, and so do those made later.

    Raises:
        Invalid: the name is taken, or another group is everyone's.
        Conflict: as `join_group`.
    """
    if await _scope(connection, _OF_GROUP + name) is not None:
        raise Invalid(f"there is a group {name!r} already")
    other = await everyones(connection)
    if everyone and other is not None:
        raise Invalid(f"the group {group_of(other.name)!r} is everyone's already")
    await _add_scope(connection, _OF_GROUP + name, everyone)
    if everyone:
        alone = select(tenants.c.name).join(scopes).where(scopes.c.name.startswith(_OF_TENANT, autoescape=True))
        for tenant in (await connection.execute(alone)).scalars().all():
            await join_group(connection, name, tenant)


async def join_group(connection: AsyncConnection, group: str, tenant: str) -> None:
    """Move a tenant into a group.

    Raises:
        NotFound: there is no such group or tenant.
        Conflict: solves of the tenant are under way, whose results belong where they were asked for.
    """
    scope_id = await _scope(connection, _OF_GROUP + group)
    if scope_id is None:
        raise NotFound(f"there is no group {group!r}; make it with `remat-service groups create {group}`")
    await _move(connection, tenant, scope_id)


async def leave_group(connection: AsyncConnection, tenant: str) -> None:
    """Move a tenant back into a scope of its own.

    Raises:
        NotFound: there is no such tenant.
        Conflict: as `join_group`.
    """
    await _move(connection, tenant, await own_scope(connection, tenant))


async def delete_group(connection: AsyncConnection, name: str) -> None:
    """End a group without members; nobody can find what is stored in it any more, and eviction removes it.

    Raises:
        NotFound: there is no such group.
        Conflict: it has members.
    """
    scope_id = await _scope(connection, _OF_GROUP + name)
    if scope_id is None:
        raise NotFound(f"there is no group {name!r}")
    members = (await connection.execute(select(tenants.c.name).where(tenants.c.scope_id == scope_id))).scalars().all()
    if members:
        raise Conflict(f"the group {name!r} has members, who have to leave first: {', '.join(sorted(members))}")
    await connection.execute(delete(scopes).where(scopes.c.id == scope_id))


async def groups(connection: AsyncConnection) -> Sequence[Group]:
    """Every group with its members, by name."""
    found = (
        await connection.execute(
            select(scopes.c.name, scopes.c.everyone, tenants.c.name.label("tenant"))
            .outerjoin(tenants, tenants.c.scope_id == scopes.c.id)
            .where(scopes.c.name.startswith(_OF_GROUP, autoescape=True))
            .order_by(scopes.c.name, tenants.c.name)
        )
    ).all()
    members: dict[tuple[str, bool], list[str]] = {}
    for row in found:
        members.setdefault((row.name, row.everyone), []).extend([row.tenant] if row.tenant else [])
    return [Group(group_of(name) or name, everyone, tuple(of)) for (name, everyone), of in members.items()]


async def own_scope(connection: AsyncConnection, tenant: str) -> str:
    """The id of the scope that is a tenant's alone, made where it has none."""
    return await _scope(connection, _OF_TENANT + tenant) or await _add_scope(connection, _OF_TENANT + tenant)


async def drop_own_scope(connection: AsyncConnection, tenant: str) -> None:
    """Remove the scope that is a tenant's alone, once the tenant is removed."""
    await connection.execute(delete(scopes).where(scopes.c.name == _OF_TENANT + tenant))


async def scope_for_new(connection: AsyncConnection, tenant: str, group: str | None) -> str:
    """Where a tenant that is being made belongs: a group by name, everyone's, or a scope of its own.

    Raises:
        NotFound: there is no such group.
    """
    if group is None:
        everyone = await everyones(connection)
        return await own_scope(connection, tenant) if everyone is None else str(everyone.id)
    scope_id = await _scope(connection, _OF_GROUP + group)
    if scope_id is None:
        raise NotFound(f"there is no group {group!r}; make it with `remat-service groups create {group}`")
    return scope_id


async def raise_epoch(connection: AsyncConnection, scope_id: str) -> None:
    """Disown everything of a scope. Requests that were written without an epoch get the one that ends."""
    ended = select(scopes.c.epoch).where(scopes.c.id == scope_id).scalar_subquery()
    members = select(tenants.c.id).where(tenants.c.scope_id == scope_id)
    await connection.execute(
        update(requests).where(requests.c.tenant_id.in_(members), requests.c.epoch.is_(None)).values(epoch=ended)
    )
    await connection.execute(update(scopes).where(scopes.c.id == scope_id).values(epoch=scopes.c.epoch + 1))


async def everyones(connection: AsyncConnection) -> Any:
    """The scope of the group that is everyone's, if there is one."""
    return (await connection.execute(select(scopes.c.id, scopes.c.name).where(scopes.c.everyone.is_(True)))).first()


async def _scope(connection: AsyncConnection, name: str) -> str | None:
    found: str | None = await connection.scalar(select(scopes.c.id).where(scopes.c.name == name))
    return found


async def _add_scope(connection: AsyncConnection, name: str, everyone: bool = False) -> str:
    scope_id = SYSTEM.new_id()
    await connection.execute(
        scopes.insert().values(
            id=scope_id, name=name, salt=os.urandom(32), epoch=0, everyone=everyone, created_at=SYSTEM.now()
        )
    )
    return scope_id


async def _move(connection: AsyncConnection, tenant: str, scope_id: str) -> None:
    # locked as a solve is queued (`tenants/quotas.py`): one that is being queued is seen here, or sees the move
    row = (await connection.execute(select(tenants.c.id).where(tenants.c.name == tenant).with_for_update())).first()
    if row is None:
        raise NotFound(f"there is no tenant {tenant!r}")
    under_way = await connection.scalar(
        select(func.count())
        .select_from(solves)
        .where(
            solves.c.state.in_(("queued", "running")),
            or_(
                solves.c.tenant_id == row.id,
                solves.c.id.in_(
                    select(requests.c.solve_id).where(requests.c.tenant_id == row.id, requests.c.ended.is_(False))
                ),
            ),
        )
    )
    if under_way:
        raise Conflict(f"{under_way} solves of {tenant} are under way; wait for them, or cancel them", retry_after_s=60)
    await connection.execute(update(tenants).where(tenants.c.id == row.id).values(scope_id=scope_id))
