"""Certificates and seals: on the wire, between budgets and costs, and against a database that somebody has edited."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, select

from remat_ir import Answer, Problem, Status, budget_at, certified_need, plain_peak, verify_answer
from remat_service.storage.tables import proofs
from remat_service.storage.verifier import CheckedProof, pack, unpack, written
from service.database import process
from service.serving import Service, at_peak, command, hard_graph, posed, served, serving, training_graph

GAP = 0.01

own = served(workers=1)


def _post(service: Service, problem: Problem, **more: Any) -> dict[str, Any]:
    status, data = service.post(problem, **{"time_limit_s": 20, "max_gap": GAP} | more)
    assert status == 200, data
    return data


def _certified(problem: Problem, data: dict[str, Any]) -> Answer:
    """An answer whose bound, or whose claim that no plan fits, is what its certificate proves."""
    answer = Answer.from_json(data)
    verdict = verify_answer(problem, answer)
    assert certified_need(answer, verdict) == answer
    if answer.status is Status.INFEASIBLE:
        assert verdict.infeasible
    else:
        assert answer.bound_ns == verdict.bound_ns
    return answer


def test_answers_carry_their_certificates(own: Service) -> None:
    """A new one, the same one again from the store and from memory, by its id, by its digest; lists leave it out."""
    problem = posed(training_graph(9), 0.7)
    first = _post(own, problem)
    assert _certified(problem, first).proof is not None
    for _ in range(3):
        again = _post(own, problem)
        assert again["cache"] == "hit"
        assert again["proof"] == first["proof"]
    assert own.get(again["id"], 0)[1]["proof"] == first["proof"]
    by_digest = own.http.get(f"/v1/plans/{first['digest']}").json()
    assert _certified(problem, by_digest).proof is not None
    assert own.http.get("/v1/solves").json()["solves"][0].get("proof") is None


@pytest.mark.thorough
def test_without_certificates_engines_are_believed_and_named(own: Service) -> None:
    """`certify: false` takes an engine's word: it is kept apart, and does not certify anything later."""
    problem = posed(hard_graph(9, 5), 0.6)
    loose = _post(own, problem, certify=False, max_gap=0)
    verdict = verify_answer(problem, Answer.from_json(loose))
    assert loose["bound_ns"] == verdict.bound_ns or loose["claimed_by"]
    strict = _certified_or_claimed(problem, _post(own, problem, max_gap=0))
    assert strict.claimed_bound_ns is None or strict.claimed_by


def _certified_or_claimed(problem: Problem, data: dict[str, Any]) -> Answer:
    answer = Answer.from_json(data)
    if answer.status is Status.INFEASIBLE:
        return _certified(problem, data)
    verdict = verify_answer(problem, answer)
    if not answer.restricted_to:
        assert answer.bound_ns == verdict.bound_ns
    else:
        assert answer.claimed_bound_ns is not None or answer.bound_ns == verdict.proved_ns
    return answer


def test_a_certificate_of_the_space_of_tags_is_stored_and_given(own: Service) -> None:
    """With the answer, from the store and from memory, and by its id; of all plans it proves nothing."""
    refused = own.metric("remat_verifier_rejections_total")
    first = _post(own, TAGGED, **BY_TAGS)
    assert first["restricted_to"] == ["tags"]
    verdict = verify_answer(TAGGED, Answer.from_json(first))
    assert verdict.bound_ns == TAGGED.subject.total_cost_ns < verdict.restricted_ns <= first["bound_ns"]
    for _ in range(3):
        again = _post(own, TAGGED, **BY_TAGS)
        assert (again["cache"], again["proof"], again["bound_ns"]) == ("hit", first["proof"], first["bound_ns"])
    assert own.get(again["id"], 0)[1]["proof"] == first["proof"]
    empty = posed(hard_graph(16, 7), 0.6)
    for cache in ("miss", "hit", "hit"):
        none = _post(own, empty, **BY_TAGS)
        assert (none["status"], none["cache"], none["restricted_to"]) == ("nothing_found", cache, ["tags"])
        assert verify_answer(empty, Answer.from_json(none)).none_within
    whole = _post(own, TAGGED)
    assert whole["proof"] != first["proof"]
    assert _certified(TAGGED, whole).restricted_to == ()
    assert own.metric("remat_verifier_rejections_total") == refused


