"""`remat-service groups`: which tenants share what is stored."""

from __future__ import annotations

from typing import Annotated

import typer

from ..tenants import groups
from .transaction import in_database

groups_app = typer.Typer(
    no_args_is_help=True,
    help="Sharing groups. Members find the plans, bounds and measured costs that any of them has stored while in the "
    "group; requests, ids, lists, quotas and keys stay each tenant's own. Servers notice a change within two seconds.",
)

Name = Annotated[str, typer.Argument(help="Name of the group.")]
Tenant = Annotated[str, typer.Argument(help="Name of the tenant.")]


@groups_app.command("create")
def create(
    name: Name,
    everyone: Annotated[
        bool, typer.Option("--everyone", help="All tenants that are in no group are in this one, later ones too.")
    ] = False,
) -> None:
    """Make a group."""
    in_database(lambda c: groups.create_group(c, name, everyone), "groups create", name=name, everyone=everyone)


@groups_app.command("join")
def join(name: Name, tenant: Tenant) -> None:
    """Move a tenant into a group. What it has stored so far is not shared, and found again once it leaves.

    Refused while solves of the tenant are under way. Ids of its earlier requests may be answered 404 or 410 meanwhile.
    """
    in_database(lambda c: groups.join_group(c, name, tenant), "groups join", name=name, tenant=tenant)


@groups_app.command("leave")
def leave(tenant: Tenant) -> None:
    """Move a tenant out of its group: what it has stored there stays with the group.

    Refused while solves of the tenant are under way.
    """
    in_database(lambda c: groups.leave_group(c, tenant), "groups leave", tenant=tenant)


@groups_app.command("delete")
def delete(name: Name) -> None:
    """End a group that has no members; what is stored in it is found no more, and evicted with time."""
    in_database(lambda c: groups.delete_group(c, name), "groups delete", name=name)


@groups_app.command("list")
def list_groups() -> None:
    """Every group and its members."""
    for group in in_database(groups.groups):
        whose = "  everyone's" if group.everyone else ""
        typer.echo(f"{group.name}{whose}: {', '.join(group.members) or 'no members'}")
