"""What strangers send: small bodies that would become large, slow heads and bodies, too many connections."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from remat_service.errors import RateLimited, TooLarge
from remat_service.requests.parse import MOST_READING_BYTES, Body, from_body, read_ask
from remat_service.settings import Settings
from remat_service.web.authentication import Admission
from service.serving import Service, eventually, example, open_problem, peak_bytes, served, serving
from service.test_tenants import Tenant, cli

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

JSON = {"Content-Type": "application/json", "Content-Encoding": "zstd"}


strict = served(workers=1, require_keys="true", head_timeout_s=1.5, body_timeout_s=1.5, most_connections_per_address=30)
"""A service that needs keys and has little patience."""


@pytest.fixture(scope="module")
def known(strict: Service) -> Tenant:
    """Somebody with a key."""
    return Tenant(strict, cli(strict, "keys", "create", "anna", "--new-tenant"))


def _bombs(size: int) -> Iterator[tuple[str, bytes]]:
    yield "empty arrays", b'{"problem":[' + b"[]," * (size // 3) + b"[]]}"
    yield "empty objects", b'{"problem":{"budget_bytes":1,"graph":{"op_inputs":[' + b"{}," * (size // 3) + b"{}]}}}"
    yield "integers", b'{"problem":{"budget_bytes":1,"graph":{"op_cost_ns":[' + b"9," * (size // 2) + b"9]}}}"
    yield "one-key objects", b"[" + b'{"a":1},' * (size // 8) + b"1]"
    yield "deep", b"[" * (size // 2) + b"]" * (size // 2)
    yield "strings", b"[" + b'"",' * (size // 3) + b'""]'
    yield "one long string", b'["' + b"a" * size + b'"]'
    yield "escaped quotes", b'["' + b'\\"' * (size // 2) + b'"]'
    yield "spaces", b" " * size


class _Pulse(threading.Thread):
    """Asks /livez all the time, and counts the answers."""

    def __init__(self, service: Service) -> None:
        super().__init__(daemon=True)
        self._service, self.answers, self.on = service, 0, True
        self.start()

    def run(self) -> None:
        while self.on:
            self._service.http.get("/livez")
            self.answers += 1
            time.sleep(0.02)


@pytest.mark.thorough
def test_bombs_of_small_things_are_refused_in_little_memory(service: Service) -> None:
    """128 MiB of small things behind zstd: a 4xx, below 64 MB more than before, and the server answers meanwhile."""
    service.http.post("/v1/solves", content=zstd.compress(b"[1]"), headers=JSON)
    before = peak_bytes(service)
    pulse, meanwhile = _Pulse(service), 0
    for name, body in _bombs(128 << 20):
        packed = zstd.compress(body)
        answers = pulse.answers
        reply = service.http.post("/v1/solves", content=packed, headers=JSON)
        meanwhile += pulse.answers - answers  # none while a refusal that takes no time
        assert reply.status_code in (400, 413, 422), (name, reply.text)
        assert peak_bytes(service) - before < 64 << 20, (name, peak_bytes(service) - before)
    pulse.on = False
    pulse.join()
    assert meanwhile > 5


def _refused_late() -> Iterator[tuple[str, bytes]]:
    """Large bodies within every cap, wrong at their very end."""
    ops, rows = 100_000, 20
    graph: dict[str, Any] = {
        "format": "remat-graph/1",
        "op_cost_ns": [10**6] * ops,
        "op_workspace_bytes": [10**6] * ops,
        "op_inputs": [list(range(max(0, op - rows), op)) for op in range(ops)],
        "value_op": list(range(ops)),
        "value_bytes": [10**6] * ops,
        "once": list(range(ops)),
    }
    problem = {"graph": graph, "budget_bytes": 10**12}

    def body(**more: Any) -> bytes:
        return json.dumps({"problem": problem, **more}).encode()

    yield "no end", body()[:-1]
    yield "another member", body(unknown=1)
    yield "an unknown method", body(method="none")
    yield "too large a model", body(method="milp")
    graph["keep"] = [ops]
    yield "no such value", body()
    graph["keep"] = [1, 0]
    yield "not ascending", body()
    graph["keep"] = [*range(10_000), 0.5]
    yield "a fraction", body()
    graph["keep"] = []
    graph["op_inputs"][-1] = [0, 0]
    yield "twice", body()
    graph["op_inputs"][-1] = [ops - 1]
    yield "a cycle", body()
    graph["op_inputs"][-1] = list(range(100_001)) * 4
    yield "a long row", body()
    signatures = {f"s{i:06}": [1, 2] for i in range(100_000)}
    yield "another kind of body", json.dumps({"device": "x", "profiles": signatures}).encode()


@pytest.mark.thorough
def test_large_bodies_refused_late_take_little_memory(tmp_path: Path) -> None:
    """A 4xx, below 64 MB more than before."""
    with serving(tmp_path, workers=1) as service:
        small = json.dumps({"problem": 1}).encode()
        service.http.post("/v1/solves", content=zstd.compress(small + b" " * 10**6), headers=JSON)
        before = peak_bytes(service)
        for name, body in _refused_late():
            reply = service.http.post("/v1/solves", content=zstd.compress(body), headers=JSON)
            assert reply.status_code in (400, 413, 422), (name, reply.text)
            assert peak_bytes(service) - before < 64 << 20, (name, len(body), peak_bytes(service) - before)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[" * 300_000, "arrays"),
        (b'{"a":[' + b"[]," * 300_000 + b"[]]}", "arrays"),
        (b"[" + b'"[[",' * 100_000 + b"[]," * 300_000 + b"1]", "arrays"),
        (b"[" + b'"",' * 1_000_000 + b'""]', "strings"),
        (b'["' + b'\\"' * 10_000_000 + b'"]', "strings"),
        (b"[" + b'[9,"a"],' * 190_000 + b"1.5]", "allowed"),
        (b'["' + b"[[[[" * 5_000_000 + b'"]', "allowed"),
    ],
)
async def test_what_would_take_much_is_refused_before_it_is_built(text: bytes, said: str) -> None:
    """However the text hides what it is; what is inside of strings counts as text."""
    held: list[int] = []
    with pytest.raises(TooLarge, match=said):
        await from_body(Body(bytearray(text), held.append, b""), read_ask, Settings())
    assert 0 < held[0] <= MOST_READING_BYTES


def test_the_key_is_looked_at_before_the_body(strict: Service) -> None:
    """Without a key, or on no route: refused while the body has not even been sent."""
    for path, status in (("/v1/solves", 401), ("/v1/sweeps", 401), ("/v1/profiles", 401), ("/nope", 404)):
        assert _answer(strict, _post(path, 9999) + b"{").startswith(b"HTTP/1.1 %d " % status)


def _post(path: str, length: int, *more: str) -> bytes:
    """The head of a POST of so many bytes."""
    lines = f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {length}"
    return "\r\n".join([*lines, *more, "", ""]).encode()


def _answer(service: Service, data: bytes, seconds: float = 5.0) -> bytes:
    with socket.create_connection(("127.0.0.1", service.port), timeout=seconds) as link:
        link.sendall(data)
        return link.recv(65_536)


@pytest.mark.thorough
def test_slow_heads_and_bodies_are_ended(strict: Service, known: Tenant) -> None:
    """A head that never ends is closed; a body that never ends is a 408; one that comes after the answer is cut."""
    key = known.http.headers["authorization"]
    assert 5 < _drip(strict, b"GET /livez HTTP/1.1\r\n", 200) < 200
    # answered at once, and the body goes on coming
    assert 5 < _drip(strict, _post("/nope", 9999), 400) < 400
    head = _post("/v1/solves", 9999, f"Authorization: {key}")
    assert _answer(strict, head + b"{", 10).startswith(b"HTTP/1.1 408 ")


def _drip(service: Service, head: bytes, most: int) -> int:
    """Send lines, five a second, until the service cuts the connection: how many it took."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as link:
        link.sendall(head)
        for sent in range(most):
            try:
                link.sendall(b"X-A: b\r\n")
            except OSError:
                return sent
            time.sleep(0.2)
    return most


