"""A line to the service for one call at a time, which can be cut: a deadline holds whatever the server is sending.

A timeout of a read starts anew with every byte, so a server that sends a header now and then holds its caller for ever.
Cutting the line shuts its sockets, and the read that waits on one ends at once.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

_CONNECTED = frozenset(("connection.connect_tcp.complete", "connection.start_tls.complete"))


class Line:
    """A client of its own, with the sockets that it has opened."""

    def __init__(self, client: httpx2.Client) -> None:
        self.client = client
        self.cut = False
        self._sockets: list[socket.socket] = []

    def trace(self, event: str, info: dict[str, Any]) -> None:
        """httpx's own report of what it does: new sockets are noted."""
        if event in _CONNECTED:
            found = info["return_value"].get_extra_info("socket")
            if isinstance(found, socket.socket):
                self._sockets = [*(each for each in self._sockets if each.fileno() != -1), found]

    def shut(self) -> None:
        """End what is under way."""
        self.cut = True
        for each in self._sockets:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(each, socket.SHUT_RDWR)  # not TLS's own, which would wait for its peer


class Lines:
    """Lines that are free, kept for the next call."""

    def __init__(self, make: Callable[[], httpx2.Client]) -> None:
        self._make = make
        self._free: list[Line] = []

    @contextmanager
    def until(self, moment: float) -> Iterator[Line]:
        """A line that is cut at a moment of `time.monotonic()`."""
        line = self._free.pop() if self._free else Line(self._make())
        timer = threading.Timer(max(0.0, moment - time.monotonic()), line.shut)
        timer.daemon = True
        timer.start()
        try:
            yield line
        finally:
            timer.cancel()
            if line.cut:
                line.client.close()
            else:
                self._free.append(line)

    def close(self) -> None:
        """Close the connections of every free line."""
        while self._free:
            self._free.pop().client.close()
