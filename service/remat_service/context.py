"""What every part of the service is handed: settings, database, store, verifier, notifier, metrics."""

from __future__ import annotations

import os
import socket

from .clock import Waits
from .memory import KeyedLocks
from .notify import Notifier
from .processes.supervisor import Supervisor
from .settings import Settings
from .storage.answers import ResponseCache, WriteBehind
from .storage.cache import Cache
from .storage.database import Database
from .storage.health import Health
from .storage.queue import Queue
from .storage.seals import seals_of
from .storage.store import Store
from .storage.verifier import Verifier
from .telemetry import Metrics

COME_BACK_S = 5
"""Seconds after which clients of a stopping server find it, or another, ready again."""


class Context:
    """One process's share of the service, wired together, and nothing of it opened yet; several share one database.

    Args:
        database: in place of the one that the settings name; with it, its clock.
        supervisor: starts solver children in place of the usual one.

    Attributes:
        stopping: no new work is begun; balancers are told so, and requests that wait are held.
        leaving: nobody waits here any longer.

    Raises:
        ValueError: a cluster without PostgreSQL.
        ServiceError: no key to seal by, or one that cannot be used.
    """

    def __init__(
        self, settings: Settings, database: Database | None = None, supervisor: Supervisor | None = None
    ) -> None:
        self.settings = settings
        self.database = database = database or Database(settings.database_url.get_secret_value(), settings=settings)
        if not settings.embedded and database.is_sqlite:
            raise ValueError("REMAT_DISPATCHER=cluster needs a postgresql:// database")
        self.clock, self.metrics, self.notifier = database.clock, Metrics(), Notifier()
        self.seals = seals_of(settings)
        self.verifier = Verifier()
        self.store = Store(database, self.seals, self.verifier)
        self.cache = Cache(database, self.store, self.verifier, self.metrics)
        self.write_behind = WriteBehind(database, self.store)
        self.response_cache = ResponseCache(
            self.store, self.write_behind, self.seals, self.clock, self.metrics, settings.recall_bytes
        )
        self.supervisor = supervisor or Supervisor(settings)
        self.health = Health(database, self.seals)
        self.queue = Queue(database, settings.stale_after_s)
        self.waits, self.locks = Waits(self.clock), KeyedLocks()
        self.name = f"{socket.gethostname()}:{os.getpid()}"[:100]
        self.stopping = self.leaving = False

    def leave(self) -> None:
        """Answer who still waits with what there is: the server is about to close its connections."""
        self.stopping = self.leaving = True
        self.notifier.notify_all()
