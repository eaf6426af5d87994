"""Whose request it is."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

ASKING = ("solve", "read")
"""What a key, or a token, may do unless it is said otherwise."""
OPERATE = "operate"
"""To see and change what belongs to all tenants."""
ALL_SCOPES = (*ASKING, OPERATE)


@dataclass(frozen=True)
class Caller:
    """Who asks: a tenant, the scope whose salt keys its entries, what it may do, and the group that it shares with.

    Attributes:
        key_id: of the API key, empty where there is none.
    """

    tenant_id: str
    scope_id: str
    salt: bytes
    epoch: int
    allowed: tuple[str, ...] = ASKING
    tenant: str = ""
    group: str | None = None
    key_id: str = ""

    def key(self, digest: str) -> str:
        """A digest as this caller's scope stores it."""
        text = f"{self.epoch}:{digest}".encode()
        return hmac.new(self.salt, text, hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class Retry:
    """What makes a repeated POST the same one: the client's key, and the hash of the body it came with."""

    key: str
    body_hash: str
