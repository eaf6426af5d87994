"""The threat table of docs/threats.md, a test a row (tenancy has its own file)."""

from __future__ import annotations

import ast
import gzip
import json
import random
import re
import socket
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

import remat_service
from remat_service.errors import BadRequest, TooLarge, Unsupported
from remat_service.settings import Settings
from remat_service.web.body import STEP_BYTES, Inflater
from service.serving import Service, at_peak, eventually, example, peak_bytes, served, serving, started, training_graph
from service.test_tenants import cli

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

JSON = {"Content-Type": "application/json"}


small = served(workers=1, most_wire_bytes=20_000, most_body_bytes=100_000, most_ops=50, most_edges=80, most_values=60)
"""A service with small caps."""


def _refused(service: Service, status: int, **request: Any) -> dict[str, Any]:
    reply = service.http.post("/v1/solves", **request)
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/problem+json"
    data: dict[str, Any] = reply.json()
    assert {"type", "title", "status", "detail"} <= data.keys()
    assert data["status"] == status
    return data


@pytest.mark.parametrize("chunked", [False, True])
def test_body_too_large_on_the_wire(small: Service, chunked: bool) -> None:
    """By its length, and by its chunks."""
    body = b" " * 30_000
    content: Any = (body[i : i + 5000] for i in range(0, len(body), 5000)) if chunked else body
    _refused(small, 413, content=content, headers=JSON)


BOMB = {
    "gzip": gzip.compress(b"0" * 200_000_000, 9),
    "zstd": zstd.compress(b"0" * 200_000_000),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(BOMB))
def test_bombs(tmp_path: Path, name: str) -> None:
    """Two hundred kilobytes that inflate to two hundred megabytes are refused with what is allowed inflated, and in the
    memory of that.
    """
    caps = {"most_wire_bytes": 300_000, "most_body_bytes": 1_000_000}
    assert len(BOMB[name]) < caps["most_wire_bytes"]
    with serving(tmp_path, workers=1, **caps) as own:
        _refused(own, 413, content=gzip.compress(b" " * 1_000_001), headers=JSON | {"Content-Encoding": "gzip"})
        Path(f"/proc/{own.process.pid}/clear_refs").write_text("5")  # the peak is counted anew
        before = peak_bytes(own)
        _refused(own, 413, content=BOMB[name], headers=JSON | {"Content-Encoding": name})
        assert peak_bytes(own) - before < 50_000_000
    inflater, inflated = Inflater([name], 1_000_000), list[int]()
    with pytest.raises(TooLarge):
        inflated.extend(len(piece) for piece in inflater.feed(BOMB[name]))
    assert sum(inflated) <= 1_000_000 + STEP_BYTES


@pytest.mark.parametrize(
    ("wire", "encodings", "error"),
    [
        pytest.param(gzip.compress(b"{}") + b"more", ["gzip"], BadRequest, id="more after gzip"),
        pytest.param(gzip.compress(b"{}")[:-3], ["gzip"], BadRequest, id="cut gzip"),
        pytest.param(zstd.compress(b"{}") + zstd.compress(b"{}"), ["zstd"], BadRequest, id="two zstd frames"),
        pytest.param(b"\x00\x01", ["zstd"], BadRequest, id="no zstd"),
        pytest.param(b"", ["gzip"], BadRequest, id="empty gzip"),
        pytest.param(gzip.compress(gzip.compress(b"{}")), ["gzip, gzip"], Unsupported, id="gzip twice"),
        pytest.param(gzip.compress(b"{}"), ["gzip", "gzip"], Unsupported, id="two headers"),
        pytest.param(zlib.compress(b"{}"), ["deflate"], Unsupported, id="deflate"),
        pytest.param(b"{}", ["br"], Unsupported, id="brotli"),
        pytest.param(gzip.compress(b"0" * 1001), ["gzip"], TooLarge, id="inflated too large"),
        pytest.param(b"0" * 1001, [], TooLarge, id="too large"),
    ],
)
def test_encodings_refused(wire: bytes, encodings: list[str], error: type[Exception]) -> None:
    """One encoding, whole, with nothing behind it."""
    with pytest.raises(error):
        _inflate(wire, encodings, 1000)


def _inflate(wire: bytes, encodings: list[str], most: int) -> bytes:
    inflater = Inflater(encodings, most)
    plain = b"".join(piece for at in range(len(wire)) for piece in inflater.feed(wire[at : at + 1]))
    inflater.finish()
    return plain


