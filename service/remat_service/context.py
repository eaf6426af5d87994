"""What every part of the service is handed: settings, database, store, judge, bells, metrics."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from sqlalchemy.ext.asyncio import AsyncConnection

from .locks import Turns
from .metrics import Metrics
from .notify.notifier import Bells
from .processes.supervisor import Warden
from .settings import Settings
from .storage.cache import Cache
from .storage.database import Database
from .storage.response_cache import Recall
from .storage.snapshot import Glance
from .storage.store import Store
from .storage.verifier import Judge
from .storage.write_behind import Behind

Enqueue = Callable[[AsyncConnection, str, int], Awaitable[None]]
"""Tells a queue of a new solve, in the transaction that writes it: (connection, solve id, priority)."""


async def enqueue_nothing(connection: AsyncConnection, solve_id: str, priority: int) -> None:
    """Where the dispatcher reads the table itself, there is no queue to tell."""


@dataclass
class Room:
    """One process's share of the service; several share one database."""

    settings: Settings
    database: Database
    store: Store
    judge: Judge
    cache: Cache
    glance: Glance
    behind: Behind
    recall: Recall
    bells: Bells
    metrics: Metrics
    warden: Warden
    enqueue: Enqueue
    name: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}"[:100])
    turns: Turns = field(default_factory=Turns)
    stopping: bool = False


def room_of(settings: Settings) -> Room:
    """Everything wired together; nothing is opened yet.

    Raises:
        ValueError: a cluster without PostgreSQL.
    """
    database, judge = Database(settings.database_url.get_secret_value()), Judge()
    store, glance = Store(database), Glance(database)
    behind = Behind(database, store)
    if not settings.embedded and database.is_sqlite:
        raise ValueError("REMAT_DISPATCHER=cluster needs a postgresql:// database")
    return Room(
        settings=settings,
        database=database,
        store=store,
        judge=judge,
        cache=Cache(database, store, judge, glance),
        glance=glance,
        behind=behind,
        recall=Recall(glance, judge, behind, settings.recall_bytes),
        bells=Bells(),
        metrics=Metrics(),
        warden=Warden(settings),
        enqueue=enqueue_nothing,
    )
