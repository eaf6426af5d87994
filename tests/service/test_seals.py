"""The key that seals what nobody can prove anew: where it is from, how it rotates, what is left without it."""

from __future__ import annotations

import os
import sqlite3
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from remat_ir import Answer, Problem, verify_answer
from remat_service.errors import ServiceError
from remat_service.settings import Settings
from remat_service.storage.seals import Seals, seals_of
from remat_service.tenants.keys import make_key
from service.database import postgres
from service.serving import at_peak, command, commands_ended, posed, serving, started, training_graph


def _settings(**more: Any) -> Settings:
    return Settings(**{"seal_key": None} | more)


@pytest.mark.thorough
def test_sqlite_is_sealed_only_by_a_key_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one no file is made next to it, and its rows are believed as they are; a store that has a key is not
    served without it, until that is said.
    """
    monkeypatch.delenv("REMAT_SEAL_KEY", raising=False)
    problem = at_peak(training_graph(5))
    with serving(tmp_path, workers=1) as own:
        first = own.post(problem, time_limit_s=5)[1]
        assert not list(tmp_path.glob("*key*"))
        assert own.rows("SELECT count(seal) FROM requests") == [(0,)]
        assert own.rows("SELECT count(*) FROM seal_keys") == [(0,)]
    with serving(tmp_path, workers=1, seal_key=OTHER) as own:
        assert own.get(first["id"], 0)[0] == 410  # written without a seal
        second = own.post(problem, time_limit_s=5)[1]
    for arguments in (["serve", "--port", "0"], ["solves", "cancel", "none"]):
        done = started(tmp_path, *arguments, database_url=own.database_url)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "this store is sealed, and REMAT_SEAL_KEY is not set" in done.stderr
    adopted = command(own.database_url, "store", "adopt-key")
    assert adopted.exit_code == 0, adopted.output
    with serving(tmp_path, workers=1) as own:
        assert [own.get(each["id"], 0) for each in (first, second)] == [(200, first), (200, second)]


@pytest.mark.thorough
def test_postgresql_needs_a_key_and_keys_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several are accepted, the first one signs."""
    monkeypatch.delenv("REMAT_SEAL_KEY", raising=False)
    url = "postgresql://u@127.0.0.1:1/none"
    with pytest.raises(ServiceError, match="REMAT_SEAL_KEY"):
        seals_of(_settings(database_url=url))
    with pytest.raises(ServiceError, match="32 characters"):
        seals_of(_settings(database_url=url, seal_key="short"))
    old, new = make_key(), make_key()
    row = seals_of(_settings(seal_key=old)).sealed("bounds", {"bound_ns": 7})
    both = seals_of(_settings(seal_key=f"{new},{old}"))
    assert both.holds("bounds", row)
    assert not both.holds("bounds", row | {"bound_ns": 8})
    fresh = both.sealed("bounds", {"bound_ns": 7})
    assert seals_of(_settings(seal_key=new)).holds("bounds", fresh)
    assert not seals_of(_settings(seal_key=old)).holds("bounds", fresh)
    assert not Seals([b"x" * 32]).holds("bounds", {"bound_ns": 7})


@pytest.fixture
def answered(tmp_path: Path) -> tuple[Problem, dict[str, Any], str]:
    """A problem, its answer, and the URL of the stopped service's store: with profiles, claims, efforts and answers."""
    problem = posed(training_graph(9, cost=91), 0.7)
    with serving(tmp_path, workers=1) as own:
        first = own.post(problem, time_limit_s=20, max_gap=0.01)[1]
        own.http.post("/v1/profiles", json={"device": "d", "profiles": {"matmul": [100, 0]}})
    return problem, first, own.database_url


OTHER = "k" * 40


def _rows(folder: Path) -> dict[str, int]:
    with sqlite3.connect(folder / "service.sqlite") as database:
        tables = ("plans", "proofs", "bounds", "floors", "efforts", "requests", "profiles", "solves")
        return {table: database.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}


