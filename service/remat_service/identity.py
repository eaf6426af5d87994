"""Whose request it is."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

ALL_SCOPES = ("solve", "read")


@dataclass(frozen=True)
class Caller:
    """Who asks: a tenant, the scope whose salt keys its entries, what it may do, and the group that it shares with."""

    tenant_id: str
    scope_id: str
    salt: bytes
    epoch: int
    allowed: tuple[str, ...] = ALL_SCOPES
    tenant: str = ""
    group: str | None = None

    def key(self, digest: str) -> str:
        """A digest as this caller's scope stores it."""
        text = f"{self.epoch}:{digest}".encode()
        return hmac.new(self.salt, text, hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class Retry:
    """What makes a repeated POST the same one: the client's key, and the hash of the body it came with."""

    key: str
    body_hash: str
