"""The log of administration: who has changed tenants, keys, groups or the store, when, and how. Never a secret."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from ..clock import SYSTEM
from ..storage.tables import administration


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
