"""Seals: what the store says and nobody can prove anew carries an HMAC by a key that is not in the database.

Plans and certificates need none: they are checked on the problem itself. Everything else that is believed (what engines
claim, floors, efforts, what a running solve has told, ended answers, profiles) is signed column by column. A row whose
seal does not hold counts as not there.

A key is given from elsewhere, or there is none: one next to the database would be read, and used, by whoever writes to
the database. Without a key, which only SQLite may be, rows are believed as they are.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ServiceError
from ..settings import Settings, driver_url

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
        return {**row, "seal": self.seal(signed_text(table, row))}

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


def seals_at_hand(settings: Settings) -> Seals | None:
    """The seals of a database for a command that looks at it, None where their key is not here.

    Raises:
        ServiceError: as `seals_of`.
    """
    return None if settings.seal_key is None else seals_of(settings)


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