@pytest.mark.thorough
def test_busy_connections_are_kept(strict: Service, known: Tenant) -> None:
    """One connection with a request now and then outlives the time that a head may take."""
    begun = time.monotonic()
    while time.monotonic() - begun < 4:
        assert known.http.get("/livez").status_code == 200
        time.sleep(0.3)


@pytest.mark.thorough
def test_too_many_connections_make_room_for_others(strict: Service) -> None:
    """Sixty half requests from one address where thirty may be: the oldest go, and an honest caller gets through."""
    links = []
    for _ in range(60):
        link = socket.create_connection(("127.0.0.1", strict.port), timeout=5)
        link.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n")
        links.append(link)
    process = psutil.Process(strict.process.pid)
    eventually(lambda: sum(c.status == "ESTABLISHED" for c in process.net_connections("tcp")) <= 30)
    assert strict.http.get("/livez").status_code == 200
    eventually(lambda: sum(c.status == "ESTABLISHED" for c in process.net_connections("tcp")) <= 3, 10)
    for link in links:
        link.close()


@pytest.mark.thorough
def test_memory_for_bodies_is_one_budget(tmp_path: Path) -> None:
    """Half-sent bodies hold what there is: another large one is told to come back, a small one is read."""
    with serving(tmp_path, workers=1, most_bodies_bytes=2**20, body_timeout_s=3) as own:
        links = []
        for _ in range(3):
            link = socket.create_connection(("127.0.0.1", own.port), timeout=5)
            link.sendall(_post("/v1/solves", 900_000) + b" " * 150_000)
            links.append(link)
        time.sleep(0.5)
        plain = {"Content-Type": "application/json"}
        assert own.http.post("/v1/solves", content=b" " * 400_000, headers=plain).status_code == 503
        assert own.http.post("/v1/solves", json=example("solve")).status_code in (200, 202)
        for link in links:
            link.close()
        eventually(lambda: own.http.post("/v1/solves", content=b" " * 400_000, headers=plain).status_code == 400)


