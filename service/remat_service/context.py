"""What every part of the service is handed: settings, database, store, verifier, notifier, metrics."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field

from .clock import Clock, Waits
from .memory import KeyedLocks
from .notify import Notifier
from .processes.supervisor import Supervisor
from .settings import Settings
from .storage.answers import ResponseCache, WriteBehind
from .storage.cache import Cache
from .storage.database import Database
from .storage.health import Health
from .storage.queue import Queue
from .storage.seals import Claims, Seals, seals_of
from .storage.store import Store
from .storage.verifier import Verifier
from .telemetry import Metrics

COME_BACK_S = 5
"""Seconds after which clients of a stopping server find it, or another, ready again."""


@dataclass
class Context:
    """One process's share of the service; several share one database.

    Attributes:
        stopping: no new work is begun; balancers are told so, and requests that wait are held.
        leaving: nobody waits here any longer.
    """

    settings: Settings
    database: Database
    clock: Clock
    store: Store
    claims: Claims
    seals: Seals
    verifier: Verifier
    cache: Cache
    write_behind: WriteBehind
    response_cache: ResponseCache
    notifier: Notifier
    metrics: Metrics
    supervisor: Supervisor
    health: Health
    queue: Queue
    waits: Waits
    name: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}"[:100])
    locks: KeyedLocks = field(default_factory=KeyedLocks)
    stopping: bool = False
    leaving: bool = False

    def leave(self) -> None:
        """Answer who still waits with what there is: the server is about to close its connections."""
        self.stopping = self.leaving = True
        self.notifier.notify_all()


def build_context(
    settings: Settings, database: Database | None = None, supervisor: Supervisor | None = None
) -> Context:
    """Everything wired together; nothing is opened yet.

    Args:
        database: in place of the one that the settings name; with it, its clock.
        supervisor: starts solver children in place of the usual one.

    Raises:
        ValueError: a cluster without PostgreSQL.
        ServiceError: no key to seal by, or one that cannot be used.
    """
    database = database or Database(settings.database_url.get_secret_value(), settings=settings)
    verifier, metrics = Verifier(), Metrics()
    if not settings.embedded and database.is_sqlite:
        raise ValueError("REMAT_DISPATCHER=cluster needs a postgresql:// database")
    seals = seals_of(settings)
    claims = Claims(database, seals)
    store = Store(database, claims)
    write_behind = WriteBehind(database, store)
    return Context(
        settings=settings,
        database=database,
        clock=database.clock,
        store=store,
        verifier=verifier,
        claims=claims,
        seals=seals,
        cache=Cache(database, store, claims, verifier, metrics),
        write_behind=write_behind,
        response_cache=ResponseCache(store, write_behind, seals, database.clock, metrics, settings.recall_bytes),
        notifier=Notifier(),
        metrics=metrics,
        supervisor=supervisor or Supervisor(settings),
        health=Health(database, seals),
        queue=Queue(database, settings.stale_after_s),
        waits=Waits(database.clock),
    )
