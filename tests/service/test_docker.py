"""The files of docker/: linted, and every command and setting that they name exists."""

from __future__ import annotations

import re
import subprocess
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