@pytest.mark.thorough
def test_requests_of_one_tenant_are_limited(tmp_path: Path) -> None:
    """Two waits of one tenant under way where two may be: a third is refused, and taken once they have ended."""
    with serving(tmp_path, workers=1, most_requests_per_tenant=2) as own:
        _, posted = own.post(open_problem(8), wait=0, method="staged", time_limit_s=60, max_gap=0)
        waits = [threading.Thread(target=own.get, args=(posted["id"], 3)) for _ in range(2)]
        for wait in waits:
            wait.start()
        time.sleep(0.5)
        assert own.http.get("/v1/solves").status_code == 429
        for wait in waits:
            wait.join()
        assert own.http.get("/v1/solves").status_code == 200


@pytest.mark.thorough
def test_a_revoked_key_ends_its_streams(strict: Service) -> None:
    """The stream of events of a solve under way ends with its key, before the solve does."""
    listed = cli(strict, "keys", "list")
    tenant = Tenant(strict, cli(strict, "keys", "create", "carl", "--new-tenant"))
    (key_id,) = [line.split()[0] for line in cli(strict, "keys", "list").splitlines() if line not in listed]
    posted = tenant.post(open_problem(9), wait=0, method="staged", time_limit_s=60, max_gap=0)
    with tenant.http.stream("GET", f"/v1/solves/{posted.json()['id']}/events") as reply:
        assert reply.status_code == 200
        cli(strict, "keys", "revoke", key_id)
        assert "event: end" not in list(reply.iter_lines())
    assert tenant.http.get("/v1/solves").status_code == 401


@pytest.mark.thorough
def test_what_is_disowned_ends_its_streams(strict: Service) -> None:
    """As a response that is whole, and not at the next change of the solve alone."""
    tenant = Tenant(strict, cli(strict, "keys", "create", "dirk", "--new-tenant"))
    cli(strict, "tenants", "quota", "dirk", "--running", "0")
    posted = tenant.post(open_problem(10), wait=0, method="staged", time_limit_s=60, max_gap=0)
    with tenant.http.stream("GET", f"/v1/solves/{posted.json()['id']}/events") as reply:
        assert reply.status_code == 200
        cli(strict, "tenants", "disown", "dirk")
        alive = 0
        for line in reply.iter_lines():
            assert line != "event: end"
            alive += line == ": alive"
            assert alive < 4, "the stream goes on"
    assert tenant.http.get(f"/v1/solves/{posted.json()['id']}").status_code == 404


@pytest.mark.thorough
def test_a_tenant_has_a_rate_of_its_own() -> None:
    """A burst of one second's, then the rate; what is refused spends nothing, and others are not held up."""
    now = [0.0]
    admission = Admission(1000, rate=5.0, clock=lambda: now[0])

    def taken(tenant: str, tries: int) -> int:
        done = 0
        for _ in range(tries):
            try:
                admission.enter(tenant)
                done += 1
            except RateLimited:
                pass
        return done

    assert taken("red", 20) == 5
    assert taken("blue", 3) == 3
    now[0] = 0.5
    assert taken("red", 20) == 2
    now[0] = 10.0
    assert taken("red", 20) == 5
    slow = Admission(1000, rate=0.1, clock=lambda: now[0])
    slow.enter("red")
    with pytest.raises(RateLimited) as refused:
        slow.enter("red")
    assert refused.value.retry_after_s == 10
