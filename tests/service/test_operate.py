"""What an operator sees and ends: commands, routes under a scope of their own, lines of the log, rows of hits."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update

from remat_ir import Problem, budget_at, plain_peak
from remat_service.context import Context
from remat_service.errors import Invalid
from remat_service.storage.eviction import HIT_BYTES, evict, store_bytes
from remat_service.storage.tables import requests
from remat_service.tenants.quotas import QUOTAS
from service.database import default_tenant, process, request_row
from service.serving import Service, at_peak, command, eventually, open_problem, served, serving, training_graph
from service.test_tenants import Tenant, cli

locked = served(workers=1, require_keys="true")


@pytest.fixture(scope="module")
def chief(locked: Service) -> Tenant:
    """An operator."""
    return Tenant(locked, cli(locked, "keys", "create", "operators", "--scope", "operate", "--new-tenant"))


def _endless(tenant: Tenant, seed: int) -> str:
    reply = tenant.post(open_problem(seed), 0, method="staged", time_limit_s=90, max_gap=0)
    assert reply.status_code == 202, reply.text
    return str(reply.json()["id"])


@pytest.mark.thorough
def test_an_operator_lists_and_ends_solves(locked: Service, chief: Tenant) -> None:
    """By command and by route; who waited is answered, and what was done is written down with who did it."""
    team = Tenant(locked, cli(locked, "keys", "create", "team", "--new-tenant"))
    first, second = _endless(team, 1), _endless(team, 2)
    eventually(lambda: "running" in cli(locked, "solves", "list", "--tenant", "team", "--state", "running"))
    running = cli(locked, "solves", "list", "--state", "running").split()[0]
    assert cli(locked, "solves", "cancel", running).strip() == "1 requests ended"
    assert team.http.get(f"/v1/solves/{first}", params={"wait": 10}).json()["limit"] == "cancel"
    waiting = chief.http.get("/v1/operator/solves", params={"tenant": "team"}).json()["solves"]
    (left,) = [row for row in waiting if row["requests"]]
    assert chief.http.post(f"/v1/operator/solves/{left['id']}/cancel").json() == {"requests": 1}
    assert team.http.get(f"/v1/solves/{second}").status_code == 200
    assert chief.http.post(f"/v1/operator/solves/{'0' * 32}/cancel").status_code == 404
    acts = [json.loads(line) for line in cli(locked, "history").splitlines()]
    by_route = [act for act in acts if act["act"] == "solves cancel" and act["actor"].startswith("key ")]
    assert by_route[0]["solves"] == [left["id"]]
    assert by_route[0]["actor"].endswith(" of operators")


@pytest.mark.thorough
def test_who_watches_hears_of_what_a_command_ends(locked: Service) -> None:
    """A solve that waits is ended by another process: its stream has the end."""
    team = Tenant(locked, cli(locked, "keys", "create", "watching", "--new-tenant"))
    cli(locked, "tenants", "quota", "watching", "--running", "0")
    request = _endless(team, 11)
    (solve,) = cli(locked, "solves", "list", "--tenant", "watching").split()[:1]
    with team.http.stream("GET", f"/v1/solves/{request}/events") as reply:
        lines = reply.iter_lines()
        assert next(lines) == "retry: 1000"
        assert cli(locked, "solves", "cancel", solve) == "1 requests ended"
        alive = 0
        for line in lines:
            alive += line == ": alive"
            assert alive < 4, "the stream goes on after the end"
            if line == "event: end":
                break


@pytest.mark.thorough
def test_disabling_a_tenant_ends_what_it_has_under_way(locked: Service, chief: Tenant) -> None:
    """Nothing of it waits or runs any longer, by command or by route; others go on."""
    for seed, how in ((3, "command"), (5, "route")):
        team = Tenant(locked, cli(locked, "keys", "create", f"by-{how}", "--new-tenant"))
        for i in range(2):
            _endless(team, seed + i)
        if how == "command":
            cli(locked, "tenants", "disable", f"by-{how}")
        else:
            reply = chief.http.patch(f"/v1/operator/tenants/by-{how}", json={"disabled": True})
            assert reply.json()["disabled"] is True

        def under_way(name: str = f"by-{how}") -> list[dict[str, object]]:
            rows = chief.http.get("/v1/operator/solves", params={"tenant": name}).json()["solves"]
            return [row for row in rows if row["state"] != "ended"]

        eventually(lambda under_way=under_way: not under_way(), 20)


@pytest.mark.thorough
def test_disabling_a_tenant_ends_its_searches(locked: Service, chief: Tenant) -> None:
    """A search asks for one solve after another without a key: it asks for no more."""
    team = Tenant(locked, cli(locked, "keys", "create", "searching", "--new-tenant"))
    cli(locked, "tenants", "quota", "searching", "--running", "0")
    graph = training_graph(12, cost=907)
    body = {"problem": Problem(graph, 3 * plain_peak(graph)).to_json(), "total_s": 3600}
    posted = team.http.post("/v1/max-batch", json=body).json()
    assert not posted["ended"], posted
    assert chief.http.patch("/v1/operator/tenants/searching", json={"disabled": True}).status_code == 200
    kept = "SELECT json_extract(about, '$.ended') FROM groups WHERE id = ?"
    assert eventually(lambda: locked.rows(kept, posted["id"])[0][0]) == "this tenant has been disabled"
    rows = chief.http.get("/v1/operator/solves", params={"tenant": "searching"}).json()["solves"]
    assert {row["state"] for row in rows} == {"ended"}


@pytest.mark.thorough
def test_the_operators_view(locked: Service, chief: Tenant) -> None:
    """The same by route, in the terminal and in the metrics."""
    team = Tenant(locked, cli(locked, "keys", "create", "viewed", "--new-tenant"))
    first = _endless(team, 7)
    second = _endless(team, 8)

    def mine() -> dict[str, object]:
        return next(
            each for each in chief.http.get("/v1/operator/overview").json()["tenants"] if each["tenant"] == "viewed"
        )

    eventually(lambda: mine()["running"] == 1)
    found = chief.http.get("/v1/operator/overview").json()
    assert (found["ready"], found["workers_alive"], found["workers_busy"]) == (True, 1, 1)
    assert mine()["queued"] == 1
    assert found["oldest_queued_s"] > 0
    shown = cli(locked, "top", "--once")
    assert "1 busy of 1 alive" in shown
    assert "viewed" in shown
    text = locked.http.get("/metrics").text
    for line in ("remat_workers_alive 1.0", "remat_workers_busy 1.0", "remat_solves_in_progress 1.0"):
        assert line in text
    assert "process_cpu_seconds_total" in text
    assert "remat_build_info{" in text
    for request_id in (first, second):
        team.http.post(f"/v1/solves/{request_id}/cancel")


@pytest.mark.thorough
def test_what_answers_save_is_counted(locked: Service, chief: Tenant) -> None:
    """Memory by a solve and by each hit of it, seconds of solving by hits: in the metrics and in the last hour."""
    team = Tenant(locked, cli(locked, "keys", "create", "saving", "--new-tenant"))
    graph = training_graph(8, cost=913, fixed=10)
    problem = Problem(graph, budget_at(graph, 0.7))

    def of_last_hour() -> int:
        return int(chief.http.get("/v1/operator/overview").json()["last_hour"]["saved_bytes"])

    before = of_last_hour()
    answers = [team.post(problem, time_limit_s=5, name=name).json() for name in ("a", "b", "b")]
    assert [each["cache"] for each in answers] == ["miss", "hit", "hit"]
    saved = plain_peak(graph) - answers[0]["peak_bytes"]
    assert saved > 0
    eventually(lambda: locked.metric('remat_saved_memory_bytes_total{tenant="saving"}') == 3 * saved)
    seconds = locked.metric('remat_saved_solver_seconds_total{tenant="saving"}')
    assert seconds == pytest.approx(answers[1]["seconds"] + answers[2]["seconds"])
    eventually(lambda: of_last_hour() - before == 3 * saved)  # rows of hits are written a moment later


@pytest.mark.thorough
def test_keys_and_tenants_by_route(locked: Service, chief: Tenant) -> None:
    """Made, changed one by one, listed without a secret, ended."""
    assert chief.http.post("/v1/operator/tenants", json={"name": "made", "weight": 2.0}).json()["weight"] == 2.0
    assert chief.http.post("/v1/operator/tenants", json={"name": "made"}).status_code == 422
    path = "/v1/operator/tenants/made"
    assert chief.http.patch(path, json={"most_running": 3, "most_queued": 5}).json()["most_queued"] == 5
    changed = chief.http.patch(path, json={"most_queued": None}).json()
    assert (changed["most_running"], changed["most_queued"], changed["weight"]) == (3, None, 2.0)
    assert chief.http.patch("/v1/operator/tenants/nobody", json={}).status_code == 404
    made = chief.http.post("/v1/operator/keys", json={"tenant": "made", "days": 1}).json()
    theirs = Tenant(locked, made["key"])
    assert theirs.http.get("/v1/capabilities").json()["tenant"] == "made"
    listed = chief.http.get("/v1/operator/keys").text
    assert made["id"] in listed
    assert made["key"] not in listed
    assert "made" in [row["name"] for row in chief.http.get("/v1/operator/tenants").json()["tenants"]]
    assert chief.http.delete(f"/v1/operator/keys/{made['id']}").status_code == 204
    for days in (1e7, 1e300):
        late = chief.http.post("/v1/operator/keys", json={"tenant": "made", "days": days})
        assert (late.status_code, late.json().get("pointer")) == (422, "/days"), late.text


@pytest.mark.thorough
def test_limits_that_no_column_holds_are_refused(tmp_path: Path, url: str) -> None:
    """The same on both databases, by command and by route; the largest are taken."""
    with serving(tmp_path, database_url=url, workers=1) as own:
        path = "/v1/operator/tenants/default"
        for quota in QUOTAS:
            widest = quota in ("most_solver_seconds", "most_stored_bytes")
            reply = own.http.patch(path, json={quota: 2**31})
            assert reply.status_code == (200 if widest else 422), (quota, reply.text)
            assert widest or reply.json()["pointer"] == f"/{quota}"
            assert own.http.patch(path, json={quota: 2**31 - 1}).json()[quota] == 2**31 - 1
        for option, number in (("--requests", 2**31), ("--stored-bytes", 2**63)):
            done = command(url, "tenants", "quota", "default", option, str(number))
            assert isinstance(done.exception, Invalid), done.output


@pytest.mark.thorough
def test_names_that_no_column_holds_are_refused(tmp_path: Path, url: str) -> None:
    """The same on both databases, by command and by route; the longest are taken."""
    with serving(tmp_path, database_url=url, workers=1) as own:
        path = "/v1/operator/tenants"
        refused = own.http.post(path, json={"name": "n" * 94})
        assert (refused.status_code, refused.json().get("pointer")) == (422, "/name"), refused.text
        assert own.http.post(path, json={"name": "n" * 93}).status_code == 200
    for what in (
        ["tenants", "add", "n" * 94], ["tenants", "add", "n", "--identity-group", "i" * 201],
        ["groups", "create", "n" * 94], ["keys", "create", "n" * 93, "--label", "l" * 101],
    ):  # fmt: skip
        assert isinstance(command(url, *what).exception, Invalid), what
    for what in (
        ["tenants", "add", "m" * 93, "--identity-group", "i" * 200], ["groups", "create", "n" * 93],
        ["groups", "join", "n" * 93, "m" * 93], ["keys", "create", "n" * 93, "--label", "l" * 100],
    ):  # fmt: skip
        assert command(url, *what).exit_code == 0, what


@pytest.mark.thorough
def test_a_nul_in_an_address_is_refused(tmp_path: Path, url: str) -> None:
    """PostgreSQL has no such texts: the same on both databases."""
    with serving(tmp_path, database_url=url, workers=1) as own:
        for method, path in (
            ("GET", "/v1/solves?search=a%00"), ("GET", "/v1/operator/solves?tenant=%00"),
            ("DELETE", "/v1/operator/keys/%00"),
        ):  # fmt: skip
            reply = own.http.request(method, path)
            assert (reply.status_code, reply.json()["detail"]) == (422, "the address holds a NUL"), path


def test_the_scope_is_needed(locked: Service) -> None:
    """A key without it sees and changes nothing of the kind."""
    team = Tenant(locked, cli(locked, "keys", "create", "plain", "--new-tenant"))
    for method, path in (
        ("GET", "overview"), ("GET", "solves"), ("GET", "tenants"), ("GET", "keys"), ("POST", "keys"),
        ("POST", "tenants"), ("PATCH", "tenants/plain"), ("DELETE", "keys/x"), ("POST", f"solves/{'0' * 32}/cancel"),
    ):  # fmt: skip
        reply = team.http.request(method, f"/v1/operator/{path}", json={} if method != "GET" else None)
        assert reply.status_code == 403, (method, path)


@pytest.mark.thorough
def test_lines_of_the_log_say_whose_they_are(locked: Service) -> None:
    """Of a request and of its solve alike: tenant, key, request."""
    key = cli(locked, "keys", "create", "logged", "--new-tenant")
    team = Tenant(locked, key)
    data = team.post(at_peak(training_graph(6, cost=77)), time_limit_s=5).json()

    def lines(event: str) -> list[dict[str, Any]]:
        # the last line may be half written
        whole = (locked.folder / "service.log").read_text().rpartition("\n")[0].splitlines()
        return [line for line in map(json.loads, whole) if line["event"] == event and line.get("tenant") == "logged"]

    # both are written after the answer has been sent
    eventually(lambda: lines("request") and lines("solve ended"))
    posted, started, ended = (lines(event)[0] for event in ("request", "solve started", "solve ended"))
    assert posted["key"] in cli(locked, "keys", "list")
    assert posted["request"]
    assert all((each["key"], each["request"]) == (posted["key"], posted["request"]) for each in (started, ended))
    assert data["id"] in ended["requests"]
    assert key not in (locked.folder / "service.log").read_text()


@pytest.mark.thorough
def test_sweeps_are_given_up_like_solves(locked: Service) -> None:
    """All that is under way ends with what it has."""
    team = Tenant(locked, cli(locked, "keys", "create", "sweeping", "--new-tenant"))
    graph = open_problem(11).graph
    body = {"graph": graph.to_json(), "points": 3, "method": "staged", "time_limit_s": 90, "max_gap": 0}
    sweep = team.http.post("/v1/sweeps", json=body).json()
    assert not sweep["ended"]
    assert team.http.post(f"/v1/sweeps/{sweep['id']}/cancel").json()["ended"]
    assert team.http.post(f"/v1/sweeps/{'0' * 32}/cancel").status_code == 404


def test_head_and_wrong_methods(locked: Service, chief: Tenant) -> None:
    """HEAD is GET without its body, wherever GET is; another method is refused as a problem."""
    probed = ("/", "/livez", "/readyz", "/metrics", "/openapi.json", "/static/app.js")
    for path in (*probed, "/v1/solves", "/v1/capabilities"):
        reply, whole = chief.http.head(path), chief.http.get(path)
        assert (reply.status_code, reply.content) == (whole.status_code, b""), path
        assert reply.headers["content-type"] == whole.headers["content-type"], path
        assert path not in probed or reply.status_code == 200, path
    reply = chief.http.delete("/v1/solves")
    assert reply.status_code == 405
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.json()["type"] == "urn:remat:problem:wrong-method"
    assert reply.headers["allow"] == "GET, HEAD, POST"


async def _hits(context: Context, count: int, days: float) -> None:
    caller, moment = await default_tenant(context), context.clock.now() - timedelta(days=days)
    row = request_row(context, caller, cache="hit", ended=True, created_at=moment, ended_at=moment)
    rows = [row | {"id": context.clock.new_id()} for _ in range(count)]
    async with context.database.write() as connection:
        await connection.execute(requests.insert(), rows)


@pytest.mark.thorough
async def test_rows_of_hits_go_after_a_day_and_count(tmp_path: Path) -> None:
    """Older than their own setting they go; within it they count in the store's bytes, and go before any plan."""
    async with process(f"sqlite:///{tmp_path}/s.sqlite", store_bytes=5 * HIT_BYTES) as context:

        async def left() -> int:
            async with context.database.read() as connection:
                return int(await connection.scalar(select(func.count()).select_from(requests)) or 0)

        await _hits(context, 3, days=2)
        await _hits(context, 8, days=0.5)
        async with context.database.read() as connection:
            assert await store_bytes(connection) == 11 * HIT_BYTES
        await evict(context.database, context.settings, context.metrics)
        assert 4 <= await left() <= 5
        async with context.database.write() as connection:
            await connection.execute(update(requests).values(solve_id=None, group_id="a" * 32))
        await _hits(context, 1, days=2)
        await evict(context.database, context.settings, context.metrics)
        assert 4 <= await left() <= 5  # a sweep's own rows stay as long as others do