@pytest.mark.thorough
def test_another_key_starts_nothing_and_changes_nothing(tmp_path: Path, answered: Any) -> None:
    """Neither a server nor a command goes on with it; one sentence says why."""
    _, _, url = answered
    before = _rows(tmp_path)
    given = {"database_url": url, "seal_key": OTHER}
    commands = [
        ["serve", "--port", "0"], ["migrate"], ["audit"], ["audit", "--apply"], ["keys", "list"],
        ["tenants", "add", "team"], ["store", "purge", "--solver", "x"], ["history"],
    ]  # fmt: skip
    ends = commands_ended(tmp_path, [(arguments, given) for arguments in commands])
    for arguments, (code, said, printed) in zip(commands, ends, strict=True):
        assert (code, said.count("\n"), printed) == (2, 1, ""), (arguments, said)
        assert "is not the key that this store is sealed with" in said
    assert _rows(tmp_path) == before


@pytest.mark.thorough
def test_a_lost_key_is_replaced_by_a_word(tmp_path: Path, answered: Any) -> None:
    """With another key adopted, sealed rows are misses; plans and certificates still answer; nothing is deleted by
    reading, so that with the old key found again all is there.
    """
    problem, first, url = answered
    done = command(url, "store", "adopt-key", REMAT_SEAL_KEY=OTHER)
    assert done.exit_code == 0, done.output
    before = _rows(tmp_path)
    with serving(tmp_path, workers=1, seal_key=OTHER) as own:
        for _ in range(2):
            assert own.get(first["id"], 0)[0] == 410
            lookup = {"device": "d", "signatures": ["matmul"]}
            assert own.http.post("/v1/profiles:lookup", json=lookup).json()["profiles"] == {}
            assert own.http.get("/v1/solves").json()["solves"][0]["status"] == "failed"
        _, again = own.post(problem, time_limit_s=20, max_gap=0.01)
        assert again["cache"] == "hit"
        assert again["cost_ns"] == first["cost_ns"]
        assert verify_answer(problem, Answer.from_json(again)).bound_ns == again["bound_ns"]
    assert {**_rows(tmp_path), "requests": before["requests"]} == before
    shown = command(url, "audit", REMAT_SEAL_KEY=OTHER)
    assert "requests dropped 1  profiles dropped 1" in shown.stdout
    assert "nothing was changed" in shown.stderr
    both = f"{OTHER},{os.environ['REMAT_SEAL_KEY']}"
    with serving(tmp_path, workers=1, seal_key=both) as own:
        assert own.get(first["id"], 0) == (200, first)
        assert own.get(again["id"], 0) == (200, again)


@pytest.mark.slow
def test_keys_rotate_under_servers_that_run(tmp_path: Path) -> None:
    """`old,new` on one process after the other, then `new,old`, then `new`: at every step each server gives what any of
    them has stored, and nothing counts as damaged. In another order the first process does not start.
    """
    old, new = make_key(), make_key()
    folders = [tmp_path / name for name in ("one", "two")]
    with ExitStack() as stack:
        url = stack.enter_context(postgres())
        given = {"database_url": url, "require_keys": "false"}
        servers = [stack.enter_context(serving(folder, **given, seal_key=old, workers=1)) for folder in folders]

        def every_answer_is_given(cost: int) -> None:
            for server in servers:
                stored.append(server.post(at_peak(training_graph(5, cost=cost)), time_limit_s=5)[1])
                cost += 1
            for server in servers:
                assert [server.get(each["id"], 0) for each in stored] == [(200, each) for each in stored]
                assert server.metric("remat_store_damaged_total") == 0
                assert server.http.get("/readyz").status_code == 200

        stored: list[dict[str, Any]] = []
        every_answer_is_given(100)
        refused = started(tmp_path, "serve", "--port", "0", database_url=url, seal_key=f"{new},{old}")
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert "start all of them with `old,new` first" in refused.stderr
        for step, keys in enumerate((f"{old},{new}", f"{new},{old}")):
            for number, server in enumerate(servers):
                server.stop()
                server.settings["seal_key"] = keys
                server.start()
                every_answer_is_given(200 + 100 * step + 10 * number)
        servers[0].stop()
        servers[0].settings["seal_key"] = new
        servers[0].start()
        assert servers[0].get(stored[-1]["id"], 0) == (200, stored[-1])
        assert servers[0].get(stored[0]["id"], 0)[0] == 410  # sealed by the old key alone
        assert servers[1].get(stored[0]["id"], 0) == (200, stored[0])
        done = command(url, "keys", "list", REMAT_SEAL_KEY=old)
        assert "is not the key that this store is sealed with" in str(done.exception)
