"""A deadline holds whatever the server sends; a small reply that would become large is refused."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from backports import zstd

from remat.errors import InvalidResponse, Unreachable
from remat.planning.http import Http, Timeouts


@contextmanager
def _server(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that reads a request and then does as told, once a connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                link, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=_talk, args=(link,), daemon=True).start()

    def _talk(link: socket.socket) -> None:
        try:
            while link.recv(65_536):
                talk(link)
        except OSError:
            link.close()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _headers_for_ever(link: socket.socket) -> None:
    link.sendall(b"HTTP/1.1 200 OK\r\n")
    for i in range(200):
        link.sendall(b"X-%d: a\r\n" % i)
        time.sleep(0.1)


def _body_for_ever(link: socket.socket) -> None:
    link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    for _ in range(200):
        link.sendall(b" ")
        time.sleep(0.1)


def _nothing(link: socket.socket) -> None:
    time.sleep(20)


@pytest.mark.parametrize("talk", [_headers_for_ever, _body_for_ever, _nothing])
def test_a_call_ends_in_time(talk: Callable[[socket.socket], None]) -> None:
    """Headers or a body that come for ever, or nothing at all: the call ends before the server does, and says so."""
    all_said = threading.Event()

    def talked(link: socket.socket) -> None:
        talk(link)
        all_said.set()

    with _server(talked) as url:
        http = Http(url, timeouts=Timeouts(1.0, 1.0, 1.0), retries=0)
        with pytest.raises(Unreachable, match="in time"):
            http.call("GET", "/v1/capabilities", give_up_at=time.monotonic() + 1.5)
        assert not all_said.is_set()


def test_a_line_is_used_again_after_an_answer_and_not_after_a_cut() -> None:
    """Three calls over one connection; after a call that was cut, the next one has another."""
    links: list[socket.socket] = []
    late = threading.Event()

    def talk(link: socket.socket) -> None:
        links.append(link)
        if late.is_set():
            late.clear()
            _headers_for_ever(link)
        link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    with _server(talk) as url:
        http = Http(url, timeouts=Timeouts(1.0, 1.0, 1.0), retries=0)
        for _ in range(3):
            assert http.call("GET", "/x").data == {}
        assert len(set(links)) == 1
        late.set()
        with pytest.raises(Unreachable):
            http.call("GET", "/x", give_up_at=time.monotonic() + 0.5)
        assert http.call("GET", "/x").data == {}
        assert len(set(links)) == 2


def test_a_reply_of_many_small_things_is_refused_in_little_memory() -> None:
    """12 kB that inflate to 43 million arrays: refused as an answer of no use, and nothing is built from it."""
    body = zstd.compress(b"[" + b"[]," * (43 << 20) + b"[]]")
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: zstd\r\nContent-Length: %d\r\n\r\n" % len(body)
    with _server(lambda link: link.sendall(head + body)) as url:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(InvalidResponse, match="more than"):
            Http(url).call("GET", "/v1/capabilities")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
