"""The runbook's steps, tried: every command it names is there; back-up, restore, purge and metrics do what it says."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from remat_ir import Problem, plain_peak
from remat_service.cli import app
from remat_service.storage.cache_key import SOLVER
from service.database import PrivatePostgres, fresh_database
from service.serving import Worker, checked, eventually, serving, training_graph

DOCS = Path(__file__).parents[2] / "docs"
SHORT = {"stale_after_s": 3, "heartbeat_s": 0.5}


def _run(url: str, *arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), env={"REMAT_DATABASE_URL": url})
    assert done.exit_code == 0, done.output
    return done.stdout.strip()


def test_every_command_named_in_the_docs_is_there() -> None:
    """Commands and options of `remat-service`, wherever the docs name them."""
    root: Any = typer.main.get_command(app)
    named = 0
    for page in sorted(DOCS.glob("*.md")):
        for line in re.findall(r"remat-service ([a-z][^`#\n|]*)", page.read_text()):
            words = line.split()
            command = root
            while words and words[0] in getattr(command, "commands", {}):
                command = command.commands[words.pop(0)]
            if command is root:
                assert words[0] in ("and", "processes", "ready"), (page.name, line)  # a word of the sentence
                continue
            options = {name for parameter in command.params for name in parameter.opts}
            for word in words:
                if word.lstrip("[").startswith("--"):
                    assert word.strip("[]") in options, (page.name, line)
                    named += 1
    assert named >= 8


def test_the_steps_about_tenants_and_keys_run_in_their_order(tmp_path: Path) -> None:
    """Every command of the table, with the options in its brackets; a key it makes opens, and one it ends does not."""
    url = f"sqlite:///{tmp_path}/s.sqlite"
    _run(url, "tenants", "add", "alhpa")
    words = {"MISTYPED": "alhpa", "NAME": "my-team", "G": "lab", "W": "2", "I": "people", "VERSION": SOLVER}
    section = (DOCS / "runbook.md").read_text().split("## Tenants and keys")[1].split("\n## ")[0]
    ran = []
    for row in re.findall(r"^\| .* \| (.*) \|$", section, re.MULTILINE)[2:]:
        for named in re.findall(r"`((?:remat-service|groups) [^`]*)`", row):
            given = named.removeprefix("remat-service ").replace("[--group G]", "").replace("[", "").replace("]", "")
            if given.endswith("--everyone"):
                words["G"] = "all"
            said = _run(url, *(words.get(word, word) for word in given.split()))
            if given.startswith("keys create"):
                words["ID"] = _run(url, "keys", "list").split()[0]
                assert said.startswith("remat_")
            ran.append(given.split()[:2])
        if "disable" in row:
            _run(url, "tenants", "disable", "my-team", "--enable")
    assert len(ran) >= 14
    assert "my-team" in _run(url, "history")
    assert "revoked" in _run(url, "keys", "list")


def test_purge_by_version(tmp_path: Path) -> None:
    """What one version found is forgotten, pinned or not, while the service runs, its memory included."""
    with serving(tmp_path, workers=1) as own:
        graph = training_graph(7, cost=701)
        problem = Problem(graph, plain_peak(graph))
        given = [own.post(problem, time_limit_s=5)[1] for _ in range(4)][-1]
        assert own.http.put(f"/v1/plans/{given['digest']}/pin").status_code == 204
        assert _run(own.database_url, "store", "list").startswith(f"{SOLVER}  plans 1")
        assert "plans 0" in _run(own.database_url, "store", "purge", "--solver", "0.0.0")
        assert own.post(problem, time_limit_s=5)[1]["cache"] == "hit"
        assert "plans 1" in _run(own.database_url, "store", "purge", "--solver", SOLVER)
        assert own.get(given["id"], 0)[0] == 410
        status, data = own.post(problem, time_limit_s=5)
        assert (status, data["cache"]) == (200, "miss")
        checked(problem, data)


def test_sqlite_backed_up_while_it_runs_and_restored(tmp_path: Path) -> None:
    """The copy, served, has the answers and the keys."""
    copy = tmp_path / "copy.sqlite"
    graph = training_graph(7, cost=702)
    problem = Problem(graph, plain_peak(graph))
    with serving(tmp_path, workers=1) as own:
        given = own.post(problem, time_limit_s=5)[1]
        key = _run(own.database_url, "keys", "create", "team", "--new-tenant")
        _run(own.database_url, "backup", str(copy))
        refused = CliRunner().invoke(app, ["backup", str(copy)], env={"REMAT_DATABASE_URL": own.database_url})
        assert refused.exit_code != 0
    with serving(tmp_path, database_url=f"sqlite:///{copy}", workers=1) as restored:
        assert restored.get(given["id"], 0) == (200, given)
        assert restored.post(problem, time_limit_s=5)[1]["cache"] == "hit"
        headers = {"Authorization": f"Bearer {key}"}
        assert restored.http.get("/v1/solves", headers=headers).status_code == 200


@pytest.mark.slow
def test_postgresql_dumped_and_restored(tmp_path: Path) -> None:
    """pg_dump while a solve is queued; in the restored database a worker takes it up, and answers are hits."""
    with PrivatePostgres() as private, fresh_database(private.url) as url:
        programs = {
            name: shutil.which(name, path=f"{private.bin}:{os.environ['PATH']}") for name in ("pg_dump", "pg_restore")
        }
        with serving(tmp_path, database_url=url, dispatcher="cluster", **SHORT) as server:
            worker = Worker(tmp_path, url, **SHORT)
            graphs = [training_graph(6, cost=703), training_graph(9, cost=704)]
            done, waiting = [Problem(graph, plain_peak(graph)) for graph in graphs]
            answered = server.post(done, time_limit_s=5)[1]
            worker.stop()
            queued = server.post(waiting, wait=0, time_limit_s=5)[1]
            assert queued["status"] == "queued"
            dump = str(tmp_path / "remat.dump")
            subprocess.run([str(programs["pg_dump"]), "-Fc", "-f", dump, "-d", url], check=True)
        with fresh_database(private.url) as fresh:
            subprocess.run([str(programs["pg_restore"]), "--no-owner", "-d", fresh, dump], check=True)
            with serving(tmp_path, database_url=fresh, dispatcher="cluster", **SHORT) as server:
                worker = Worker(tmp_path, fresh, **SHORT)
                assert server.get(answered["id"], 0) == (200, answered)
                assert server.post(done, time_limit_s=5)[1]["cache"] == "hit"
                status, data = server.get(queued["id"], 30)
                assert status == 200
                checked(waiting, data)
                worker.stop()


@pytest.mark.slow
def test_a_worker_stops_in_time_and_shows_metrics(tmp_path: Path) -> None:
    """`--metrics-port` answers Prometheus; SIGTERM ends it within its limit."""
    with (
        PrivatePostgres() as private,
        fresh_database(private.url) as url,
        serving(tmp_path, database_url=url, dispatcher="cluster", **SHORT) as server,
    ):
        worker = Worker(tmp_path, url, "--metrics-port", str(server.port + 1), drain_s=2, **SHORT)
        graph = training_graph(6, cost=705)
        assert server.post(Problem(graph, plain_peak(graph)), time_limit_s=5)[0] == 200

        def solved() -> bool:
            text = urllib.request.urlopen(f"http://127.0.0.1:{server.port + 1}/metrics", timeout=5).read().decode()
            return "remat_solve_seconds_count" in text and "remat_queue_wait_seconds_count 1.0" in text

        eventually(solved)
        assert worker.stop(signal.SIGTERM) == 0
