"""How graphs and plans lie in the store: compact JSON, zstd, and a checksum."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MOST_BYTES = 1 << 30
"""No stored object inflates to more than this."""


def pack(data: Any) -> bytes:
    """JSON data as compressed bytes, the same for the same data."""
    packed: bytes = zstd.compress(written(data), level=3)
    return packed


def written(data: Any) -> bytes:
    """JSON data as the text that is packed."""
    return json.dumps(data, separators=(",", ":"), sort_keys=True).encode()


def unpack(packed: bytes) -> Any:
    """What was packed.

    Raises:
        ValueError: the bytes are damaged, or inflate to more than a stored object may.
    """
    return json.loads(inflated(packed))


def inflated(packed: bytes) -> bytes:
    """The JSON text of what was packed.

    Raises:
        ValueError: as `unpack`.
    """
    inflater = zstd.ZstdDecompressor()
    try:
        text: bytes = inflater.decompress(packed, MOST_BYTES)
    except zstd.ZstdError as error:
        raise ValueError(f"damaged: {error}") from None
    if not inflater.eof or inflater.unused_data:
        raise ValueError("damaged: truncated, or too long")
    return text


def checksum(packed: bytes) -> str:
    """SHA-256 of packed bytes."""
    return hashlib.sha256(packed).hexdigest()
