"""One logical call: how often it is made, what it carries, what becomes of each kind of reply, and when it ends."""

from __future__ import annotations

import gzip
import multiprocessing
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from client.liar import Said, in_turn, lying
from remat.errors import InvalidResponse, NotAllowed, NotFound, RateLimited, Refused, ServiceFailed, Unreachable
from remat.planning.http import Body, Http, Timeouts, Unusable
from remat.settings import Settings, settings
from remat_ir import InvalidData

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


class Clock:
    """Counts the pauses without taking them."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.pauses.append(seconds)


def http(url: str, **more: Any) -> Http:
    more.setdefault("sleep", Clock())
    more.setdefault("timeouts", Timeouts(connect=1.0, read=0.5, write=1.0))
    return Http(url, **more)


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_three_times_with_one_key(status: int) -> None:
    clock = Clock()
    with lying(in_turn(Said(status), Said(status), Said(200, {"a": 1}))) as server:
        reply = http(server.url, sleep=clock).call("POST", "/v1/solves", body={"x": 1})
    assert reply.data == {"a": 1}
    assert 0 <= clock.pauses[0] <= 0.5
    assert 0 <= clock.pauses[1] <= 1
    assert len(clock.pauses) == 2
    assert len({request.headers["idempotency-key"] for request in server.asked}) == 1
    assert [request.body for request in server.asked] == [{"x": 1}] * 3


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, Refused), (401, NotAllowed), (403, NotAllowed), (404, NotFound), (413, Refused), (422, Refused)],
)
def test_what_cannot_pass_is_tried_once(status: int, kind: type[Refused]) -> None:
    body = {"title": "no", "detail": "op 3: cost_ns must not be negative", "pointer": "/problem/graph/op_cost_ns/3"}
    with lying(in_turn(Said(status, body, {"X-Request-ID": "r-17"}))) as server, pytest.raises(kind) as caught:
        http(server.url).call("POST", "/v1/solves")
    assert len(server.asked) == 1
    assert "op 3: cost_ns must not be negative" in str(caught.value)
    assert "r-17" in str(caught.value)
    assert (caught.value.status, caught.value.request_id) == (status, "r-17")
    assert ("Set REMAT_API_KEY" in str(caught.value)) == (status == 401)


def test_the_last_failure_is_the_one_told() -> None:
    script = in_turn(Said(500), Said(500), Said(503, {"detail": "down"}))
    with lying(script) as server, pytest.raises(ServiceFailed, match="503: down"):
        http(server.url).call("GET", "/x")
    assert len(server.asked) == 3


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_a_floor_for_the_pause(status: int) -> None:
    clock = Clock()
    with lying(in_turn(Said(status, headers={"Retry-After": "7"}), Said(200, {}))) as server:
        http(server.url, sleep=clock).call("GET", "/x")
    assert len(clock.pauses) == 1
    assert 7 <= clock.pauses[0] <= 7.5


def test_retry_after_may_be_a_date() -> None:
    clock = Clock()
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 20))
    with lying(in_turn(Said(429, headers={"Retry-After": date}), Said(200, {}))) as server:
        http(server.url, sleep=clock).call("GET", "/x")
    assert 15 < clock.pauses[0] <= 20.5


@pytest.mark.parametrize("text", ["soon", "\xb2", "Mon, 01 Jan 99999999999999999999 00:00:00 GMT"])
def test_a_retry_after_of_no_use_is_none(text: str) -> None:
    with lying(in_turn(Said(429, headers={"Retry-After": text}))) as server, pytest.raises(RateLimited) as caught:
        http(server.url).call("GET", "/x")
    assert caught.value.retry_after_s is None


def test_a_retry_after_of_an_hour_is_not_slept_through() -> None:
    clock = Clock()
    with lying(in_turn(Said(429, headers={"Retry-After": "3600"}))) as server, pytest.raises(RateLimited) as caught:
        http(server.url, sleep=clock).call("GET", "/x")
    assert caught.value.retry_after_s == 3600
    assert clock.pauses == []


def test_no_retry_starts_after_the_moment_to_give_up() -> None:
    clock = Clock()
    with lying(in_turn(Said(503, headers={"Retry-After": "30"}))) as server, pytest.raises(ServiceFailed):
        http(server.url, sleep=clock).call("GET", "/x", give_up_at=time.monotonic() + 5)
    assert len(server.asked) == 1


def test_jitter_is_full() -> None:
    """Forty first pauses: none is beyond half a second, and they are spread over all of it."""
    clock = Clock()
    with lying(in_turn(*(Said(500 if n % 2 == 0 else 200, {}) for n in range(80)))) as server:
        client = http(server.url, sleep=clock)
        for _ in range(40):
            client.call("GET", "/x")
    assert len(clock.pauses) == 40
    assert 0 <= min(clock.pauses) < 0.2
    assert 0.3 < max(clock.pauses) <= 0.5


def test_a_server_that_is_not_there() -> None:
    with lying(in_turn(Said(200, {}))) as server:
        pass
    clock = Clock()
    with pytest.raises(Unreachable, match=re.escape(server.url)):
        http(server.url, sleep=clock).call("GET", "/x")
    assert len(clock.pauses) == 2


@pytest.mark.parametrize("said", [Said(hang=True), Said(drop=True), Said(200, {"a": 1}, cut=True)])
def test_a_stall_a_hang_up_and_a_body_cut_off_are_tried_again(said: Said) -> None:
    with lying(in_turn(said, Said(200, {"a": 2}))) as server:
        assert http(server.url).call("GET", "/x").data == {"a": 2}
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    "said",
    [
        Said(200, raw=b"<html>hello</html>"),
        Said(200, raw=b'{"a": NaN}'),
        Said(200, raw=b"\xff\xfe"),
        Said(200, raw=b'{"a": 1', headers={}),
        Said(200, raw=b"not zstd", headers={"Content-Encoding": "zstd"}),
        Said(200, raw=gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"}),
        Said(200, raw=zstd.compress(b"{}")[:-1], headers={"Content-Encoding": "zstd"}),
        Said(200, raw=zstd.compress(b"{}") + b"tail", headers={"Content-Encoding": "zstd"}),
        Said(200, raw=b"{}", headers={"Content-Encoding": "br"}),
        Said(302, {}, {"Location": "http://example.com/"}),
    ],
)
def test_nonsense_is_a_bad_answer_and_is_not_asked_for_again(said: Said) -> None:
    with lying(in_turn(said)) as server, pytest.raises(InvalidResponse):
        http(server.url).call("GET", "/x")
    assert len(server.asked) == 1


@pytest.mark.parametrize("how", ["zstd", ""])
def test_a_compressed_reply_is_read(how: str) -> None:
    text = b'{"a": [1, 2, 3]}'
    raw = zstd.compress(text) if how else text
    with lying(in_turn(Said(200, raw=raw, headers={"Content-Encoding": how} if how else {}))) as server:
        assert http(server.url).call("GET", "/x").data == {"a": [1, 2, 3]}
    assert server.asked[0].headers["accept-encoding"] == "zstd"


def test_a_body_beyond_the_bound_is_refused() -> None:
    body = Body("zstd", most=10)
    body.add(b"12345")
    body.add(b"67890")
    assert body.whole() == b"1234567890"
    with pytest.raises(Unusable, match="larger than 10 B"):
        body.add(b"1")


def _ask_in_a_child(client: Http) -> None:
    reply = client.call("GET", "/x")
    os._exit(0 if reply.data == {"a": 1} else 1)


def test_a_process_that_is_forked_asks_over_connections_of_its_own() -> None:
    with lying(in_turn(*(Said(200, {"a": 1}) for _ in range(3)))) as server:
        client = http(server.url)
        assert client.call("GET", "/x").data == {"a": 1}
        child = multiprocessing.get_context("fork").Process(target=_ask_in_a_child, args=(client,))
        child.start()
        child.join(20)
        assert child.exitcode == 0
        assert client.call("GET", "/x").data == {"a": 1}


def test_an_interrupt_ends_a_call_at_once() -> None:
    """As Ctrl-C does it: the thread that waits is left, and the request is not. Else the limit of each test ends it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a trainer in this process may have set another
    try:
        with lying(in_turn(Said(hang=True))) as server:
            client = http(server.url, timeouts=Timeouts(read=600.0))
            timer = threading.Timer(0.5, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                client.call("GET", "/x")
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_a_call_carries() -> None:
    """A key of its own, a large body compressed and a small one as it is, and the API key, which is never shown."""
    with lying(in_turn(Said(200, {}))) as server:
        client = http(server.url, api_key="secret-1")
        client.call("POST", "/x", body={"a": [7] * 10_000})
        client.call("POST", "/x", body={"a": 7})
    assert len({request.headers["idempotency-key"] for request in server.asked}) == 2
    assert server.asked[0].headers["content-encoding"] == "zstd"
    assert int(server.asked[0].headers["content-length"]) < 1_000
    assert server.asked[0].body == {"a": [7] * 10_000}
    assert "content-encoding" not in server.asked[1].headers
    assert server.asked[0].headers["authorization"] == "Bearer secret-1"
    assert "secret-1" not in repr(client)
    assert "secret-1" not in repr(settings(api_key="secret-1", environ={}))


@pytest.mark.parametrize("key", ["secret-1\n", " secret-1 \r\n"])
def test_a_key_is_sent_without_the_end_of_its_line(key: str) -> None:
    """As a mounted secret or a file has it."""
    with lying(in_turn(Said(200, {}))) as server:
        http(server.url, api_key=settings(environ={"REMAT_API_KEY": key}).api_key).call("GET", "/x")
        http(server.url, api_key=key).call("GET", "/x")
    assert [request.headers["authorization"] for request in server.asked] == ["Bearer secret-1"] * 2
    assert settings(environ={"REMAT_API_KEY": "\n"}).api_key is None


@pytest.mark.parametrize("key", ["secret-1\nsecret-2", "secret-1\x00", "secret-ß"])
def test_a_key_that_no_header_can_have_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(InvalidData, match="REMAT_API_KEY must be printable") as caught:
        settings(environ={"REMAT_API_KEY": key})
    assert "secret" not in str(caught.value)
    with pytest.raises(InvalidData, match="REMAT_API_KEY must be printable"):
        http("http://127.0.0.1:9", api_key=key).call("GET", "/x")


def test_arguments_stand_over_the_environment() -> None:
    env = {"REMAT_BASE_URL": "http://a:1/", "REMAT_CACHE_DIR": "/c", "REMAT_OFFLINE": "1", "REMAT_API_KEY": "k"}
    found = settings(environ=env)
    assert (found.base_url, str(found.cache_dir), found.api_key) == ("http://a:1", "/c", "k")
    assert found.service_url is None
    over = settings(base_url="https://b", offline=False, cache_dir="/d", api_key="j", environ=env)
    assert (over.service_url, str(over.cache_dir), over.api_key) == ("https://b", "/d", "j")
    assert isinstance(settings(environ={}), Settings)


def test_a_url_may_end_its_line() -> None:
    """As a file of settings or a mounted one has it."""
    assert settings(environ={"REMAT_BASE_URL": "http://a:1/\n"}).base_url == "http://a:1"
    assert settings(base_url=" https://b ", environ={}).base_url == "https://b"


@pytest.mark.parametrize(
    "url",
    ["ftp://a", "localhost:80", "http://", "http://a:99999", "not a url", "http://a\nb", "http://a b", "http://a/\x7f"],
)
def test_a_url_of_no_use_is_refused(url: str) -> None:
    with pytest.raises(InvalidData, match="URL"):
        settings(base_url=url, environ={})


def test_a_folder_of_a_user_without_a_home_is_refused() -> None:
    """As where a container runs under a number that no user has."""
    with pytest.raises(InvalidData, match="set REMAT_CACHE_DIR"):
        settings(environ={"REMAT_CACHE_DIR": "~nobody-of-this-name/cache"})


def test_an_offline_that_is_neither_yes_nor_no_is_refused() -> None:
    with pytest.raises(InvalidData, match="REMAT_OFFLINE"):
        settings(environ={"REMAT_OFFLINE": "perhaps"})


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