@pytest.mark.parametrize("name", ["gzip", "zstd"])
def test_whole_bodies_are_inflated_in_steps(name: str) -> None:
    """Random and repetitive data, also where a step ends with the input used up and output still inside."""
    for plain in (random.Random(1).randbytes(300_000), b"0" * 1_000_000, b"ab" * 65_536, b""):
        wire = gzip.compress(plain) if name == "gzip" else zstd.compress(plain)
        inflater = Inflater([name], 2_000_000)
        pieces = list(inflater.feed(wire))
        inflater.finish()
        assert b"".join(pieces) == plain
        assert max(map(len, pieces), default=0) <= STEP_BYTES


def test_compressed_bodies_are_read(service: Service) -> None:
    """gzip and zstd, as the client sends them."""
    plain = json.dumps(example("solve")).encode()
    for name, content in (("gzip", gzip.compress(plain)), ("zstd", zstd.compress(plain)), ("identity", plain)):
        reply = service.http.post(
            "/v1/solves", content=content, headers=JSON | {"Content-Encoding": name, "Prefer": "wait=20"}
        )
        assert (name, reply.status_code) == (name, 200)


def test_caps_on_ops_values_and_edges(small: Service) -> None:
    """Each is refused with the array that is too long, before the graph is built."""
    graph = training_graph(10).to_json()
    for change, pointer in (
        ({"op_cost_ns": [1] * 51}, "op_cost_ns"),
        ({"op_inputs": [[]] * 51}, "op_inputs"),
        ({"value_bytes": [1] * 61}, "value_bytes"),
        ({"op_inputs": [list(range(41)), list(range(41))]}, "op_inputs"),
    ):
        data = _refused(small, 413, json={"problem": {"graph": graph | change, "budget_bytes": 1}})
        assert data["pointer"] == f"/problem/graph/{pointer}"
    chain = {"format": "remat-chain/1", "forward_ns": [1] * 26}
    _refused(small, 413, json={"problem": {"chain": chain, "budget_bytes": 1}})
    join = {"format": "remat-join/1", "lengths": [100000] * 64}
    _refused(small, 413, json={"problem": {"join": join, "budget_bytes": 1}})


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"op_cost_ns": [-1, 1, 1, 1, 1]}, "/problem/graph/op_cost_ns/0"),
        ({"op_cost_ns": [2**53 + 1, 1, 1, 1, 1]}, "/problem/graph/op_cost_ns/0"),
        ({"op_cost_ns": [1.5, 1, 1, 1, 1]}, "/problem/graph/op_cost_ns/0"),
        ({"value_bytes": [2**53, 2**53, 1, 1, 1]}, "/problem/graph/value_bytes"),
        ({"op_inputs": [[0], [0], [1], [1, 2], [0, 3]]}, "/problem/graph/op_inputs/0/0"),
        ({"surprise": 1}, "/problem/graph/surprise"),
    ],
)
def test_hostile_numbers_and_edges(service: Service, change: dict[str, Any], pointer: str) -> None:
    """Integers to 2^53 with their sums, no cycle, no unknown key: 422 with the place."""
    body = example("solve")
    body["problem"]["graph"] |= change
    assert _refused(service, 422, json=body)["pointer"] == pointer


@pytest.mark.parametrize("text", ["", "{", "[1, 2", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 50_000, "\xff"])
def test_not_json(service: Service, text: str) -> None:
    """One clear line, whatever was sent."""
    data = _refused(service, 400, content=text.encode("latin-1"), headers=JSON)
    assert "\n" not in data["detail"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "multipart/form-data"},
        {},
    ],
)
def test_content_type_is_strict(service: Service, headers: dict[str, str]) -> None:
    """What a form in a browser can send without asking first is refused."""
    request = service.http.build_request("POST", "/v1/solves", content=b"{}", headers=headers)
    if not headers:
        request.headers.pop("content-type", None)
    assert service.http.send(request).status_code == 415


def test_no_cors_no_cookies_and_the_host_is_checked(service: Service) -> None:
    """A page of another origin can't read, nor reach this service under another name."""
    reply = service.http.get("/v1/capabilities", headers={"Origin": "http://evil.example"})
    assert not [name for name in reply.headers if name.startswith("access-control-") or name == "set-cookie"]
    assert service.http.get("/v1/capabilities", headers={"Host": "evil.example"}).status_code == 400
    assert service.http.get("/livez", headers={"Host": "localhost:1"}).status_code == 200
    assert service.http.options("/v1/solves", headers={"Origin": "http://evil.example"}).status_code == 405


