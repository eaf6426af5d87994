"""A small real HTTP server that answers as a test tells it to: late, wrongly, in halves, or not at all."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


@dataclass
class Asked:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Said:
    """One reply to give; `raw` goes out as it is, `cut` promises more bytes than come."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    cut: bool = False
    hang: bool = False
    drop: bool = False


Script = Callable[[Asked], Said]


@dataclass
class Liar:
    """The running server: its URL and what it was asked."""

    url: str
    asked: list[Asked]


@contextmanager
def lying(script: Script) -> Iterator[Liar]:
    """Serve on a free port until the block ends."""
    asked: list[Asked] = []
    release = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _reply(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            raw = self.rfile.read(length)
            if self.headers.get("Content-Encoding") == "zstd":
                raw = zstd.decompress(raw)
            headers = {key.lower(): value for key, value in self.headers.items()}
            request = Asked(self.command, self.path, headers, json.loads(raw) if raw else None)
            asked.append(request)
            said = script(request)
            if said.drop:
                self.close_connection = True
                return
            if said.hang:
                release.wait(30)
                self.close_connection = True
                return
            content = said.raw if said.raw is not None else json.dumps(said.body).encode()
            self.send_response(said.status)
            for key, value in said.headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content) + (100 if said.cut else 0)))
            self.end_headers()
            self.wfile.write(content)
            self.close_connection = self.close_connection or said.cut

        do_GET = do_POST = _reply

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield Liar(f"http://127.0.0.1:{server.server_address[1]}", asked)
    finally:
        release.set()
        server.shutdown()
        server.server_close()
        thread.join()


def in_turn(*replies: Said) -> Script:
    """One reply after the other, the last one for ever."""
    rest = list(replies)

    def script(_: Asked) -> Said:
        return rest.pop(0) if len(rest) > 1 else rest[0]

    return script
