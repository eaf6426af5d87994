"""`remat-service tenants`, `keys` and `groups`: who may ask, for how much, and who shares what is stored."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import typer
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ..clock import SYSTEM
from ..context import Context
from ..errors import NotFound
from ..identity import ASKING
from ..requests import operate
from ..requests.attachments import drop_names
from ..requests.completion import cancel_tenant
from ..storage.tables import profile_reports, profiles, scopes, tenants
from ..tenants import keys
from ..tenants.keys import operator
from ..tenants.quotas import QUOTAS
from .operate import in_context, in_database

keys_app = typer.Typer(no_args_is_help=True, help="API keys.")
_NONE = "none"
tenants_app = typer.Typer(no_args_is_help=True, help="Tenants, their quotas and their stored answers.")

groups_app = typer.Typer(
    no_args_is_help=True,
    help="Sharing groups. Members find the plans, bounds and measured costs that any of them has stored while in the "
    "group; requests, ids, lists, quotas and keys stay each tenant's own. Servers notice a change within two seconds.",
)
Name = Annotated[str, typer.Argument(help="Name of the group.")]
Tenant = Annotated[str, typer.Argument(help="Name of the tenant.")]


@keys_app.command("create")
def create(
    tenant: Annotated[str, typer.Argument(help="The tenant it speaks for.")],
    new_tenant: Annotated[bool, typer.Option("--new-tenant", help="Make the tenant if there is none.")] = False,
    label: Annotated[str, typer.Option(help="For people.")] = "",
    scope: Annotated[list[str] | None, typer.Option(help="solve, read or operate; again for more.")] = None,
    days: Annotated[float | None, typer.Option(help="Days until it expires.")] = None,
) -> None:
    """Make a key and print it: the only time that it can be seen."""
    allowed = scope or list(ASKING)

    async def work(connection: AsyncConnection) -> tuple[str, str]:
        if await connection.scalar(select(tenants.c.id).where(tenants.c.name == tenant)) is None:
            if not new_tenant:
                raise NotFound(f"there is no tenant {tenant!r}; to make it together with the key, add --new-tenant")
            await keys.add_tenant(connection, tenant)
        expires_at = None if days is None else keys.after(days)
        return await keys.add_key(connection, tenant, label, allowed, expires_at)

    about = {"tenant": tenant, "label": label, "scopes": allowed}
    key_id, key = in_database(work, "keys create", more=lambda made: {"key": made[0]}, **about)
    typer.echo(f"key {key_id} for {tenant}", err=True)
    typer.echo(key)


@keys_app.command("list")
def list_keys() -> None:
    """Every key: id, tenant, first characters, scopes, state."""

    async def work(connection: AsyncConnection) -> list[str]:
        return [
            f"{row.id}  {row.name}  {row.prefix}…  {row.scopes}  {_state(row)}  {row.label}"
            for row in await keys.all_keys(connection)
        ]

    for line in in_database(work):
        typer.echo(line.rstrip())


def _state(row: Any) -> str:
    if row.revoked_at is not None:
        return "revoked"
    if row.expires_at is None:
        return "valid"
    return f"expired {row.expires_at}" if row.expires_at <= SYSTEM.now() else f"valid until {row.expires_at}"


@keys_app.command("rotate")
def rotate(
    key_id: Annotated[str, typer.Argument(help="Id of the old key.")],
    overlap_hours: Annotated[float, typer.Option(help="Hours for which the old key goes on working.")] = 24.0,
) -> None:
    """Make a key like another, which ends after the overlap; one that was to expire gets a successor for as long."""
    end = keys.after(overlap_hours / 24)
    fresh_id, key, _ = in_database(
        lambda c: keys.rotate_key(c, key_id, end),
        "keys rotate",
        more=lambda made: {"new_key": made[0], "tenant": made[2]},
        key=key_id,
        overlap_hours=overlap_hours,
    )
    typer.echo(f"key {fresh_id} in place of {key_id}", err=True)
    typer.echo(key)


@keys_app.command("revoke")
def revoke(key_id: Annotated[str, typer.Argument(help="Id of the key.")]) -> None:
    """End a key; servers notice within two seconds."""
    in_database(lambda c: keys.revoke_key(c, key_id), "keys revoke", more=lambda tenant: {"tenant": tenant}, key=key_id)


@tenants_app.command("add")
def add(
    name: str,
    group: Annotated[str | None, typer.Option(help="The sharing group that it joins; see `groups`.")] = None,
    weight: Annotated[float, typer.Option(min=0.01, help="Share of the workers, against other tenants.")] = 1.0,
    identity_group: Annotated[
        str | None,
        typer.Option(help="The identity provider's group whose members speak for it; see REMAT_OIDC_ISSUER."),
    ] = None,
) -> None:
    """Make a tenant."""
    asked: dict[str, Any] = {"name": name, "group": group, "weight": weight, "identity_group": identity_group}
    made = in_database(
        lambda c: keys.add_tenant(c, **asked), "tenants add", more=lambda made: {"tenant_id": made}, **asked
    )
    typer.echo(made)


def _limit(kind: type[int] | type[float], help: str) -> Any:
    """An option that is a number from 0, or the word that removes the limit."""

    def read(text: str) -> float | str:
        if text == _NONE:
            return text
        try:
            number = kind(text)
        except ValueError:
            number = -1
        if not 0 <= number < math.inf:
            raise typer.BadParameter(f"{text!r} is neither a number from 0 nor {_NONE!r}")
        return number

    return typer.Option(parser=read, metavar=f"N|{_NONE}", help=help)


@tenants_app.command("remove")
def remove(name: str) -> None:
    """Remove a tenant that has never asked for anything, with its keys: one whose name was mistyped."""
    in_database(
        lambda c: keys.remove_tenant(c, name), "tenants remove", more=lambda removed: {"keys": removed}, name=name
    )


@tenants_app.command("quota")
def quota(
    name: str,
    running: Annotated[Any, _limit(int, "Most solves running at once.")] = None,
    queued: Annotated[Any, _limit(int, "Most solves queued at once.")] = None,
    solver_seconds: Annotated[Any, _limit(float, "Most solver seconds a day.")] = None,
    stored_bytes: Annotated[Any, _limit(int, "Bytes of graphs and plans for a new solve.")] = None,
    requests: Annotated[Any, _limit(int, "Most requests kept; the oldest ended ones go.")] = None,
    profiles: Annotated[Any, _limit(int, "Most profiles kept.")] = None,
) -> None:
    """Show a tenant's quotas, or change those that are named; `none` removes one."""
    named = dict(zip(QUOTAS, (running, queued, solver_seconds, stored_bytes, requests, profiles), strict=True))
    limits = {column: None if limit == _NONE else limit for column, limit in named.items() if limit is not None}

    async def work(connection: AsyncConnection) -> Any:
        if limits:
            return await operate.change_tenant(connection, operator(), name, limits)
        return await keys.tenant_row(connection, name)

    typer.echo(_quotas(in_database(work)))