async def test_the_same_certificate_in_two_spaces_is_two(own: Service) -> None:
    """Of all plans the same bytes may prove less: neither row takes the other's bound or space."""
    _post(own, TAGGED, **BY_TAGS)
    async with process(own.database_url) as context:
        ours = proofs.c.restricted_to == "tags", proofs.c.bound_ns.is_not(None)
        row = await context.database.first(select(proofs).where(*ours))
        async with context.database.write() as connection:
            for space, bound in (("", 1), ("tags", row.bound_ns)):
                proof = CheckedProof(bound, row.data, b"", space)
                found = await context.store.put_proof(connection, row.graph_key, row.budget_bytes, proof)
                assert (found == row.id) == (space == "tags")
            await connection.execute(delete(proofs).where(proofs.c.bound_ns == 1))
        assert await context.database.first(select(proofs).where(proofs.c.id == row.id)) is not None


def test_a_certificate_serves_smaller_budgets_and_other_costs(own: Service) -> None:
    """Written anew for the problem at hand, checked, and given at once; a solve starts from one that is not enough."""
    graph = training_graph(9, cost=777)
    problem = Problem(graph, budget_at(graph, 0.7))
    first = _post(own, problem)
    assert first["peak_bytes"] <= problem.budget_bytes
    between = Problem(graph, (first["peak_bytes"] + problem.budget_bytes) // 2)
    noisy = replace(graph, op_cost_ns=tuple(c + c * (i % 5 - 2) // 400 for i, c in enumerate(graph.op_cost_ns)))
    for other, cache in ((between, "hit"), (Problem(noisy, problem.budget_bytes), "near")):
        before = own.metric("remat_solve_seconds_count")
        data = _post(own, other, max_gap=0.02)
        assert data["cache"] == cache
        assert _certified(other, data).proof is not None
        assert own.metric("remat_solve_seconds_count") == before
    tight = _post(own, Problem(noisy, problem.budget_bytes), max_gap=0, time_limit_s=1)
    answer = _certified_or_claimed(Problem(noisy, problem.budget_bytes), tight)
    assert answer.bound_ns >= data["bound_ns"]


@pytest.mark.thorough
def test_a_certificate_is_not_dropped_for_proving_more(own: Service) -> None:
    """At a budget where no plan fits, that of a larger one says so: it is no damage."""
    problem = posed(training_graph(9, cost=55), 0.7)
    first, before = _post(own, problem), own.metric("remat_store_damaged_total")
    for budget in (2400, 1700):
        assert _post(own, Problem(problem.graph, budget))["status"] == "infeasible"
    assert own.metric("remat_store_damaged_total") == before
    assert own.get(first["id"], 0)[1]["proof"] == first["proof"]


def test_that_no_plan_fits_is_certified(own: Service) -> None:
    """By a solve, below it, for other costs, and where the budget does not even cover the fixed bytes."""
    graph = training_graph(10, cost=31)
    for asked, budget, cache in (
        (graph, 1700, "miss"),
        (graph, 1650, "hit"),
        (graph, 0, "hit"),
        (replace(graph, op_cost_ns=tuple(c + 1 for c in graph.op_cost_ns)), 1650, "near"),
        (replace(graph, fixed_bytes=5000), 4000, "hit"),
    ):
        problem = Problem(asked, budget)
        data = _post(own, problem)
        assert (data["status"], data["cache"]) == ("infeasible", cache)
        assert "plan" not in data
        assert cache == "near" or budget < data["least_budget_bound_bytes"] <= plain_peak(asked)
        assert _certified(problem, data).claimed_by is None
        assert _certified(problem, own.get(data["id"], 0)[1]).claimed_by is None


# ---- edited databases

SETTLED = posed(training_graph(9), 0.7)
UNSETTLED = posed(hard_graph(60, 5), 0.3)
TOO_SMALL = Problem(SETTLED.graph, 1700)
HARD = {"max_gap": 0, "time_limit_s": 0.5}
RESTRICTED = {"method": "milp-tight", "max_gap": 0}
TAGGED = posed(hard_graph(20, 7), 0.6)
BY_TAGS = {"method": "tags", "options": {"free": False}, "max_gap": 0, "time_limit_s": 5}
Edit = str | Callable[[sqlite3.Connection], None]


class Edited:
    """A service whose database is as it was filled, but for what a test edits while it runs or is stopped.

    It was filled with a certified answer, one that is open, one that no plan fits, and a profile.
    """

    def __init__(self, own: Service) -> None:
        self.own = own
        self.settled = _post(own, SETTLED)
        self.open = _post(own, UNSETTLED, **HARD)
        self.none = _post(own, TOO_SMALL)
        self.restricted = _post(own, SETTLED, **RESTRICTED)
        self.tags = _post(own, TAGGED, **BY_TAGS)
        assert own.http.post("/v1/profiles", json=PROFILE).json()["profiles"]["matmul"] == [100, 0]
        self.path = own.folder / "service.sqlite"
        with sqlite3.connect(self.path) as database:
            database.execute("VACUUM INTO ?", (str(own.folder / "as-filled.sqlite"),))
        database.close()

    def edit(self, change: Edit) -> None:
        """Put the database back and edit it, as another process would."""
        with sqlite3.connect(self.path, timeout=20) as database:
            database.execute("ATTACH ? AS filled", (str(self.own.folder / "as-filled.sqlite"),))
            for table in TABLES:
                database.execute(f"DELETE FROM main.{table}")
                database.execute(f"INSERT INTO main.{table} SELECT * FROM filled.{table}")
            before = database.total_changes
            if callable(change):
                change(database)
            else:
                for statement in change.split(";"):
                    database.execute(statement)
            assert database.total_changes > before, "nothing is there to be edited"
        database.close()


TABLES = (
    "graphs",
    "problems",
    "plans",
    "proofs",
    "bounds",
    "floors",
    "efforts",
    "solves",
    "requests",
    "events",
    "profiles",
)
PROFILE = {"device": "d", "profiles": {"matmul": [100, 0]}}


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edited]:
    with serving(tmp_path_factory.mktemp("edited"), workers=2) as running:
        yield Edited(running)


def _proofs(change: Callable[[dict[str, Any]], None]) -> Callable[[sqlite3.Connection], None]:
    def work(database: sqlite3.Connection) -> None:
        for row, data in database.execute("SELECT id, data FROM proofs").fetchall():
            proof = unpack(data)
            change(proof)
            database.execute("UPDATE proofs SET data = ? WHERE id = ?", (pack(written(proof)), row))

    return work


def _forge(proof: dict[str, Any]) -> None:
    """Multipliers a thousand times as large, over a denominator of one."""
    if proof["by"] == "stages":
        proof["denominator"] = 1
        proof["nodes"] = [
            [kind, [n * (1 + 999 * (i % 2)) for i, n in enumerate(rest)]] for kind, rest in proof["nodes"]
        ]


def _drop_row(proof: dict[str, Any]) -> None:
    if proof["by"] == "stages":
        proof["rows"] = proof["rows"][1:]
    else:
        proof["op"] = 0


EDITS: dict[str, Edit] = {
    "bounds doubled": "UPDATE bounds SET bound_ns = bound_ns * 2",
    "bounds at the cost": "UPDATE bounds SET bound_ns = (SELECT min(cost_ns) FROM plans WHERE graph_key = "
    "bounds.graph_key)",
    "bounds from nowhere": "INSERT INTO bounds SELECT graph_key, budget_bytes, '', '', solver, cost, 'x', created_at, "
    "NULL FROM (SELECT e.*, (SELECT min(cost_ns) FROM plans p WHERE p.graph_key = e.graph_key) AS cost FROM efforts e "
    "WHERE cost IS NOT NULL) WHERE true ON CONFLICT DO UPDATE SET bound_ns = excluded.bound_ns, seal = NULL",
    "certificates said to prove more": "UPDATE proofs SET bound_ns = bound_ns * 2",
    "certificates said to prove that no plan fits": "UPDATE proofs SET bound_ns = NULL",
    "certificates of a larger budget": "UPDATE proofs SET budget_bytes = budget_bytes * 3",
    "certificates of another graph": "INSERT INTO proofs SELECT 'x' || substr(id, 2), (SELECT graph_key FROM plans p "
    "WHERE p.graph_key != proofs.graph_key LIMIT 1), budget_bytes * 1000, bound_ns * 1000, solver, data, checksum, "
    "size_bytes, created_at, restricted_to FROM proofs LIMIT 1",
    "certificates of tags said to be of all plans": "UPDATE proofs SET restricted_to = ''",
    "certificates of all plans said to be of tags": "UPDATE proofs SET restricted_to = 'tags'",
    "certificates of no space that there is": "UPDATE proofs SET restricted_to = 'spaces'",
    "certificates forged": _proofs(_forge),
    "certificates without a row": _proofs(_drop_row),
    "certificates cut": "UPDATE proofs SET data = CAST(substr(data, 1, 20) AS BLOB)",
    "floors raised": "UPDATE floors SET least_bytes = least_bytes * 100 + 1000000000",
    "floors raised, plans gone": "UPDATE floors SET least_bytes = 1000000000; DELETE FROM plans",
    "efforts settled": "UPDATE efforts SET settled = 1, seconds = 1e9, \"limit\" = NULL",
    "efforts infeasible, plans gone": "UPDATE efforts SET settled = 1, status = 'infeasible'; DELETE FROM plans",
    "answers cheaper": "UPDATE requests SET answer = json_set(answer, '$.cost_ns', 1, '$.bound_ns', 1)",
    "answers infeasible": "UPDATE requests SET answer = json_set(answer, '$.status', 'infeasible')",
    "answers optimal": "UPDATE requests SET answer = json_set(answer, '$.status', 'optimal', '$.gap', 0, '$.bound_ns', "
    "json_extract(answer, '$.cost_ns'))",
    "answers that are not JSON": "UPDATE requests SET answer = '{'",
    "answers of each other": "UPDATE requests SET answer = (SELECT answer FROM requests r WHERE r.id != requests.id "
    "LIMIT 1)",
    "certificates taken off": "UPDATE requests SET proof_id = NULL; DELETE FROM proofs",
    "seals taken off": "UPDATE bounds SET seal = NULL; UPDATE floors SET seal = NULL; UPDATE efforts SET seal = NULL",
    "solves told better": "UPDATE solves SET cost_ns = 1, bound_ns = 1",
    "plans cheaper": "UPDATE plans SET cost_ns = cost_ns - 1",
    "structure of another": "UPDATE graphs SET structure_key = 'x', total_cost_ns = 1",
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("live", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["live", "restarted"])
@pytest.mark.parametrize("edit", EDITS, ids=str)
def test_an_edited_row_is_never_believed(edited: Edited, edit: str, live: bool) -> None:
    """Whatever is edited: what is said is certified or was said before, and nothing is a 5xx."""
    own = edited.own
    if not live:
        own.stop()
    edited.edit(EDITS[edit])
    if not live:
        own.start()
    for problem, said, more in (
        (SETTLED, edited.settled, {}), (UNSETTLED, edited.open, HARD), (TOO_SMALL, edited.none, {}),
        (SETTLED, edited.restricted, RESTRICTED), (TAGGED, edited.tags, BY_TAGS),
    ):  # fmt: skip
        answer = _certified_or_claimed(problem, _post(own, problem, **more))
        assert answer.claimed_by != "x"
        assert (answer.status is Status.INFEASIBLE) == (problem is TOO_SMALL)
        assert problem is TOO_SMALL or answer.plan is not None
        assert problem is not UNSETTLED or answer.status is not Status.OPTIMAL
        if more is RESTRICTED:
            assert (answer.cost_ns, answer.bound_ns) == (said["cost_ns"], said["bound_ns"])
        status, old = own.get(str(said["id"]), 0)
        assert status in (200, 410)
        if status == 200:  # with the certificate that it had, or another one that proves as much
            assert {**old, "proof": 0} == {**said, "proof": 0}
            _certified_or_claimed(problem, old)
    rows = own.http.get("/v1/solves").json()["solves"]
    before = {row["id"]: row for row in (edited.settled, edited.open, edited.none)}
    for row in rows:
        known = before.get(row["id"])
        assert known is None or row["status"] == "failed" or row["cost_ns"] == known["cost_ns"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ("certificates said to prove more", "certificates mended"),
        ("certificates forged", "certificates"),
        ("certificates cut", "certificates dropped"),
        ("certificates of a larger budget", "certificates dropped"),
        ("certificates of tags said to be of all plans", "certificates dropped"),
        ("bounds doubled", "bounds dropped"),
        ("floors raised", "floors dropped"),
        ("efforts settled", "efforts dropped"),
        ("answers optimal", "requests dropped"),
        ("solves told better", "solves mended"),
        ("plans cheaper", "plans mended"),
        ("UPDATE plans SET data = CAST(substr(data, 1, 9) AS BLOB)", "plans dropped"),
        ("UPDATE graphs SET total_cost_ns = 1", "graphs mended"),
        ("UPDATE profiles SET cost_ns = 1", "profiles dropped"),
    ],
)
def test_audit_mends_what_was_edited(
    edited: Edited, edit: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once is enough: the second time nothing is found, and what is left is believed."""
    edited.edit(EDITS.get(edit, edit))
    url = edited.own.database_url
    monkeypatch.chdir(tmp_path)  # where contradictions are written
    shown = [command(url, "audit").stdout.splitlines()[-1] for _ in range(2)]
    assert said in shown[1] == shown[0]  # nothing is changed without the word
    done = command(url, "audit", "--apply")
    assert said in done.stdout, done.output
    again = command(url, "audit", "--apply").stdout
    assert "dropped" not in again
    assert "mended" not in again
    before = edited.own.metric("remat_store_damaged_total")
    _certified_or_claimed(SETTLED, _post(edited.own, SETTLED))
    assert edited.own.metric("remat_store_damaged_total") == before


@pytest.mark.thorough
def test_edited_profiles_are_measured_anew(edited: Edited) -> None:
    """A profile that is not what was stored is not there, and the next report takes its place."""
    own, lookup = edited.own, {"device": "d", "signatures": ["matmul"]}
    edited.edit("UPDATE profiles SET cost_ns = 1")
    assert own.http.post("/v1/profiles:lookup", json=lookup).json()["profiles"] == {}
    assert own.metric("remat_store_damaged_total") > 0
    table = {"device": "d", "profiles": {"matmul": [90, 0]}}
    assert own.http.post("/v1/profiles", json=table).json()["profiles"] == {"matmul": [90, 0]}


@pytest.mark.thorough
def test_a_plain_peak_needs_no_certificate(own: Service) -> None:
    """Each op once is a bound that anybody can add up."""
    data = _post(own, at_peak(training_graph(12, cost=17)), max_gap=0)
    assert data["status"] == "optimal"
    assert "proof" not in data
    assert data["claimed_by"] is None
