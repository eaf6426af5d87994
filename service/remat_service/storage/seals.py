"""What the store says and nobody can prove anew: claims, floors and efforts, and the seals by which they are believed.

A seal is an HMAC by a key that is not in the database. Plans and certificates need none: they are checked on the
problem itself. Everything else that is believed (what engines claim, floors, efforts, what a running solve has told,
ended answers, profiles) is signed column by column. A row whose seal does not hold counts as not there.

A key is given from elsewhere, or there is none: one next to the database would be read, and used, by whoever writes to
the database. Without a key, which only SQLite may be, rows are believed as they are.

`seal_keys` has one row a key that any process was started with, sealed by it; one of them `signs`. A process that lacks
that key would take whatever the others store for damaged, so it is refused; so is one that would sign, in a store that
several processes share, with a key that no process was started with as a second one before.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ..errors import ServiceError
from ..settings import Settings, driver_url
from . import migrations
from .database import Database
from .tables import seal_keys

SEALED: dict[str, tuple[str, ...]] = {
    "bounds": ("graph_key", "budget_bytes", "method_key", "restricted_to", "solver", "bound_ns", "source"),
    "floors": ("graph_key", "solver", "least_bytes", "enough_bytes"),
    "efforts": (
        "graph_key", "budget_bytes", "method_key", "solver", "seconds", "settled", "status", "limit", "restricted_to",
        "message",
    ),
    "solves": ("id", "plan_id", "cost_ns", "peak_bytes", "total_cost_ns", "bound_ns", "restricted_to"),
    "requests": ("id", "tenant_id", "graph_key", "budget_bytes", "fixed_bytes", "plan_id", "proof_id", "answer"),
    "profiles": ("scope_id", "device", "signature", "cost_ns", "workspace_bytes"),
    "profile_reports": ("scope_id", "device", "signature", "tenant_id", "cost_ns", "workspace_bytes"),
}  # fmt: skip
"""The columns of each table that its seal covers."""

_SHORTEST = 32
_OF_KEY = '["seal_keys"]'

_WRONG = (
    "REMAT_SEAL_KEY is not the key that this store is sealed with, so nothing that it has sealed would be believed; "
    "set the right one. If it is lost, run `remat-service store adopt-key`"
)
_NONE = (
    "this store is sealed, and REMAT_SEAL_KEY is not set; to go on without seals, run `remat-service store adopt-key`"
)
_ORDER = (
    "REMAT_SEAL_KEY begins with a key that the other servers and workers do not know yet; start all of them with "
    "`old,new` first, then with `new,old`"
)


class Seals:
    """Signs rows with the first of its keys and accepts those of any; without keys signs none and accepts all.

    >>> seals = Seals([b"new" * 20, b"old" * 20])
    >>> row = {"graph_key": "g", "solver": "1", "least_bytes": 3, "enough_bytes": None}
    >>> earlier = Seals([b"old" * 20]).sealed("floors", row)
    >>> seals.holds("floors", earlier), seals.holds("floors", earlier | {"least_bytes": 4})
    (True, False)
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = tuple(keys)

    def sealed(self, table: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row with its seal; columns that are not given are null."""
        return {**row, "seal": self.seal(signed_text(table, row)) if self._keys else None}

    def seal(self, text: str) -> str | None:
        """The seal of a row with this `signed_text`."""
        return _seal(self._keys[0], text) if self._keys else None

    def of_keys(self) -> list[str]:
        """A seal by each of the keys on one and the same text: equal keys have equal ones."""
        return [_seal(key, _OF_KEY) for key in self._keys]

    def holds(self, table: str, row: Mapping[str, Any]) -> bool:
        """Whether a row is what was sealed."""
        if not self._keys:
            return True
        seal = row.get("seal")
        if not isinstance(seal, str):
            return False
        text = signed_text(table, row)
        return any(hmac.compare_digest(seal.encode(), _seal(key, text).encode()) for key in self._keys)


def signed_text(table: str, row: Mapping[str, Any]) -> str:
    """What a row's seal is made of: its table and the columns of `SEALED`, as JSON."""
    signed = [table, *(row.get(name) for name in SEALED[table])]
    return json.dumps(signed, sort_keys=True, separators=(",", ":"), default=repr)


def _seal(key: bytes, text: str) -> str:
    return hmac.digest(key, text.encode(), hashlib.sha256).hex()


def seals_of(settings: Settings) -> Seals:
    """The seals of a database, by the keys of the settings.

    Raises:
        ServiceError: a key that is too short, or none at all for a database that several processes share.
    """
    given = settings.seal_key.get_secret_value().split(",") if settings.seal_key is not None else []
    keys = [key.strip().encode() for key in given if key.strip()]
    if any(len(key) < _SHORTEST for key in keys):
        raise ServiceError(f"each key in REMAT_SEAL_KEY needs {_SHORTEST} characters or more: `openssl rand -hex 32`")
    if not keys and isinstance(driver_url(settings.database_url.get_secret_value()), str):
        raise ServiceError(
            "a PostgreSQL database needs REMAT_SEAL_KEY, the same for all servers and workers, kept apart from the "
            "database: `openssl rand -hex 32` makes one"
        )
    return Seals(keys)


async def check_key(connection: AsyncConnection, seals: Seals) -> None:
    """Refuse keys of which none is the one that the store is sealed with now.

    Raises:
        ServiceError: they are of another store, or of another time.
    """
    ours = seals.of_keys()
    signing = set(await connection.scalars(select(seal_keys.c.seal).where(seal_keys.c.signs)))
    if signing and not signing & set(ours):
        raise ServiceError(_WRONG if ours else _NONE)


async def take_key(database: Database, connection: AsyncConnection, seals: Seals) -> None:
    """Note the keys that a process starts with, once they are checked: the first one signs from here on.

    Raises:
        ServiceError: as `check_key`; or it would sign before the other processes know its key.
    """
    await connection.run_sync(migrations.lock)
    await check_key(connection, seals)
    known = set((await connection.execute(select(seal_keys.c.seal))).scalars())
    ours = seals.of_keys()
    if known and ours[0] not in known and not database.is_sqlite:
        raise ServiceError(_ORDER)
    await _note(database, connection, ours)


async def adopt_key(database: Database, connection: AsyncConnection, seals: Seals) -> None:
    """Make these keys the store's, whatever it was sealed with; without one, it is sealed no longer."""
    await connection.execute(delete(seal_keys))
    await _note(database, connection, seals.of_keys())


async def _note(database: Database, connection: AsyncConnection, ours: list[str]) -> None:
    if not ours:
        return
    rows = [{"seal": one, "signs": False, "at": database.clock.now()} for one in ours]
    await connection.execute(database.insert(seal_keys).values(rows).on_conflict_do_nothing())
    await connection.execute(update(seal_keys).values(signs=seal_keys.c.seal == ours[0]))


WHOLE = ""
"""`restricted_to` of a bound that holds for every plan."""


class Claim(NamedTuple):
    """A row of `bounds`: a bound without a certificate, in its space, and who says it."""

    budget_bytes: int
    method_key: str
    restricted_to: str
    bound_ns: int
    source: str | None
    seal: str | None


class Floor(NamedTuple):
    """A row of `floors`: what is claimed to be necessary, 0 for nothing, and what is known to suffice."""

    least_bytes: int
    enough_bytes: int | None
    seal: str | None


class Effort(NamedTuple):
    """A row of `efforts`: what was last done about one problem by one method."""

    seconds: float
    settled: bool
    status: str
    limit: str | None
    restricted_to: str
    message: str
    seal: str | None = None


def names(restricted_to: str) -> tuple[str, ...]:
    """Restrictions as a tuple, from a column."""
    return tuple(restricted_to.split(",")) if restricted_to else ()


def column(restricted_to: Sequence[str]) -> str:
    """Restrictions as a column."""
    return ",".join(restricted_to)