def test_nothing_comes_from_a_cdn(service: Service) -> None:
    """Neither the page nor anything it loads names another host; there is no generated /docs."""
    assert service.http.get("/docs").status_code == 404
    for place in ("/", "/static/app.js", "/static/vendor/uPlot.iife.min.js"):
        reply = service.http.get(place)
        assert reply.status_code == 200
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert not {"http", "*"} & set(policy.replace(":", " ").split())
    assert service.http.get("/static/../app.py").status_code in (400, 404)
    static = Path(remat_service.__file__).parent / "web" / "page" / "static"
    for path in [p for p in static.rglob("*") if p.suffix in (".html", ".css", ".js") and "vendor" not in p.parts]:
        text = path.read_text()
        assert 'src="http' not in text and 'href="http' not in text and "@import" not in text, path  # noqa: PT018


def test_clients_cannot_write_plans(service: Service) -> None:
    """No route takes a plan: what goes in are problems, limits, profiles, and words of what a plan came to."""
    document = service.http.get("/openapi.json").json()
    taken = set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body is not None:
                taken.add((method, path, body["$ref"].rsplit("/", 1)[1]))
    assert {name for _, _, name in taken} == {
        "SolveRequest", "SweepRequest", "BatchRequest", "ValidateRequest", "ProfileLookup", "ProfileUpload",
        "TenantRequest", "TenantChange", "KeyRequest", "RunReport", "OpNames",
    }  # fmt: skip
    bodies = json.dumps(document["components"]["schemas"]["SolveRequest"])
    assert "PlanDocument" not in bodies


def test_no_code_in_data() -> None:
    """No pickle, eval, exec or unsafe YAML anywhere in the service."""
    for path in Path(remat_service.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {a.name.split(".")[0] for a in node.names} & {"pickle", "marshal", "shelve"}, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec", "compile", "__import__"}, path


@pytest.mark.thorough
def test_refuses_to_listen_beyond_loopback_without_keys(tmp_path: Path) -> None:
    """Not without requiring keys; while there are none it refuses everybody, and says so."""
    done = started(tmp_path, "serve", "--host", "0.0.0.0", "--port", "0")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "keys" in done.stderr
    with serving(tmp_path, workers=1, require_keys="true") as own:
        assert own.http.get("/v1/solves").status_code == 401
        said = (tmp_path / "service.log").read_text()
        assert "there is no API key" in said
        assert "/metrics is open" in said
    with serving(tmp_path, workers=1, require_keys="true", metrics_key="for scrapers") as own:
        cli(own, "keys", "create", "anna", "--new-tenant")
    with serving(tmp_path, workers=1, require_keys="true", metrics_key="for scrapers"):
        assert "is open" not in (tmp_path / "service.log").read_text().removeprefix(said)


@pytest.mark.thorough
def test_secrets_are_not_shown(tmp_path: Path) -> None:
    """Neither in the settings' repr nor in the log of a run that uses them."""
    settings = Settings(database_url="postgresql://remat:hunter2@db/remat")
    assert "hunter2" not in repr(settings) + str(settings.model_dump())
    with serving(tmp_path, workers=1) as own:
        problem = at_peak(training_graph(5, cost=987654))
        headers = {"Authorization": "Bearer remat_topsecret"}
        own.http.post("/v1/solves", json={"problem": problem.to_json()}, headers=headers)
        own.post(problem)
        eventually(lambda: "solve ended" in (tmp_path / "service.log").read_text())
        log = (tmp_path / "service.log").read_text()
    assert "topsecret" not in log
    assert "987654" not in log  # nor what a graph is made of
    for line in log.splitlines():
        json.loads(line)


@pytest.mark.thorough
def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    """Exit 2 and a sentence."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = started(tmp_path, "serve", "--port", str(taken.getsockname()[1]))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "can't listen" in done.stderr


def test_every_row_names_tests_that_are_there() -> None:
    """A row of docs/threats.md names files or functions; a function without a file is in the file named before it."""
    tests = Path(__file__).parents[1]
    rows = [line for line in (tests.parent / "docs/threats.md").read_text().splitlines() if line.startswith("| ")]
    for row in rows[2:]:
        threat, _, named = row.strip("| ").split(" | ")
        names, file = re.findall(r"`([^`]+)`", named), ""
        assert names, threat
        for name in names:
            if ".py" in name:
                file, _, name = name.partition("::")
            path = tests.parent / file if file.startswith("tests/") else tests / "service" / file
            assert path.is_file(), f"{threat}: {file}"
            if not name:
                continue
            found = re.search(rf"((?:^@.*\n)*)^(async )?def {name}\(", path.read_text(), re.M)
            assert found, f"{threat}: {name}"
            alone = name.startswith("test_no_timing_difference")  # no test may run next to it: it runs at night
            assert alone or "@pytest.mark.slow" not in found[1], f"{threat}: {name} is slow, so no change runs it"