@tenants_app.command("names")
def names(
    name: str,
    stored: Annotated[Literal["on", "off"], typer.Argument(help="off also deletes the names that are stored.")],
) -> None:
    """Let the names of a tenant's ops be stored with its solves, or not, as at first.

    They are words of the model's code, for who looks at a plan on the page; nobody but the tenant reads them there.
    """

    async def work(connection: AsyncConnection) -> None:
        tenant_id = (await keys.tenant_row(connection, name)).id
        await connection.execute(update(tenants).where(tenants.c.id == tenant_id).values(store_names=stored == "on"))
        if stored == "off":
            await drop_names(connection, tenant_id)

    in_database(work, "tenants names", name=name, stored=stored)


@tenants_app.command("disown")
def disown(name: str) -> None:
    """Raise the epoch of a tenant's scope: nothing asked or stored before is found again. In a sharing group, for all.

    Measured costs are deleted: the next jobs measure them again.
    Servers notice within two seconds: ids of earlier requests are then answered 404. No restart is needed.
    """

    async def work(connection: AsyncConnection) -> None:
        scope_id = (await keys.tenant_row(connection, name)).scope_id
        await connection.execute(update(scopes).where(scopes.c.id == scope_id).values(epoch=scopes.c.epoch + 1))
        for table in (profiles, profile_reports):
            await connection.execute(table.delete().where(table.c.scope_id == scope_id))

    in_database(work, "tenants disown", name=name)


@tenants_app.command("disable")
def disable(name: str, again: Annotated[bool, typer.Option("--enable", help="Let it in again.")] = False) -> None:
    """Refuse every key of a tenant, and end what it has under way; what others wait for, too, goes on."""

    async def work(context: Context) -> int:
        async with context.database.write() as connection:
            row = await operate.change_tenant(connection, operator(), name, {"disabled": not again})
        return 0 if again else await cancel_tenant(context, row.id)

    ended = in_context(work)
    if ended:
        typer.echo(f"{ended} requests ended", err=True)


@tenants_app.command("list")
def list_tenants() -> None:
    """Every tenant: scope, epoch, weight, quotas."""

    async def work(connection: AsyncConnection) -> list[str]:
        rows = await connection.execute(
            select(tenants, scopes.c.name.label("scope"), scopes.c.epoch)
            .join(scopes, scopes.c.id == tenants.c.scope_id)
            .order_by(tenants.c.name)
        )
        return [
            f"{row.name}  {row.scope}  epoch {row.epoch}  weight {row.weight:g}  "
            + _quotas(row)
            + ("  names stored" if row.store_names else "")
            + ("  disabled" if row.disabled else "")
            for row in rows
        ]

    for line in in_database(work):
        typer.echo(line)


def _quotas(row: Any) -> str:
    limits = {name.removeprefix("most_").replace("_", " "): getattr(row, name) for name in QUOTAS}
    return "  ".join(f"{what} {'-' if most is None else most}" for what, most in limits.items())


@groups_app.command("create")
def create_group(
    name: Name,
    everyone: Annotated[
        bool, typer.Option("--everyone", help="All tenants that are in no group are in this one, later ones too.")
    ] = False,
) -> None:
    """Make a group."""
    in_database(lambda c: keys.create_group(c, name, everyone), "groups create", name=name, everyone=everyone)


@groups_app.command("join")
def join(name: Name, tenant: Tenant) -> None:
    """Move a tenant into a group. What it has stored so far is not shared, and found again once it leaves.

    Refused while solves of the tenant are under way. Ids of its earlier requests may be answered 404 or 410 meanwhile.
    """
    in_database(lambda c: keys.move_tenant(c, tenant, name), "groups join", name=name, tenant=tenant)


@groups_app.command("leave")
def leave(tenant: Tenant) -> None:
    """Move a tenant out of its group: what it has stored there stays with the group.

    Refused while solves of the tenant are under way.
    """
    in_database(lambda c: keys.move_tenant(c, tenant, None), "groups leave", tenant=tenant)


@groups_app.command("delete")
def delete(name: Name) -> None:
    """End a group that has no members; what is stored in it is found no more, and evicted with time."""
    in_database(lambda c: keys.delete_group(c, name), "groups delete", name=name)


@groups_app.command("list")
def list_groups() -> None:
    """Every group and its members."""
    for (name, everyone), members in in_database(keys.groups).items():
        whose = "  everyone's" if everyone else ""
        typer.echo(f"{name}{whose}: {', '.join(members) or 'no members'}")
