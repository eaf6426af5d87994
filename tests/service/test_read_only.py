"""As in the image: root read-only, no home, kernels compiled ahead for any processor of the architecture."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from remat_ir import Chain, Problem, budget_at
from remat_service.processes.supervisor import scrubbed_environment
from remat_service.settings import Settings
from service.serving import checked, eventually, training_graph

DOCKERFILE = (Path(__file__).parents[2] / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
IMAGE = dict(re.findall(r"(NUMBA_[A-Z_]+)=(\S*)", DOCKERFILE[DOCKERFILE.rindex("FROM ") :]))
_CONFINE = """
mount --make-rprivate /
mount -t tmpfs tmpfs "$VOLUME"
mount -o remount,bind,ro /
exec "$@"
"""


def _problems() -> Iterator[tuple[str, Problem]]:
    graph = training_graph(12)
    for method in ("search", "blocks", "rotor"):
        yield method, Problem(graph, budget_at(graph, 0.6))
    stages = 5
    chain = Chain(
        forward_ns=(1000,) * stages, backward_ns=(2000,) * stages, activation_bytes=(100,) * (stages + 1),
        gradient_bytes=(100,) * (stages + 1), tape_bytes=(300,) * stages, forward_workspace_bytes=(0,) * stages,
        backward_workspace_bytes=(0,) * stages, link_bytes_per_s=10**8,
    )  # fmt: skip
    yield "rotor", Problem(replace(chain, link_bytes_per_s=None), 1400)
    yield "pofo", Problem(chain, 1400)
    yield "transfers", Problem(chain, 1400)


@pytest.fixture
def compiled(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder of every kernel, compiled by the Dockerfile's own command; kept for the next run of the tests."""
    kept = getattr(request.config, "cache", None)
    folder = Path(kept.mkdir("kernels")) if kept is not None else tmp_path / "kernels"
    command = re.findall(r"/opt/remat/bin/python (-m remat_solver\.warm)", DOCKERFILE)[0].split()
    environment = _environment(tmp_path, folder) | {"HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def _environment(volume: Path, kernels: Path) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, sys.path))
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": paths,
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/nonexistent",
        **IMAGE,
        "NUMBA_CACHE_DIR": str(kernels),
        "TMPDIR": str(volume),
        "REMAT_DATABASE_URL": f"sqlite:///{volume}/service.sqlite",
        "REMAT_NOTICE_S": "0",
    }


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob("*.nb?"))}


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="a mount namespace of its own needs root")
@pytest.mark.timeout(900)
def test_a_read_only_installation_solves_and_compiles_nothing(compiled: Path, tmp_path: Path) -> None:
    """Five methods solve; no kernel is compiled, in the forkserver or in a child, and numba's cache is as it was."""
    volume, before = tmp_path / "volume", _files(compiled)
    volume.mkdir()
    environment = _environment(volume, compiled) | {"VOLUME": str(volume)}
    log = tmp_path / "service.log"
    command = [sys.executable, "-m", "remat_service.cli", "serve", "--port", "0"]
    with log.open("w") as errors:
        server = subprocess.Popen(
            ["unshare", "-m", "sh", "-ec", _CONFINE, "sh", *command],
            env=environment, cwd="/", stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    try:
        line = server.stdout.readline()
        assert "ready on" in line, log.read_text()
        with httpx2.Client(base_url=line.split()[-1], timeout=60, trust_env=False) as http:
            for method, problem in _problems():
                body: dict[str, Any] = {"problem": problem.to_json(), "method": method, "time_limit_s": 3}
                reply = http.post("/v1/solves", json=body, headers={"Prefer": "wait=60"})
                assert reply.status_code == 200, (method, reply.text, log.read_text())
                checked(problem, reply.json())
    finally:
        server.terminate()
        server.wait(30)
        server.stdout.close()
    assert "compil" not in log.read_text()
    assert len(before) > 20
    assert _files(compiled) == before


@pytest.mark.thorough
def test_not_ready_before_the_kernels_are_there(tmp_path: Path) -> None:
    """With an empty cache it answers, and says that it is not ready and why; stopped then, it leaves no process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "kernels").mkdir()
    environment = {**_environment(tmp_path, tmp_path / "kernels"), "HOME": str(tmp_path)}
    log = tmp_path / "service.log"
    command = [sys.executable, "-m", "remat_service.cli", "serve", "--port", str(port)]
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=output, stderr=output)
    try:
        eventually(lambda: "compiling" in log.read_text(), 120)
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            assert http.get("/livez").status_code == 200
            reply = http.get("/readyz")
            assert (reply.status_code, "kernels" in reply.text) == (503, True)
        below = psutil.Process(server.pid).children(recursive=True)
        assert len(below) >= 2  # the forkserver, and what compiles
    finally:
        server.terminate()
        server.wait(60)
    assert psutil.wait_procs(below, 30)[1] == []
    assert "ready on" not in log.read_text()


@pytest.mark.thorough
def test_children_are_told_where_kernels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable by which the image has numba find what it has compiled."""
    assert len(IMAGE) >= 3
    for name, value in IMAGE.items():
        monkeypatch.setenv(name, value)
    assert IMAGE.items() <= scrubbed_environment(Settings()).items()
