"""Who may ask: tenants, their API keys, the groups in which they share what is stored, and the log of who changed them.

A key reads `remat_` + 43 characters of secret + 6 of checksum, so that a scanner can spot a leaked one and a typing
error is told from a wrong key without a look at the database. What is stored is its SHA-256.

A scope holds the salt of all keys under which something is stored. A tenant has a scope of its own; a group is a scope
of several. In a group all members find what any of them has stored while in it, under equal keys: graphs without
names, plans, bounds, measured costs. Requests, ids, lists, quotas and API keys stay each tenant's own. What a tenant
has stored before it joins stays in its own scope: it is not shared, and found again once the tenant leaves.
"""

from __future__ import annotations

import getpass
import hashlib
import secrets
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ..clock import SYSTEM
from ..errors import Conflict, Forbidden, Invalid, NotFound, Unauthorized
from ..identity import ALL_SCOPES, ASKING, Caller
from ..storage.tables import administration, api_keys, profile_reports, requests, scopes, solves, tenants
from ..storage.tables import groups as request_groups

PREFIX = "remat_"
DEFAULT_TENANT = "default"
_SECRET_CHARS, _CHECK_CHARS = 43, 6
_KEYS = select(api_keys, tenants.c.name).join(tenants, tenants.c.id == api_keys.c.tenant_id)


def make_key() -> str:
    """A fresh key."""
    secret = secrets.token_urlsafe(32)
    return PREFIX + secret + hashed(secret)[:_CHECK_CHARS]


def well_formed(key: str) -> bool:
    """Whether a key can be one at all."""
    body = key.removeprefix(PREFIX)
    if not key.startswith(PREFIX) or len(body) != _SECRET_CHARS + _CHECK_CHARS or not body.isascii():
        return False
    return hashed(body[:_SECRET_CHARS])[:_CHECK_CHARS] == body[_SECRET_CHARS:]


def hashed(key: str) -> str:
    """What is stored of a key; 256 random bits need no slow hash."""
    return hashlib.sha256(key.encode()).hexdigest()


async def add_tenant(
    connection: AsyncConnection,
    name: str,
    group: str | None = None,
    weight: float = 1.0,
    identity_group: str | None = None,
) -> str:
    """A tenant with a scope, and so a salt, of its own; or in a sharing group, whose members share one.

    Args:
        identity_group: the group of an identity provider whose members speak for it.

    Raises:
        Invalid: the name is taken, or a name is too long.
        NotFound: there is no such group.
    """
    _check_length(name, "a tenant's name", _LONGEST_NAME, "/name")
    _check_length(identity_group or "", "a provider's group", 200, "/identity_group")
    if await connection.scalar(select(tenants.c.id).where(tenants.c.name == name)) is not None:
        raise Invalid(f"there is a tenant {name!r} already")
    tenant_id = SYSTEM.new_id()
    if group is not None:
        scope_id = await _scope_of_group(connection, group)
    elif (everyone := await everyones(connection)) is not None:
        scope_id = everyone.id
    else:
        scope_id = await own_scope(connection, name)
    await connection.execute(
        tenants.insert().values(
            id=tenant_id,
            name=name,
            scope_id=scope_id,
            weight=weight,
            identity_group=identity_group,
            disabled=False,
            created_at=SYSTEM.now(),
        )
    )
    return tenant_id


def _check_length(text: str, what: str, most: int, pointer: str) -> None:
    if len(text) > most:
        raise Invalid(f"{what} has at most {most} characters, and not {len(text)}", pointer)


async def remove_tenant(connection: AsyncConnection, name: str) -> list[str]:
    """Remove a tenant that has never asked for anything, and the scope that is its alone; returns the ids of its keys.

    Raises:
        NotFound: there is no such tenant.
        Conflict: something was asked or stored in its name.
    """
    tenant_id = (await tenant_row(connection, name)).id
    for table in (requests, solves, request_groups, profile_reports):
        if await connection.scalar(select(table.c.tenant_id).where(table.c.tenant_id == tenant_id).limit(1)):
            raise Conflict(f"{name!r} has asked for something; `remat-service tenants disable {name}` shuts it out")
    if name == DEFAULT_TENANT:
        raise Conflict("the default tenant is made again at the next start")
    of_tenant = delete(api_keys).where(api_keys.c.tenant_id == tenant_id)
    ids = list(await connection.scalars(of_tenant.returning(api_keys.c.id)))
    await connection.execute(delete(tenants).where(tenants.c.id == tenant_id))
    await connection.execute(delete(scopes).where(scopes.c.name == _OF_TENANT + name))
    return ids


