"""The runbook's steps, tried: every command it names is there; back-up, restore, purge and metrics do what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest
import typer.main

from remat_service.cli import app
from remat_solver import solver_version
from service.database import PrivatePostgres, fresh_database
from service.serving import SHORT, at_peak, checked, command, eventually, serving, training_graph

DOCS = Path(__file__).parents[2] / "docs"


def _run(url: str, *arguments: str) -> str:
    done = command(url, *arguments)
    assert done.exit_code == 0, done.output
    return str(done.stdout.strip())


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


@pytest.mark.thorough
def test_every_command_of_the_runbook_is_run() -> None:
    """Those of its blocks and of its table of tenants as written, each other one by name."""
    page = (DOCS / "runbook.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    table = page.split("## Tenants and keys")[1].split("\n## ")[0]
    tests = "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("test_*.py")))
    root: Any = typer.main.get_command(app)
    named = set()
    for line in re.findall(r"remat-service ([a-z][^`#\n|]*)", page):
        first, *rest = line.split()
        words = (first, rest[0]) if hasattr(root.commands.get(first), "commands") else (first,)
        named |= {words} if first in root.commands else set()
    assert {("store", "adopt-key"), ("backup",), ("audit",), ("migrate",)} <= named
    for words in sorted(named):
        written = any(f"remat-service {' '.join(words)}" in text for text in (*blocks, table))
        assert written or re.search(r"[\[,] ?" + ", ".join(f'"{word}"' for word in words), tests), words


@pytest.mark.thorough
def test_the_steps_about_tenants_and_keys_run_in_their_order(tmp_path: Path) -> None:
    """Every command of the table, with the options in its brackets; a key it makes opens, and one it ends does not."""
    url = f"sqlite:///{tmp_path}/s.sqlite"
    _run(url, "tenants", "add", "alhpa")
    words = {"MISTYPED": "alhpa", "NAME": "my-team", "G": "lab", "W": "2", "I": "people", "VERSION": solver_version()}
    section = (DOCS / "runbook.md").read_text().split("## Tenants and keys")[1].split("\n## ")[0]
    ran = []
    for row in re.findall(r"^\| .* \| (.*) \|$", section, re.MULTILINE)[2:]:
        for named in re.findall(r"`((?:remat-service|groups) [^`]*)`", row):
            given = named.removeprefix("remat-service ").replace("[--group G]", "").replace("[", "").replace("]", "")
            if given.endswith("--everyone"):
                words["G"] = "all"
            if given.startswith("solves cancel"):
                continue  # there is none here: `test_operate.py` cancels
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


def _blocks(section: str) -> list[str]:
    """The commands of a section, each with its comment taken off; `export` lines are left in."""
    text = (DOCS / "runbook.md").read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).splitlines()
    return [line.partition("  #")[0].strip() for line in lines if line.strip()]


class Shell:
    """Runs the lines of the runbook as they stand there, in one shell's environment after the other.

    Servers and workers are started, waited for until they say that they are ready, and stopped at the end.
    """

    def __init__(self, folder: Path, **given: str) -> None:
        self._folder, self.running = folder, list[subprocess.Popen[str]]()
        (folder / "bin").mkdir()
        command = f'#!/bin/sh\nexec "{sys.executable}" -m remat_service.cli "$@"\n'
        (folder / "bin" / "remat-service").write_text(command)
        (folder / "bin" / "remat-service").chmod(0o755)
        self.environment = {**os.environ, **given, "REMAT_NOTICE_S": "0"}
        self.environment["PATH"] = f"{folder / 'bin'}:{given.get('PATH', os.environ['PATH'])}"

    def run(self, line: str) -> str:
        """One line: what it prints, or what it prints first where it goes on running."""
        if line.startswith("export "):
            name, _, value = line.removeprefix("export ").partition("=")
            told = subprocess.run(
                ["bash", "-c", f"echo {value}"], env=self.environment, capture_output=True, text=True, check=True
            )
            self.environment[name] = told.stdout.strip()
            return ""
        serves = re.search(r"remat-service (serve|worker)\b", line)
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {line}" if serves else line],
            env=self.environment, cwd=self._folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        if not serves:
            out, error = process.communicate(timeout=120)
            assert process.returncode == 0, (line, error)
            return out
        self.running.append(process)
        said = process.stdout.readline()
        assert "ready" in said, (line, said, process.communicate(timeout=20)[1])
        return said

    def stop(self, *those: subprocess.Popen[str]) -> None:
        """Stop these, or all that runs."""
        processes = those or self.running
        for process in processes:
            process.terminate()
        for process in processes:
            process.communicate(timeout=60)
        if not those:
            self.running.clear()


@pytest.mark.thorough
def test_one_machine_as_written(tmp_path: Path) -> None:
    """The lines of the first two sections, but for the path, the URL and the port."""
    shell = Shell(tmp_path)
    (line,) = _blocks("One machine")
    url = f"sqlite:///{tmp_path}/service.sqlite"
    try:
        assert "ready on http://127.0.0.1:" in shell.run(
            line.replace("sqlite:////var/lib/remat/service.sqlite", url).replace("8750", "0")
        )
        first, make, serve = _blocks("Beyond loopback")
        shell.run(first.replace("…", url))
        shell.stop()
        assert shell.run(make).startswith("remat_")
        assert "ready on http://0.0.0.0:" in shell.run(serve + " --port 0")
    finally:
        shell.stop()


@pytest.mark.slow
def test_a_cluster_and_its_back_up_as_written(tmp_path: Path) -> None:
    """The lines of the cluster, of the back-up and of the restore, in their order: what was solved before is answered
    from the copy, and a solve that waited in it is taken up.
    """
    with PrivatePostgres() as private, ExitStack() as stack:
        shell = Shell(
            tmp_path, PATH=f"{private.bin}:{os.environ['PATH']}", PGHOST="127.0.0.1", PGPORT=str(private.port),
            PGUSER="postgres",
        )  # fmt: skip
        stack.callback(shell.stop)

        def here(line: str) -> str:
            line = line.replace("remat@db/", f"postgres@127.0.0.1:{private.port}/").replace("9100", "0")
            return shell.run(line + (" --port 0" if "remat-service serve" in line else ""))

        said = ""
        problem, waiting = at_peak(training_graph(6, cost=706)), at_peak(training_graph(9, cost=704))
        for line in _blocks("A cluster"):
            said = here(line) or said
            said = here("remat-service keys create team --new-tenant") if "migrate" in line else said
            if "migrate" in line:
                key = said.strip()
            if "serve" in line:
                server = said.split()[-1].replace("0.0.0.0", "127.0.0.1")
        assert "worker ready" in said
        http = httpx2.Client(base_url=server, timeout=60, trust_env=False, headers={"Authorization": f"Bearer {key}"})
        body = {"problem": problem.to_json(), "time_limit_s": 5}
        answer = http.post("/v1/solves", json=body, headers={"Prefer": "wait=30"}).json()
        checked(problem, answer)
        shell.stop(shell.running.pop())  # the worker
        queued = http.post("/v1/solves", json={"problem": waiting.to_json(), "time_limit_s": 5}).json()
        assert queued["status"] == "queued"
        dump, *restore = _blocks("Back-up and restore")
        here(dump)
        shell.stop()
        for line in restore:
            here(line)
        _, serve, worker = [line for line in _blocks("A cluster") if "remat-service" in line]
        http.base_url = here(serve).split()[-1].replace("0.0.0.0", "127.0.0.1")
        here(worker)
        assert http.get(f"/v1/solves/{answer['id']}").json() == answer
        assert http.post("/v1/solves", json=body).json()["cache"] == "hit"
        checked(waiting, http.get(f"/v1/solves/{queued['id']}", params={"wait": 30}).json())


@pytest.mark.slow
def test_a_standby_takes_no_writes(tmp_path: Path) -> None:
    """It says so, and still gives what is stored; that passes by itself. (An outage is in `test_cluster.py`.)"""
    with PrivatePostgres() as private, fresh_database(private.url) as url:

        def read_only(value: str) -> None:
            with psycopg.connect(private.url, autocommit=True) as connection:
                connection.execute(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
                connection.execute("SELECT pg_reload_conf()")

        with serving(tmp_path, database_url=url, workers=1, **SHORT) as server:
            answer = server.post(at_peak(training_graph(6, cost=707)), time_limit_s=5)[1]
            read_only("on")
            eventually(lambda: "the database takes no writes" in server.http.get("/readyz").text, 10)
            assert server.http.get("/readyz").status_code == 503
            assert server.get(answer["id"], 0) == (200, answer)
            read_only("off")
            eventually(lambda: server.http.get("/readyz").status_code == 200, 10)


@pytest.mark.thorough
def test_purge_by_version(tmp_path: Path) -> None:
    """What one version found is forgotten, pinned or not, while the service runs, its memory included."""
    with serving(tmp_path, workers=1) as own:
        problem = at_peak(training_graph(7, cost=701))
        given = [own.post(problem, time_limit_s=5)[1] for _ in range(4)][-1]
        assert own.http.put(f"/v1/plans/{given['digest']}/pin").status_code == 204
        assert _run(own.database_url, "store", "list").startswith(f"{solver_version()}  plans 1")
        assert "plans 0" in _run(own.database_url, "store", "purge", "--solver", "0.0.0")
        assert own.post(problem, time_limit_s=5)[1]["cache"] == "hit"
        assert "plans 1" in _run(own.database_url, "store", "purge", "--solver", solver_version())
        assert own.get(given["id"], 0)[0] == 410
        status, data = own.post(problem, time_limit_s=5)
        assert (status, data["cache"]) == (200, "miss")
        checked(problem, data)


@pytest.mark.thorough
def test_sqlite_backed_up_while_it_runs_and_restored(tmp_path: Path) -> None:
    """The copy, served, has the answers and the keys."""
    copy = tmp_path / "copy.sqlite"
    problem = at_peak(training_graph(7, cost=702))
    with serving(tmp_path, workers=1) as own:
        given = own.post(problem, time_limit_s=5)[1]
        key = _run(own.database_url, "keys", "create", "team", "--new-tenant")
        _run(own.database_url, "backup", str(copy))
        assert command(own.database_url, "backup", str(copy)).exit_code != 0
    with serving(tmp_path, database_url=f"sqlite:///{copy}", workers=1) as restored:
        assert restored.get(given["id"], 0) == (200, given)
        assert restored.post(problem, time_limit_s=5)[1]["cache"] == "hit"
        headers = {"Authorization": f"Bearer {key}"}
        assert restored.http.get("/v1/solves", headers=headers).status_code == 200
