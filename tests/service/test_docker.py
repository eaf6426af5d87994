"""The files of docker/: linted, and every command and setting that they name exists."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx2
import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from yamllint import linter
from yamllint.config import YamlLintConfig

from remat_service.cli import app
from remat_service.settings import Settings
from service.database import postgres
from service.serving import example

DOCKER = Path(__file__).parents[2] / "docker"
FILES = sorted(path for path in DOCKER.rglob("*") if path.is_file())
LINT = YamlLintConfig("{extends: relaxed, rules: {line-length: {max: 130}}}")


def _manifests(kind: str) -> list[Any]:
    files = sorted((DOCKER / "kubernetes").glob("*.yaml"))
    return [each for path in files for each in yaml.safe_load_all(path.read_text()) if each["kind"] == kind]


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

    commands: dict[str, Any] = typer.main.get_command(app).commands
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    named = [compose["services"]["worker"]["command"]]
    for document in _manifests("Deployment"):
        named += [c["args"] for c in document["spec"]["template"]["spec"]["containers"]]
    assert len(named) == 3
    for command, *arguments in named:
        options = {name for parameter in commands[command].params for name in parameter.opts}
        assert {a for a in arguments if a.startswith("--")} <= options


def test_nothing_runs_as_root() -> None:
    """The image, the compose services and the pods."""
    assert re.search(r"^USER 10001$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    for document in _manifests("Deployment"):
        assert document["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"] is True


def test_what_the_image_copies_is_there() -> None:
    """COPY lines name files of this repository; the shell script parses."""
    for line in (DOCKER / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (DOCKER.parent / source).exists(), source
    script = DOCKER / "slurm" / "worker.sbatch"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def _image() -> tuple[str, dict[str, str]]:
    """The Dockerfile, a command a line, and what it sets for all that runs in the image."""
    text = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ")
    line = next(row for row in text.splitlines() if row.startswith("ENV PATH"))
    return text, dict(re.findall(r"((?:REMAT|PYTHON|NUMBA)_?[A-Z_]+)=(\S*)", line))


@pytest.mark.thorough
def test_the_commands_of_the_image_run(tmp_path: Path) -> None:
    """What the Dockerfile sets and starts, and its health check, with another database and port."""
    text, env = _image()
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
    make_key = [*start, "keys", "create", "team", "--new-tenant"]
    subprocess.run(make_key, env=environment, cwd=folder, check=True, capture_output=True)
    server = subprocess.Popen([*start, *command], env=environment, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline()
        assert "ready on http://0.0.0.0:" in line
        port = line.strip().rsplit(":", 1)[1]
        healthy = [word.replace("8750", port) for word in check]
        assert healthy != check
        assert subprocess.run([sys.executable, *healthy[1:]], env=environment, check=False, timeout=20).returncode == 0
    finally:
        server.terminate()
        server.wait(20)
        server.stdout.close()
    assert subprocess.run([sys.executable, *healthy[1:]], env=environment, check=False, capture_output=True).returncode


@pytest.mark.thorough
def test_the_base_starts_as_documented(tmp_path: Path) -> None:
    """With the secret that the page has made: a server that refuses all, the command that makes a key, a solve."""
    documented = (DOCKER / "kubernetes" / "kustomization.yaml").read_text()
    secret = {name: f"{name} of thirty-two characters or more" for name in re.findall(r"-literal=([\w-]+)", documented)}
    making = re.findall(r"kubectl exec deploy/remat-server -- remat-service (.*)", documented)[0].split()
    containers = {
        document["metadata"]["name"]: document["spec"]["template"]["spec"]["containers"][0]
        for document in _manifests("Deployment")
    }
    here = {
        "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path),
        "NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_CACHE_LOCATOR_CLASSES": "", "REMAT_PORT": "0",
    }  # fmt: skip
    with postgres() as secret["database-url"], contextlib.ExitStack() as stack:

        def environment(name: str) -> dict[str, str]:
            rows = containers[name]["env"]
            given = {
                row["name"]: row["value"] if "value" in row else secret[row["valueFrom"]["secretKeyRef"]["key"]]
                for row in rows
            }
            return _image()[1] | given | here

        def start(name: str) -> str:
            arguments = [argument.replace("9100", "0") for argument in containers[name]["args"]]
            process = subprocess.Popen(
                [sys.executable, "-m", "remat_service.cli", *arguments],
                env=environment(name), cwd=tmp_path, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.callback(lambda: (process.terminate(), process.communicate(timeout=30)))
            return process.stdout.readline().strip()

        port = start("remat-server").rsplit(":", 1)[1]
        assert "worker ready" in start("remat-worker")
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0, trust_env=False) as http:
            assert http.get("/readyz").status_code == 200
            body = example("solve")
            assert http.post("/v1/solves", json=body).status_code == 401
            assert http.get("/metrics").status_code == 401
            made = subprocess.run(
                [sys.executable, "-m", "remat_service.cli", *making],
                env=environment("remat-server"), cwd=tmp_path, capture_output=True, text=True, check=True,
            )  # fmt: skip
            key = {"Authorization": f"Bearer {made.stdout.strip()}", "Prefer": "wait=30"}
            answer = http.post("/v1/solves", json=body, headers=key)
            assert (answer.status_code, answer.json()["status"] in ("optimal", "feasible")) == (200, True), answer.text


def test_the_manifests_are_what_kubernetes_takes() -> None:
    """Each against the schema of its kind, unknown fields refused; the kustomization names every file."""
    folder = DOCKER / "kubernetes"
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == files
    kinds = []
    for path in sorted(folder / name for name in files):
        for document in yaml.safe_load_all(path.read_text()):
            kubernetes_validate.validate(document, "1.30", strict=True)
            kinds.append(document["kind"])
    assert sorted(kinds) == [
        "Deployment", "Deployment", "NetworkPolicy", "NetworkPolicy", "PodDisruptionBudget", "PodDisruptionBudget",
        "Service",
    ]  # fmt: skip
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Service", "spec": {"port": 1}}, "1.30", strict=True)


def test_pods_are_probed_confined_and_spared() -> None:
    """Probes on every container, seccomp, a policy for traffic and for disruptions that matches each deployment."""
    for deployment in _manifests("Deployment"):
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys()
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            ports = {port["containerPort"] for port in container["ports"]}
        policies = [p for p in _manifests("NetworkPolicy") if p["spec"]["podSelector"]["matchLabels"] == labels]
        assert [{q["port"] for rule in p["spec"]["ingress"] for q in rule["ports"]} for p in policies] == [ports]
        spared = [p for p in _manifests("PodDisruptionBudget") if p["spec"]["selector"]["matchLabels"] == labels]
        assert len(spared) == 1


def test_the_lock_is_of_the_constraints() -> None:
    """Each version as in constraints.txt, each with hashes; every package that the service asks for is there."""
    lock = (DOCKER / "requirements.lock").read_text()
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE))
    wanted = dict(re.findall(r"^([\w.-]+)==(\S+)", (DOCKER.parent / "constraints.txt").read_text(), re.MULTILINE))
    known = {canonicalize_name(name): version for name, version in wanted.items()}
    assert {n: v for n, v in pins.items() if known.get(canonicalize_name(n), v) != v} == {}
    for block in re.split(r"\n(?=\S)", lock):
        assert block.startswith("#") or "--hash=sha256:" in block, block
    project = tomllib.loads((DOCKER.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = project["dependencies"] + [
        row for name in ("solver", "service", "telemetry", "oidc") for row in extras[name]
    ]
    names = {canonicalize_name(Requirement(row).name) for row in asked} - {"remat"}
    assert names <= {canonicalize_name(name) for name in pins}


def test_compose_is_valid_by_its_specification(tmp_path: Path) -> None:
    """The schema of the compose specification, as it is published; a misspelt key is refused."""
    check = ["check-jsonschema", "--builtin-schema", "vendor.compose-spec"]
    path = str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"]
    here = {**os.environ, "PATH": path}
    done = subprocess.run([*check, str(DOCKER / "compose.yaml")], env=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((DOCKER / "compose.yaml").read_text().replace("ports:", "port:"))
    refused = subprocess.run([*check, str(wrong)], env=here, capture_output=True, text=True, check=False)
    assert "'port' was unexpected" in refused.stdout
