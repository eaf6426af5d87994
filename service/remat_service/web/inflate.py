"""Content encodings, undone a step at a time: no step makes more than `STEP_BYTES`."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from remat_ir import readable

from ..errors import BadRequest, TooLarge, Unsupported

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

STEP_BYTES = 65_536
_WINDOW_LOG = 23  # 8 MiB: what level 19 uses; a frame may ask its reader for far more


class Inflater:
    """One body's encoding: none, gzip or zstd.

    Raises:
        Unsupported: another encoding, or more than one.
    """

    def __init__(self, encodings: Sequence[bytes], most_bytes: int) -> None:
        names = [name.strip().lower() for value in encodings for name in value.decode("latin-1").split(",")]
        if len(names) > 1 or (names and names[0] not in ("identity", "gzip", "zstd")):
            raise Unsupported("Content-Encoding must be gzip or zstd, once")
        self.name = names[0] if names else "identity"
        self._most, self._made = most_bytes, 0
        self._decoder: Any = None
        if self.name == "gzip":
            self._decoder = zlib.decompressobj(wbits=31)
        elif self.name == "zstd":
            self._decoder = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})

    def feed(self, wire: bytes) -> Iterator[bytes]:
        """The plain bytes of the next piece of the wire.

        Raises:
            TooLarge: more than `most_bytes` in all.
            BadRequest: damaged, or followed by something else.
        """
        for start in range(0, len(wire), STEP_BYTES):
            yield from self._inflated(wire[start : start + STEP_BYTES])

    def _inflated(self, wire: bytes) -> Iterator[bytes]:
        if self._decoder is None:
            yield self._counted(wire)
            return
        plain = b"more"
        while wire or plain:
            if wire and self._decoder.eof:
                raise BadRequest(f"the body's {self.name} data is followed by something else")
            try:
                plain = b"" if self._decoder.eof else self._decoder.decompress(wire, STEP_BYTES)
            except (zlib.error, zstd.ZstdError) as error:
                raise BadRequest(f"the body is not {self.name}: {error}") from None
            wire = self._decoder.unconsumed_tail if self.name == "gzip" else b""
            if self._decoder.unused_data:
                raise BadRequest(f"the body's {self.name} data is followed by something else")
            if plain:
                yield self._counted(plain)

    def _counted(self, plain: bytes) -> bytes:
        self._made += len(plain)
        if self._made > self._most:
            raise TooLarge(f"the body is larger than the {readable(self._most)} allowed")
        return plain

    def finish(self) -> None:
        """The wire has ended.

        Raises:
            BadRequest: the data has not.
        """
        if self._decoder is not None and not self._decoder.eof:
            raise BadRequest(f"the body's {self.name} data is truncated")
