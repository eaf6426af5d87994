"""`remat-service audit`: a store as solves leave it is sound, and each kind of edited row is found."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from remat_ir import Plan, Problem, budget_at, plain_peak, verify
from remat_service.cli import app
from service.serving import serving, training_graph
from tiers import first


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a restricted optimum, bounds certified and claimed, a plan of the plain peak, a budget too small."""
    folder = tmp_path_factory.mktemp("audit")
    graph = training_graph(9)
    with serving(folder, workers=1) as own:
        for budget, more in (
            (budget_at(graph, 0.7), {"max_gap": 0.01}),
            (budget_at(graph, 0.7), {"certify": False}),
            (budget_at(graph, 0.7), {"method": "milp-tight"}),
            (budget_at(graph, 0.7), {}),
            (plain_peak(graph), {}),
            (1700, {}),
        ):
            assert own.post(Problem(graph, budget), **{"time_limit_s": 10, "max_gap": 0} | more)[0] == 200
    return folder / "service.sqlite"


def _audit(path: Path, *arguments: str, seals: bool = True) -> tuple[int, str]:
    url: dict[str, str | None] = {"REMAT_DATABASE_URL": f"sqlite:///{path}"}
    url |= {} if seals else {"REMAT_SEAL_KEY": None}
    done = CliRunner().invoke(app, ["audit", "--instances", str(path.parent / "audited"), *arguments], env=url)
    return done.exit_code, done.output


def _edited(filled: Path, folder: Path, *changes: str) -> Path:
    path = folder / "service.sqlite"
    shutil.copy(filled, path)
    with closing(sqlite3.connect(path)) as database, database:
        for change in changes:
            assert database.execute(change).rowcount >= 1
    return path


@pytest.mark.thorough
def test_a_sound_store_passes_and_its_sample_is_solved_again(filled: Path) -> None:
    code, said = _audit(filled, "--sample", "9", "--seconds", "10")
    assert code == 0, said
    assert "graphs 1 " in said
    assert re.search(r" solved again [3-6] ", said)
    assert "wrong 0 " in said
    assert "certificates 0" not in said


@pytest.mark.parametrize(
    ("change", "said"),
    first(
        6,
        [
            ("UPDATE proofs SET data = CAST(substr(data, 1, 9) AS BLOB)", "damaged"),
            ("UPDATE plans SET cost_ns = cost_ns - 1", "is stored as"),
            ("UPDATE bounds SET bound_ns = bound_ns * 2 WHERE restricted_to = ''", "costs less than"),
            (
                "UPDATE bounds SET bound_ns = bound_ns * 2 WHERE restricted_to != ''",
                "one recomputation per op and stage",
            ),
            ("UPDATE bounds SET budget_bytes = budget_bytes * 9 WHERE restricted_to = ''", "costs less than"),
            ("UPDATE floors SET least_bytes = 4000000000", "exists"),
            ("UPDATE floors SET enough_bytes = 1", "a plan needs 1 bytes"),
            ("UPDATE efforts SET status = 'infeasible', budget_bytes = budget_bytes * 4", "exists"),
            ("UPDATE plans SET data = CAST(substr(data, 1, 9) AS BLOB)", "damaged"),
            ("UPDATE graphs SET data = CAST(substr(data, 1, 9) AS BLOB)", "damaged"),
            ("UPDATE solves SET cost_ns = 1 WHERE cost_ns IS NOT NULL", "a plan costs 1 ns"),
            ("UPDATE solves SET bound_ns = bound_ns * 2 WHERE bound_ns IS NOT NULL", "costs less than"),
            ("UPDATE proofs SET bound_ns = bound_ns + 1 WHERE bound_ns IS NOT NULL", "and is bound_ns"),
            ("UPDATE proofs SET budget_bytes = budget_bytes * 9", "for another problem"),
            ("UPDATE bounds SET bound_ns = bound_ns - 1", "bounds are not what was stored"),
            ("UPDATE floors SET enough_bytes = enough_bytes + 1", "floors are not what was stored"),
            ("UPDATE efforts SET seconds = 1e9", "efforts are not what was stored"),
            (
                "UPDATE requests SET answer = json_set(answer, '$.status', 'optimal')",
                "requests are not what was stored",
            ),
        ],
    ),
)
def test_an_edited_row_is_found(filled: Path, tmp_path: Path, change: str, said: str) -> None:
    """Without solving anything again: the store's own rows contradict each other."""
    code, out = _audit(_edited(filled, tmp_path, change), "--sample", "0")
    assert code == 1, out
    assert "wrong: " in out
    assert said in out


@pytest.mark.thorough
def test_a_contradiction_is_written_out(filled: Path, tmp_path: Path) -> None:
    """Problem, bound and plan of the line, in net bytes, replayed by the verifier."""
    change = "UPDATE bounds SET bound_ns = bound_ns * 2 WHERE restricted_to = ''"
    _audit(_edited(filled, tmp_path, change), "--sample", "0")
    instance: dict[str, Any] = json.loads(min((tmp_path / "audited").iterdir()).read_text())
    verdict = verify(Problem.from_json(instance["problem"]), Plan.from_json(instance["plan"]))
    assert verdict.cost_ns < instance["bound_ns"]


@pytest.mark.thorough
def test_a_plan_that_only_the_present_solver_has_refutes_a_bound(filled: Path, tmp_path: Path) -> None:
    """The plans are gone from the store and a bound is false: a sample solved again shows it."""
    doubled = "UPDATE bounds SET bound_ns = bound_ns * 2 WHERE restricted_to = ''"
    gone = ("DELETE FROM plans", "DELETE FROM proofs", "UPDATE solves SET cost_ns = NULL, bound_ns = NULL")
    path = _edited(filled, tmp_path, doubled, *gone)
    code, out = _audit(path, "--sample", "0", seals=False)
    assert code == 0, out
    assert "seals were not looked at" in out
    code, out = _audit(path, "--sample", "9", "--seconds", "10", seals=False)
    assert code == 1, out
    assert "the present solver" in out


@pytest.mark.thorough
def test_what_got_worse_is_reported(filled: Path, tmp_path: Path) -> None:
    """A stored cost that the present solver does not reach: here by a method without search, in place of another."""
    path = _edited(filled, tmp_path, "UPDATE solves SET method = 'checkpoint-all', options = '{}'")
    code, out = _audit(path, "--sample", "9", "--seconds", "2")
    assert code == 0, out
    assert "worse: " in out
    assert "now no plan" in out


@pytest.mark.thorough
def test_what_the_present_solver_has_no_option_for_is_not_called_wrong(filled: Path, tmp_path: Path) -> None:
    change = """UPDATE solves SET method = 'staged', options = '{"engine": "cpsat"}'"""
    code, out = _audit(_edited(filled, tmp_path, change), "--sample", "9", "--seconds", "2")
    assert code == 0, out
    assert "not solved again: " in out
    assert "method 'staged' has no option 'engine'" in out
