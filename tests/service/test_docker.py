"""The files of docker/: linted, and every command and setting that they name exists."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

from remat_service.cli import app
from remat_service.settings import Settings

DOCKER = Path(__file__).parents[2] / "docker"
FILES = sorted(path for path in DOCKER.rglob("*") if path.is_file())
LINT = YamlLintConfig("{extends: relaxed, rules: {line-length: {max: 130}}}")


def test_yaml_is_clean() -> None:
    """yamllint finds nothing."""
    for path in FILES:
        if path.suffix == ".yaml":
            assert list(linter.run(path.read_text(), LINT)) == [], path


def test_settings_exist() -> None:
    """Every REMAT_ variable is one of the service's."""
    known = {f"REMAT_{name.upper()}" for name in Settings.model_fields} | {"REMAT_DATABASE_PASSWORD"}
    for path in FILES:
        assert set(re.findall(r"REMAT_[A-Z_]+", path.read_text())) <= known, path


def test_commands_exist() -> None:
    """serve and worker are commands, and the options given to them are theirs."""
    import typer.main

    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    named = [compose["services"]["worker"]["command"]]
    for document in yaml.safe_load_all((DOCKER / "kubernetes" / "remat.yaml").read_text()):
        if document["kind"] == "Deployment":
            named += [c["args"] for c in document["spec"]["template"]["spec"]["containers"]]
    assert len(named) == 3
    for command, *arguments in named:
        options = {name for parameter in commands[command].params for name in parameter.opts}
        assert {a for a in arguments if a.startswith("--")} <= options


def test_nothing_runs_as_root() -> None:
    """The image, the compose services and the pods."""
    assert re.search(r"^USER 10001$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    for document in yaml.safe_load_all((DOCKER / "kubernetes" / "remat.yaml").read_text()):
        if document["kind"] == "Deployment":
            assert document["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"] is True


def test_what_the_image_copies_is_there() -> None:
    """COPY lines name files of this repository; the shell script parses."""
    for line in (DOCKER / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (DOCKER.parent / source).exists(), source
    script = DOCKER / "slurm" / "worker.sbatch"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_the_commands_of_the_image_run(tmp_path: Path) -> None:
    """What the Dockerfile sets and starts, and its health check, with another database and port."""
    text = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ")
    env = dict(
        re.findall(r"((?:REMAT|PYTHON|NUMBA)_?[A-Z_]+)=(\S+)", next(row for row in text.splitlines() if "ENV" in row))
    )
    assert env["REMAT_REQUIRE_KEYS"] == "true"
    folder = tmp_path / "folder"
    folder.mkdir()
    base = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(folder)}
    own = {
        "REMAT_DATABASE_URL": f"sqlite:///{folder}/service.sqlite",
        "REMAT_PORT": "0",
        "NUMBA_CACHE_DIR": str(folder),
    }
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[0])
    command = json.loads(re.findall(r"^CMD (.*)$", text, re.MULTILINE)[0])
    check = json.loads(re.findall(r"^HEALTHCHECK .*?CMD (.*)$", text, re.MULTILINE)[0])
    assert entry == ["remat-service"]
    start = [sys.executable, "-m", "remat_service.cli"]
    environment = base | env | own
    subprocess.run([*start, "keys", "create", "team"], env=environment, cwd=folder, check=True, capture_output=True)
    server = subprocess.Popen([*start, *command], env=environment, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert "ready on http://0.0.0.0:" in line
        port = line.strip().rsplit(":", 1)[1]
        healthy = [word.replace("8750", port) for word in check]
        assert healthy != check
        assert subprocess.run([sys.executable, *healthy[1:]], env=environment, check=False, timeout=20).returncode == 0
    finally:
        server.terminate()
        server.wait(20)
        server.stdout.close()  # type: ignore[union-attr]
    assert subprocess.run([sys.executable, *healthy[1:]], env=environment, check=False, capture_output=True).returncode