async def tenant_row(connection: AsyncConnection, name: str) -> Any:
    """The row of a tenant.

    Raises:
        NotFound: there is none of that name.
    """
    row = (await connection.execute(select(tenants).where(tenants.c.name == name))).first()
    if row is None:
        raise NotFound(f"there is no tenant {name!r}")
    return row


async def all_keys(connection: AsyncConnection) -> Sequence[Any]:
    """Every key with the `name` of its tenant, by that."""
    return (await connection.execute(_KEYS.order_by(tenants.c.name, api_keys.c.id))).all()


async def add_key(
    connection: AsyncConnection,
    tenant: str,
    label: str = "",
    allowed: Sequence[str] = ASKING,
    expires_at: datetime | None = None,
) -> tuple[str, str]:
    """A new key for a tenant: (id, key). The key is not stored and can't be shown again.

    Raises:
        Invalid: an unknown scope, or a label that is too long.
        NotFound: an unknown tenant.
    """
    _check_length(label, "a label", 100, "/label")
    for scope in allowed:
        if scope not in ALL_SCOPES:
            raise Invalid(f"unknown scope {scope!r}; there are: {', '.join(ALL_SCOPES)}")
    key, key_id = make_key(), SYSTEM.new_id()
    await connection.execute(
        api_keys.insert().values(
            id=key_id,
            tenant_id=(await tenant_row(connection, tenant)).id,
            label=label,
            prefix=key[: len(PREFIX) + 6],
            secret_hash=hashed(key),
            scopes=" ".join(allowed),
            created_at=SYSTEM.now(),
            expires_at=expires_at,
        )
    )
    return key_id, key


def after(days: float) -> datetime:
    """The moment so many days from now.

    Raises:
        Invalid: there is no such date.
    """
    try:
        return SYSTEM.now() + timedelta(days=days)
    except (OverflowError, ValueError):
        raise Invalid(f"there is no date {days:g} days from now", "/days") from None


async def rotate_key(connection: AsyncConnection, key_id: str, end: datetime) -> tuple[str, str, str]:
    """A new key like an old one, which goes on working up to `end`: (id, key, tenant).

    The new one ends after as long a time as the old one was to last when this is called.

    Raises:
        NotFound: there is no such key, or it is revoked.
    """
    of_key = _KEYS.where(api_keys.c.id == key_id, api_keys.c.revoked_at.is_(None))
    row = (await connection.execute(of_key)).first()
    if row is None:
        raise NotFound(f"there is no valid key {key_id!r}")
    new_end = None if row.expires_at is None else SYSTEM.now() + (row.expires_at - row.created_at)
    fresh = await add_key(connection, row.name, row.label, row.scopes.split(), new_end)
    if row.expires_at is None or row.expires_at > end:
        await connection.execute(update(api_keys).where(api_keys.c.id == key_id).values(expires_at=end))
    return *fresh, row.name


async def revoke_key(connection: AsyncConnection, key_id: str) -> str:
    """End a key at once; returns its tenant's name.

    Raises:
        NotFound: there is no such key.
    """
    row = (await connection.execute(_KEYS.where(api_keys.c.id == key_id))).first()
    if row is None:
        raise NotFound(f"there is no key {key_id!r}")
    await connection.execute(update(api_keys).where(api_keys.c.id == key_id).values(revoked_at=SYSTEM.now()))
    return str(row.name)


async def any_key(connection: AsyncConnection) -> bool:
    """Whether some key would be accepted now."""
    return await connection.scalar(select(api_keys.c.id).where(_valid()).limit(1)) is not None


def _valid() -> ColumnElement[bool]:
    """Whether a key is neither revoked nor expired."""
    lasts = or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > SYSTEM.now())
    return and_(api_keys.c.revoked_at.is_(None), lasts)


