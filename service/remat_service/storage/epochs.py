"""Epochs: once raised, whatever a scope's tenants asked and stored before is found no more.

What is stored is out of reach because the epoch is in its key (`cache_key.py`). A request is found by its own id, so
its row carries the epoch that its caller had, and every look at it compares the two: what a server remembers of the
answer does not matter. A server knows a raised epoch when it looks the caller up again, after two seconds at most.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from .tables import requests, scopes, tenants


def of_epoch(epoch: Any) -> ColumnElement[bool]:
    """Whether a row of `requests` was asked in an epoch or, where another server knew sooner, a later one.

    A row that was written without an epoch counts as of any.
    """
    return or_(requests.c.epoch.is_(None), requests.c.epoch >= epoch)


async def raise_epoch(connection: AsyncConnection, scope_id: str) -> None:
    """Disown everything of a scope. Requests that were written without an epoch get the one that ends."""
    ended = select(scopes.c.epoch).where(scopes.c.id == scope_id).scalar_subquery()
    members = select(tenants.c.id).where(tenants.c.scope_id == scope_id)
    await connection.execute(
        update(requests).where(requests.c.tenant_id.in_(members), requests.c.epoch.is_(None)).values(epoch=ended)
    )
    await connection.execute(update(scopes).where(scopes.c.id == scope_id).values(epoch=scopes.c.epoch + 1))
