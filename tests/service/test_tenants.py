"""Tenants: keys, quotas, epochs, sharing, and that one never learns of another."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from remat_ir import Problem, plain_peak, problem_digest
from remat_service.tenants.keys import make_key, well_formed
from service.serving import (
    Service,
    at_peak,
    command,
    eventually,
    example,
    hard_graph,
    open_problem,
    served,
    serving,
    training_graph,
)


def cli(service: Service, *arguments: str) -> str:
    """Run `remat-service` on the service's database: its standard output."""
    done = command(service.database_url, *arguments)
    assert done.exit_code == 0, done.output
    return str(done.stdout.strip())


class Tenant:
    """A tenant's view of the service."""

    def __init__(self, service: Service, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        self.http = httpx2.Client(base_url=service.url, headers=headers, timeout=60, trust_env=False)

    def post(self, problem: Problem, wait: float = 20, **more: Any) -> httpx2.Response:
        """POST a problem."""
        body = {"problem": problem.to_json(), "time_limit_s": 5, **more}
        return self.http.post("/v1/solves", json=body, headers={"Prefer": f"wait={wait:g}"})


locked = served(workers=1, require_keys="true")


@pytest.fixture(scope="module")
def anna(locked: Service) -> Tenant:
    """One tenant."""
    return Tenant(locked, cli(locked, "keys", "create", "anna", "--new-tenant"))


@pytest.fixture(scope="module")
def bert(locked: Service) -> Tenant:
    """Another."""
    return Tenant(locked, cli(locked, "keys", "create", "bert", "--new-tenant"))


def test_keys_are_told_apart_by_form() -> None:
    """A checksum tells a typing error from a wrong key; 256 random bits each."""
    keys = {make_key() for _ in range(100)}
    assert len(keys) == 100
    for key in keys:
        assert well_formed(key)
        assert len(key) == 6 + 43 + 6
        assert not well_formed(key[:-1])
        assert not well_formed(key[:10] + ("a" if key[10] != "a" else "b") + key[11:])


def test_without_a_key_nothing(locked: Service) -> None:
    """401 with the same words for no key, a malformed, an unknown one; health stays open."""
    said = set()
    for key in (None, "remat_nonsense", make_key(), "Ä"):
        headers = {} if key is None else {"Authorization": b"Bearer " + key.encode("latin-1")}
        reply = locked.http.get("/v1/solves", headers=headers)
        assert reply.status_code == 401
        assert reply.headers["www-authenticate"] == "Bearer"
        said.add(reply.json()["detail"])
    assert len(said) == 2  # needs one; not valid
    assert locked.http.get("/livez").status_code == 200


def test_only_hashes_are_stored(locked: Service) -> None:
    """Neither the database nor the list shows a key."""
    key = cli(locked, "keys", "create", "carla", "--label", "laptop", "--new-tenant")
    assert key not in cli(locked, "keys", "list")
    assert "laptop" in cli(locked, "keys", "list")
    for path in locked.folder.glob("service.sqlite*"):
        assert key.encode() not in path.read_bytes()


def test_scopes_rotation_and_revocation(locked: Service) -> None:
    """A reader can't solve; a rotated key overlaps with its successor; a revoked one ends."""
    reader = Tenant(locked, cli(locked, "keys", "create", "dora", "--scope", "read", "--new-tenant"))
    assert reader.http.get("/v1/solves").status_code == 200
    assert reader.post(Problem(training_graph(3), 10**6)).status_code == 403
    old_key = cli(locked, "keys", "create", "dora", "--new-tenant")
    rows = [line.split() for line in cli(locked, "keys", "list").splitlines()]
    old_id = next(row[0] for row in rows if row[2].rstrip("…") == old_key[:12])
    new = Tenant(locked, cli(locked, "keys", "rotate", old_id, "--overlap-hours", "1"))
    old = Tenant(locked, old_key)
    assert (old.http.get("/v1/solves").status_code, new.http.get("/v1/solves").status_code) == (200, 200)
    cli(locked, "keys", "revoke", old_id)
    eventually(lambda: old.http.get("/v1/solves").status_code == 401)
    assert new.http.get("/v1/solves").status_code == 200
    ending = cli(locked, "keys", "create", "dora", "--label", "ends", "--days", "90")
    (of_ending,) = (row for row in cli(locked, "keys", "list").splitlines() if ending[:12] in row)
    cli(locked, "keys", "rotate", of_ending.split()[0])
    spans = locked.rows("SELECT julianday(expires_at) - julianday(created_at) FROM api_keys WHERE label = 'ends'")
    assert sorted(round(days) for (days,) in spans) == [1, 90], "the old one for a day more, the new one as long"


def test_no_hit_and_no_join_across_tenants(anna: Tenant, bert: Tenant) -> None:
    """What one has stored, or is solving, is a miss for the other."""
    problem = at_peak(training_graph(9))
    assert anna.post(problem).json()["cache"] == "miss"
    assert bert.post(problem).json()["cache"] == "miss"
    assert [anna.post(problem).json()["cache"] for _ in range(3)] == ["hit"] * 3
    assert bert.post(problem).json()["cache"] == "hit"  # its own
    long = open_problem(9)
    mine = anna.post(long, wait=0, method="staged", max_gap=0).json()
    theirs = bert.post(long, wait=0, method="staged", max_gap=0).json()
    assert (mine["cache"], theirs["cache"]) == ("miss", "miss")
    for tenant, row in ((anna, mine), (bert, theirs)):
        assert tenant.http.post(f"/v1/solves/{row['id']}/cancel").status_code == 200


def test_idor_matrix(locked: Service, anna: Tenant, bert: Tenant) -> None:
    """Every route that takes an id or a digest: another tenant's is answered exactly like one that never was."""
    graph = training_graph(10)
    problem = Problem(graph, plain_peak(graph))
    mine = anna.post(problem).json()
    sweep = anna.http.post("/v1/sweeps", json=example("sweep"), headers={"Prefer": "wait=20"}).json()
    search = {name: value for name, value in example("max_batch").items() if name != "batches"}
    batch = anna.http.post("/v1/max-batch", json=search, headers={"Prefer": "wait=20"}).json()
    anna.http.post("/v1/profiles", json={"device": "d", "profiles": {"s": [1, 2]}})
    places = {
        "solve_id": (mine["id"], "0" * 32),
        "group_id": (sweep["id"], "0" * 32),
        "digest": (problem_digest(problem), "0" * 64),
    }
    cli(locked, "tenants", "names", "anna", "on")
    bodies = {"run": {"predicted_bytes": 1, "measured_bytes": 1}, "names": {"names": ["op"] * graph.ops}}
    document = locked.http.get("/openapi.json").json()
    looked = 0
    for path, operations in sorted(document["paths"].items()):
        name = next((part[1:-1] for part in path.split("/") if part.startswith("{")), None)
        if name is None or path.startswith("/v1/operator/"):  # of all tenants, for nobody else: `test_operate.py`
            continue
        real, never = places[name]
        if "max-batch" in path:
            real = batch["id"]
        for method in sorted(operations):
            body = bodies.get(path.rpartition("/")[2])
            own = anna.http.request(method, path.replace(f"{{{name}}}", real), json=body)
            other = bert.http.request(method, path.replace(f"{{{name}}}", real), json=body)
            none = bert.http.request(method, path.replace(f"{{{name}}}", never), json=body)
            assert own.status_code in (200, 202, 204), (method, path, own.text)
            assert other.status_code == none.status_code == 404, (method, path)
            assert other.json() == none.json()
            looked += 1
    assert looked >= 10
    assert mine["id"] not in bert.http.get("/v1/solves", params={"limit": 200}).text
    assert bert.http.post("/v1/solves", json={**example("solve"), "start": mine["id"]}).status_code == 422
    asked = bert.http.post("/v1/profiles:lookup", json={"device": "d", "signatures": ["s"]})
    assert asked.json() == {"profiles": {}}
    explained = bert.http.post("/v1/cache:explain", json={"problem": problem.to_json()}).json()
    assert explained["result"] == "miss"
    assert "stored with" not in " ".join(explained["reasons"])


def _as_quick(some: list[float], others: list[float]) -> bool:
    """Whether two kinds of request differ by less than the noise of one of them."""
    spread = statistics.quantiles(others, n=4)
    return abs(statistics.median(some) - statistics.median(others)) < (spread[2] - spread[0]) / 2


@pytest.mark.slow
def test_no_timing_difference(anna: Tenant, bert: Tenant) -> None:
    """1,000 look-ups of another's digest against one that never was, interleaved: no difference to be seen.

    Compared with the difference between two halves of the same kind of request, which is noise alone.
    """
    problem = at_peak(training_graph(11))
    anna.post(problem)
    paths = [f"/v1/plans/{problem_digest(problem)}", f"/v1/plans/{'1' * 64}"]
    seconds: tuple[list[float], list[float]] = ([], [])
    for i in range(1000):
        for kind in (0, 1) if i % 2 else (1, 0):
            begun = time.perf_counter()
            assert bert.http.get(paths[kind]).status_code == 404
            seconds[kind].append(time.perf_counter() - begun)
    assert _as_quick(*seconds)


@pytest.mark.slow
def test_no_timing_difference_in_posts(locked: Service, anna: Tenant) -> None:
    """Bodies that another tenant has posted and had solved against bodies that nobody has: as quick to be refused.

    The asker's quota is 0, so that each POST is read, looked up, and refused before it costs anything.
    """
    karl = Tenant(locked, cli(locked, "keys", "create", "karl", "--new-tenant"))
    cli(locked, "tenants", "quota", "karl", "--queued", "0")
    problems = [at_peak(training_graph(1500, cost=2000 + i)) for i in range(100)]
    for problem in problems[::2]:
        assert anna.post(problem, method="checkpoint-all").status_code == 200
    seconds: tuple[list[float], list[float]] = ([], [])
    for i, problem in enumerate(problems):
        begun = time.perf_counter()
        assert karl.post(problem, method="checkpoint-all").status_code == 429
        seconds[i % 2].append(time.perf_counter() - begun)
    assert _as_quick(*seconds)


@pytest.mark.thorough
def test_disowned_requests_are_gone_from_a_running_server(locked: Service) -> None:
    """Ids of a raised epoch are not found, though the server has the answers in memory; keys of retries are free.

    Measured costs are gone.
    """
    tenant = Tenant(locked, cli(locked, "keys", "create", "ines", "--new-tenant"))
    graph = training_graph(16)
    problem, hopeless = Problem(graph, plain_peak(graph)), Problem(graph, 1)
    retry = {"json": {"problem": problem.to_json()}, "headers": {"Prefer": "wait=20", "Idempotency-Key": "again"}}
    ids = [tenant.http.post("/v1/solves", **retry).json()["id"]]
    ids += [tenant.post(asked).json()["id"] for asked in (problem, problem, hopeless)]
    sweep = {"graph": graph.to_json(), "budgets_bytes": [plain_peak(graph)]}
    group = tenant.http.post("/v1/sweeps", json=sweep, headers={"Prefer": "wait=20"}).json()["id"]
    pages = [f"/v1/solves/{each}{part}" for each in ids for part in ("", "/progress", "/problem")]
    pages = [page for page in pages if page != f"/v1/solves/{ids[-1]}/problem"] + [f"/v1/sweeps/{group}"]
    assert [tenant.http.get(page).status_code for page in pages] == [200] * len(pages)
    tenant.http.post("/v1/profiles", json={"device": "d", "profiles": {"matmul": [90, 0]}})
    cli(locked, "tenants", "disown", "ines")
    time.sleep(2.2)
    lookup = {"device": "d", "signatures": ["matmul"]}
    assert tenant.http.post("/v1/profiles:lookup", json=lookup).json()["profiles"] == {}
    assert [tenant.http.get(page).status_code for page in pages] == [404] * len(pages)
    assert tenant.http.get("/v1/solves").json()["solves"] == []
    again = [tenant.http.post("/v1/solves", **retry).json() for _ in range(2)]
    assert again[0]["id"] == again[1]["id"] not in ids
    assert again[0]["cache"] == "miss"
    assert tenant.http.get(f"/v1/solves/{again[0]['id']}").status_code == 200


def test_quotas(locked: Service) -> None:
    """Queued solves and solver seconds: 429 with Retry-After; hits cost nothing."""
    tenant = Tenant(locked, cli(locked, "keys", "create", "hans", "--new-tenant"))
    stored = at_peak(training_graph(14))
    assert tenant.post(stored).status_code == 200
    cli(locked, "tenants", "quota", "hans", "--queued", "0")
    refused = tenant.post(Problem(training_graph(15), 10**9))
    assert (refused.status_code, refused.headers["retry-after"].isdigit()) == (429, True)
    assert tenant.post(stored).json()["cache"] == "hit"
    cli(locked, "tenants", "quota", "hans", "--queued", "none", "--solver-seconds", "0")
    refused = tenant.post(Problem(training_graph(15), 10**9))
    assert refused.status_code == 429
    assert "solver seconds" in refused.json()["detail"]
    cli(locked, "tenants", "quota", "hans", "--solver-seconds", "none", "--queued", "1")
    graph = hard_graph(40, 3)
    sweep = {"graph": graph.to_json(), "budgets_bytes": [plain_peak(graph) - i for i in range(1, 9)], "max_gap": 0}
    assert tenant.http.post("/v1/sweeps", json=sweep).status_code == 429
    rows = tenant.http.get("/v1/solves").json()["solves"]
    assert not [row for row in rows if row["status"] in ("queued", "running")]
    cli(locked, "tenants", "quota", "hans", "--queued", "none")
    assert tenant.post(Problem(training_graph(15), 10**9)).status_code == 200
    cli(locked, "tenants", "disable", "hans")
    eventually(lambda: tenant.post(stored).status_code == 401)


@pytest.mark.thorough
def test_a_quota_changes_only_what_it_names(tmp_path: Path) -> None:
    """Without an option it shows; an option changes one limit; `none` removes one; what is no limit changes nothing."""
    url = f"sqlite:///{tmp_path}/quotas.sqlite"

    def run(*arguments: str) -> tuple[int, str]:
        done = command(url, "tenants", *arguments)
        return done.exit_code, done.output.strip()

    run("add", "emil")
    none = "running -  queued -  solver seconds -  stored bytes -  requests -  profiles -"
    assert run("quota", "emil") == (0, none)
    assert run("quota", "emil", "--requests", "3", "--running", "7")[0] == 0
    both = none.replace("running -", "running 7").replace("requests -", "requests 3")
    assert run("quota", "emil") == (0, both)
    half = run("quota", "emil", "--solver-seconds", "0.5", "--running", "none")
    assert half == (0, both.replace("running 7", "running -").replace("seconds -", "seconds 0.5"))
    for wrong in ("-1", "1.5", "nan", "all", ""):
        code, said = run("quota", "emil", "--profiles", wrong)
        assert (code, "neither a number" in " ".join(said.split())) == (2, True), said
    assert run("quota", "emil") == half
    assert run("quota", "nobody")[0] != 0
    acts = [json.loads(line) for line in command(url, "history").output.splitlines()]
    changes = [
        {name: act[name] for name in act if name.startswith("most_")} for act in acts if act["act"] == "tenants change"
    ]
    assert changes == [
        {"most_requests": 3, "most_running": 7},
        {"most_solver_seconds": 0.5, "most_running": None},
    ]


@pytest.mark.thorough
def test_quotas_on_what_is_kept(tmp_path: Path) -> None:
    """Stored bytes and kept requests hold the next solve off, profiles an upload as a whole; the oldest requests go."""
    with serving(tmp_path, workers=1, require_keys="true", housekeeping_s=0.5) as own:
        emil = Tenant(own, cli(own, "keys", "create", "emil", "--new-tenant"))
        problems = [at_peak(graph) for graph in map(training_graph, (3, 4, 5))]
        assert emil.post(problems[0]).json()["cache"] == "miss"

        cli(own, "tenants", "quota", "emil", "--stored-bytes", "1")
        refused = emil.post(problems[1])
        assert (refused.status_code, "of graphs and plans are stored" in refused.json()["detail"]) == (429, True)
        assert emil.post(problems[0]).json()["cache"] == "hit"

        cli(own, "tenants", "quota", "emil", "--requests", "2", "--stored-bytes", "10000000")
        assert [emil.post(problems[0]).status_code for _ in range(4)] == [200] * 4

        def kept() -> bool:
            return len(emil.http.get("/v1/solves").json()["solves"]) <= 2

        eventually(kept, 20)
        assert "requests 2" in cli(own, "tenants", "list")
        assert emil.post(problems[2]).json()["cache"] == "miss"  # at the quota: the oldest go
        eventually(kept, 20)
        cli(own, "tenants", "quota", "emil", "--requests", "0")
        assert emil.post(problems[1]).status_code == 429  # none can go
        cli(own, "tenants", "quota", "emil", "--requests", "2")

        cli(own, "tenants", "quota", "emil", "--profiles", "2")
        upload = {"device": "d", "profiles": {"a": [1, 0], "b": [2, 0]}}
        assert emil.http.post("/v1/profiles", json=upload).status_code == 200
        assert emil.http.post("/v1/profiles", json=upload).status_code == 200  # reported again, not kept twice
        more = {"device": "d", "profiles": {"b": [2, 0], "c": [3, 0]}}
        assert emil.http.post("/v1/profiles", json=more).status_code == 429
        asked = {"device": "d", "signatures": ["a", "b", "c"]}
        assert emil.http.post("/v1/profiles:lookup", json=asked).json() == {"profiles": {"a": [1, 0], "b": [2, 0]}}


Report = Callable[..., list[int]]


def _reporters(service: Service, group: str | None, *names: str) -> list[Report]:
    """New tenants, in a new group where it is named: what stands after each one's report of a signature."""

    def reporter(name: str) -> Report:
        cli(service, "tenants", "add", name, *(() if group is None else ("--group", group)))
        tenant = Tenant(service, cli(service, "keys", "create", name))

        def report(cost_ns: int, workspace_bytes: int = 64, signature: str = "s") -> list[int]:
            body = {"device": "d", "profiles": {signature: [cost_ns, workspace_bytes]}}
            found: list[int] = tenant.http.post("/v1/profiles", json=body).json()["profiles"][signature]
            return found

        return report

    if group is not None:
        cli(service, "groups", "create", group)
    return [reporter(name) for name in names]


@pytest.mark.thorough
def test_one_member_cannot_set_the_costs_of_a_group(locked: Service) -> None:
    """A first report of nothing stands until three members have reported; then the middle, which one cannot move."""
    names = ("first", "second", "third", "fourth")
    first, second, third, fourth = _reporters(locked, "four", *names)
    assert first(0, 0) == [0, 0]
    assert second(1000) == [0, 0]
    assert first(0, 0) == [0, 0]  # one member has one report
    assert third(1100) == [1000, 64]
    assert first(10**12, 10**12) == [1000, 64]
    assert fourth(1050) == [1000, 64]  # what stands within noise stays, as does every graph's key
    said = "SELECT name, cost_ns FROM profile_reports r JOIN tenants t ON t.id = r.tenant_id ORDER BY name"
    reports = [row for row in locked.rows(said) if row[0] in names]
    assert reports == [("first", 10**12), ("fourth", 1050), ("second", 1000), ("third", 1100)]


def test_two_members_that_agree_correct_the_costs_of_a_group(locked: Service) -> None:
    """What a busy machine reported stands against one other report, and not against two; nor once its own is mended."""
    busy, quiet, other = _reporters(locked, "three", "busy", "quiet", "other")
    for report, signature, cost_ns, stands in (
        (busy, "s", 4294, 4294),
        (quiet, "s", 316, 4294),
        (busy, "s", 390, 390),  # both agree now
        (busy, "t", 4294, 4294),
        (busy, "t", 316, 4294),  # alone, in a table that others use
        (other, "t", 330, 330),
        (busy, "u", 100, 100),
        (quiet, "u", 180, 100),
        (other, "u", 170, 170),  # 1.7 times off, as two of three say
    ):
        assert report(cost_ns, signature=signature)[0] == stands


def test_a_tenant_corrects_a_table_of_its_own_downwards(locked: Service) -> None:
    """A busy machine's first report does not stay; what another busy moment adds changes nothing."""
    (report,) = _reporters(locked, None, "alone")
    assert report(4294) == [4294, 64]
    assert report(3500) == [4294, 64]  # within noise, and every graph's key stays
    assert report(316) == [316, 64]
    assert report(4294) == [316, 64]
    assert report(316, 0) == [316, 64]  # bytes are not measured by a clock