async def caller_by_key(connection: AsyncConnection, key: str) -> Caller:
    """Who a key speaks for.

    Raises:
        Unauthorized: malformed, unknown, expired, revoked, or its tenant is disabled; one message for all.
    """
    row = None
    if well_formed(key):
        query = (
            _CALLERS.add_columns(api_keys.c.id.label("key_id"), api_keys.c.scopes)
            .join(api_keys, tenants.c.id == api_keys.c.tenant_id)
            .where(api_keys.c.secret_hash == hashed(key), _valid(), tenants.c.disabled.is_(False))
        )
        row = (await connection.execute(query)).first()
    if row is None:
        raise Unauthorized("this API key is not valid")
    return _caller(row, tuple(row.scopes.split()), row.key_id)


async def caller_by_groups(connection: AsyncConnection, identity_groups: Sequence[str], wanted: str | None) -> Caller:
    """Who a member of an identity provider's groups speaks for; `wanted` names the tenant where there are several.

    Raises:
        Forbidden: no tenant belongs to these groups, or several do, or the one that is wanted does not.
    """
    query = _CALLERS.where(tenants.c.identity_group.in_(identity_groups)).order_by(tenants.c.name)
    rows = [row for row in await connection.execute(query) if not row.disabled and wanted in (None, row.name)]
    if not rows:
        raise Forbidden("no tenant belongs to the groups in this token" if wanted is None else f"not of {wanted!r}")
    if len(rows) > 1:
        names = ", ".join(row.name for row in rows)
        raise Forbidden(f"this token speaks for several tenants; name one in the header Remat-Tenant: {names}")
    return _caller(rows[0])


async def caller_of(connection: AsyncConnection, tenant_id: str) -> Caller:
    """The caller that a tenant is, whatever its keys allow."""
    return _caller((await connection.execute(_CALLERS.where(tenants.c.id == tenant_id))).one())


_CALLERS = select(
    tenants.c.id,
    tenants.c.name,
    tenants.c.disabled,
    scopes.c.id.label("scope_id"),
    scopes.c.name.label("scope"),
    scopes.c.salt,
    scopes.c.epoch,
).join(scopes, scopes.c.id == tenants.c.scope_id)


def _caller(row: Any, allowed: tuple[str, ...] = ASKING, key_id: str = "") -> Caller:
    return Caller(row.id, row.scope_id, row.salt, row.epoch, allowed, row.name, group_of(row.scope), key_id)


async def default_caller(connection: AsyncConnection) -> Caller:
    """The tenant that speaks where no key is asked for; made at first need."""
    query = _CALLERS.where(tenants.c.name == DEFAULT_TENANT)
    row = (await connection.execute(query)).first()
    if row is None:
        await add_tenant(connection, DEFAULT_TENANT)
        row = (await connection.execute(query)).one()
    return _caller(row, ALL_SCOPES)  # who reaches a service without keys may do everything


_OF_GROUP, _OF_TENANT = "group:", "tenant:"
_LONGEST_NAME = 100 - len(_OF_TENANT)
"""So that it fits into `scopes.name` behind either."""


def group_of(scope_name: str) -> str | None:
    """The group that a scope belongs to, or None for a tenant's own."""
    return scope_name.removeprefix(_OF_GROUP) if scope_name.startswith(_OF_GROUP) else None


async def create_group(connection: AsyncConnection, name: str, everyone: bool = False) -> None:
    """Make a group; with `everyone`, all tenants that are in no group join it, and so do those made later.

    Raises:
        Invalid: the name is taken or too long, or another group is everyone's.
        Conflict: as `move_tenant`.
    """
    _check_length(name, "a group's name", _LONGEST_NAME, "/name")
    if await _scope(connection, _OF_GROUP + name) is not None:
        raise Invalid(f"there is a group {name!r} already")
    other = await everyones(connection)
    if everyone and other is not None:
        raise Invalid(f"the group {group_of(other.name)!r} is everyone's already")
    await _add_scope(connection, _OF_GROUP + name, everyone)
    if everyone:
        alone = select(tenants.c.name).join(scopes).where(scopes.c.name.startswith(_OF_TENANT, autoescape=True))
        for tenant in (await connection.scalars(alone)).all():
            await move_tenant(connection, tenant, name)


async def move_tenant(connection: AsyncConnection, tenant: str, group: str | None) -> None:
    """Move a tenant into a group; without one, back into a scope of its own.

    Raises:
        NotFound: there is no such group or tenant.
        Conflict: solves of the tenant are under way, whose results belong where they were asked for.
    """
    scope_id = await (own_scope(connection, tenant) if group is None else _scope_of_group(connection, group))
    # locked as a solve is queued (`tenants/quotas.py`): one that is being queued is seen here, or sees the move
    row = (await connection.execute(select(tenants.c.id).where(tenants.c.name == tenant).with_for_update())).first()
    if row is None:
        raise NotFound(f"there is no tenant {tenant!r}")
    asked = select(requests.c.solve_id).where(requests.c.tenant_id == row.id, requests.c.ended.is_(False))
    theirs = or_(solves.c.tenant_id == row.id, solves.c.id.in_(asked))
    found = select(func.count()).select_from(solves).where(solves.c.state.in_(("queued", "running")), theirs)
    under_way = await connection.scalar(found)
    if under_way:
        raise Conflict(f"{under_way} solves of {tenant} are under way; wait for them, or cancel them", retry_after_s=60)
    await connection.execute(update(tenants).where(tenants.c.id == row.id).values(scope_id=scope_id))


async def delete_group(connection: AsyncConnection, name: str) -> None:
    """End a group without members; nobody can find what is stored in it any more, and eviction removes it.

    Raises:
        NotFound: there is no such group.
        Conflict: it has members.
    """
    scope_id = await _scope(connection, _OF_GROUP + name)
    if scope_id is None:
        raise NotFound(f"there is no group {name!r}")
    members = (await connection.scalars(select(tenants.c.name).where(tenants.c.scope_id == scope_id))).all()
    if members:
        raise Conflict(f"the group {name!r} has members, who have to leave first: {', '.join(sorted(members))}")
    await connection.execute(delete(scopes).where(scopes.c.id == scope_id))


async def groups(connection: AsyncConnection) -> dict[tuple[str, bool], list[str]]:
    """The members of every group, by its name and whether it is everyone's."""
    query = (
        select(scopes.c.name, scopes.c.everyone, tenants.c.name.label("tenant"))
        .outerjoin(tenants, tenants.c.scope_id == scopes.c.id)
        .where(scopes.c.name.startswith(_OF_GROUP, autoescape=True))
        .order_by(scopes.c.name, tenants.c.name)
    )
    found: dict[tuple[str, bool], list[str]] = {}
    for row in await connection.execute(query):
        name = row.name.removeprefix(_OF_GROUP)
        found.setdefault((name, row.everyone), []).extend([row.tenant] if row.tenant else [])
    return found


async def own_scope(connection: AsyncConnection, tenant: str) -> str:
    """The id of the scope that is a tenant's alone, made where it has none."""
    return await _scope(connection, _OF_TENANT + tenant) or await _add_scope(connection, _OF_TENANT + tenant)


async def everyones(connection: AsyncConnection) -> Any:
    """The scope of the group that is everyone's, if there is one."""
    return (await connection.execute(select(scopes.c.id, scopes.c.name).where(scopes.c.everyone.is_(True)))).first()


async def _scope(connection: AsyncConnection, name: str) -> str | None:
    found: str | None = await connection.scalar(select(scopes.c.id).where(scopes.c.name == name))
    return found


async def _scope_of_group(connection: AsyncConnection, group: str) -> str:
    scope_id = await _scope(connection, _OF_GROUP + group)
    if scope_id is None:
        raise NotFound(f"there is no group {group!r}; make it with `remat-service groups create {group}`")
    return scope_id


async def _add_scope(connection: AsyncConnection, name: str, everyone: bool = False) -> str:
    scope_id = SYSTEM.new_id()
    await connection.execute(
        scopes.insert().values(
            id=scope_id, name=name, salt=secrets.token_bytes(32), epoch=0, everyone=everyone, created_at=SYSTEM.now()
        )
    )
    return scope_id


def operator() -> str:
    """Who runs a command: the account, and the machine."""
    try:
        account = getpass.getuser()
    except (OSError, KeyError):  # an account without a name, as in a container
        account = "unknown"
    return f"{account}@{socket.gethostname()}"[:200]


async def record(connection: AsyncConnection, actor: str, act: str, about: Mapping[str, Any]) -> None:
    """Write one act down, in the transaction that performs it: there is no act without its line."""
    await connection.execute(
        administration.insert().values(id=SYSTEM.new_id(), at=SYSTEM.now(), actor=actor, act=act, about=dict(about))
    )


async def acts(connection: AsyncConnection, limit: int) -> list[Any]:
    """The latest acts, oldest first."""
    query = select(administration).order_by(administration.c.id.desc()).limit(limit)
    return list(reversed((await connection.execute(query)).all()))
