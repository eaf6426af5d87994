"""The files of docker/: linted, what they name exists, their commands run, and root is read-only as in the image."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import kubernetes_validate
import psutil
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from yamllint import linter
from yamllint.config import YamlLintConfig

from remat_ir import Problem, budget_at
from remat_service.cli import app
from remat_service.processes.supervisor import scrubbed_environment
from remat_service.settings import Settings
from service.database import postgres
from service.serving import checked, even_chain, eventually, example, training_graph

DOCKER = Path(__file__).parents[2] / "docker"
FILES = sorted(path for path in DOCKER.rglob("*") if path.is_file())
LINT = YamlLintConfig("{extends: relaxed, rules: {line-length: {max: 130}}}")
DOCKERFILE = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ")
IMAGE = dict(re.findall(r"((?:REMAT|PYTHON|NUMBA)_?[A-Z_]+)=(\S*)", re.findall(r"^ENV PATH.*$", DOCKERFILE, re.M)[0]))
"""What the Dockerfile sets for all that runs in the image."""
NUMBA = {name: value for name, value in IMAGE.items() if name.startswith("NUMBA_")}
REMAT = [sys.executable, "-m", "remat_service.cli"]


def _environment(folder: Path, given: Mapping[str, str] = {}, **more: str) -> dict[str, str]:
    """What the image sets and is given, with this machine's paths, and one folder for all that it writes."""
    here = {
        "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOME": str(folder),
        "NUMBA_CACHE_DIR": str(folder), "REMAT_PORT": "0",
    }  # fmt: skip
    return {**IMAGE, **given, **here, **more}


@contextmanager
def _runs(*command: str, log: Path | None = None, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is told to end, and waited for; its standard error goes to a log, where there is one."""
    with ExitStack() as stack:
        errors = None if log is None else stack.enter_context(log.open("w"))
        process = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, **more)
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


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


@pytest.mark.thorough
def test_the_commands_of_the_image_run(tmp_path: Path) -> None:
    """What the Dockerfile sets and starts, and its health check, with another database and port."""
    assert IMAGE["REMAT_REQUIRE_KEYS"] == "true"
    folder = tmp_path / "folder"
    folder.mkdir()
    entry, command, check = (
        json.loads(re.findall(rf"^{form} (\[.*)$", DOCKERFILE, re.MULTILINE)[0])
        for form in ("ENTRYPOINT", "CMD", "HEALTHCHECK .*?CMD")
    )
    assert entry == ["remat-service"]
    environment = _environment(folder, REMAT_DATABASE_URL=f"sqlite:///{folder}/service.sqlite")
    make_key = [*REMAT, "keys", "create", "team", "--new-tenant"]
    subprocess.run(make_key, env=environment, cwd=folder, check=True, capture_output=True)
    with _runs(*REMAT, *command, env=environment, cwd=folder) as server:
        line = server.stdout.readline()
        assert "ready on http://0.0.0.0:" in line
        port = line.strip().rsplit(":", 1)[1]
        of_worker = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["worker"]["healthcheck"]["test"]
        assert "9100" in of_worker[-1]
        checks = [check, [*of_worker[1:-1], of_worker[-1].replace("9100", port)]]
        assert [command for command, *_ in checks] == ["python", "python"]
        # the port that is set; and a proxy that containers are given is not asked for what is inside of them
        set_here = (
            environment | {"REMAT_PORT": port} | dict.fromkeys(("http_proxy", "HTTP_PROXY"), "http://127.0.0.1:9")
        )
        for _, *words in checks:
            assert subprocess.run([sys.executable, *words], env=set_here, check=False, timeout=20).returncode == 0
    for _, *words in checks:
        assert subprocess.run([sys.executable, *words], env=set_here, check=False, capture_output=True).returncode


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
    with postgres() as secret["database-url"], ExitStack() as stack:

        def environment(name: str) -> dict[str, str]:
            rows = containers[name]["env"]
            given = {
                row["name"]: row["value"] if "value" in row else secret[row["valueFrom"]["secretKeyRef"]["key"]]
                for row in rows
            }
            return _environment(tmp_path, given, NUMBA_CACHE_LOCATOR_CLASSES="")

        def start(name: str) -> str:
            arguments = [argument.replace("9100", "0") for argument in containers[name]["args"]]
            process = stack.enter_context(_runs(*REMAT, *arguments, env=environment(name), cwd=tmp_path))
            return process.stdout.readline().strip()

        port = start("remat-server").rsplit(":", 1)[1]
        assert "worker ready" in start("remat-worker")
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0, trust_env=False) as http:
            assert http.get("/readyz").status_code == 200
            body = example("solve")
            assert http.post("/v1/solves", json=body).status_code == 401
            assert http.get("/metrics").status_code == 401
            made = subprocess.run(
                [*REMAT, *making],
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


# ---- root read-only, no home, kernels compiled ahead for any processor of the architecture

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
    chain = even_chain(5, 100)
    yield "rotor", Problem(chain, 1400)
    for method in ("pofo", "transfers"):
        yield method, Problem(replace(chain, link_bytes_per_s=10**8), 1400)


@pytest.fixture
def compiled(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder of every kernel, compiled by the Dockerfile's own command; kept for the next run of the tests."""
    kept = getattr(request.config, "cache", None)
    folder = Path(kept.mkdir("kernels")) if kept is not None else tmp_path / "kernels"
    command = re.findall(r"/opt/remat/bin/python (-m remat_solver\.warm)", DOCKERFILE)[0].split()
    environment = _read_only(tmp_path, folder, str(tmp_path))
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def _read_only(volume: Path, kernels: Path, home: str) -> dict[str, str]:
    """With kernels in a folder of their own, and open to all on loopback."""
    own = {"TMPDIR": str(volume), "REMAT_DATABASE_URL": f"sqlite:///{volume}/service.sqlite", "HOME": home}
    open_to_all = {"REMAT_HOST": "127.0.0.1", "REMAT_REQUIRE_KEYS": "false", "REMAT_NOTICE_S": "0"}
    return _environment(volume, NUMBA_CACHE_DIR=str(kernels), **own, **open_to_all)


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob("*.nb?"))}


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="a mount namespace of its own needs root")
@pytest.mark.timeout(900)
def test_a_read_only_installation_solves_and_compiles_nothing(compiled: Path, tmp_path: Path) -> None:
    """Five methods solve; no kernel is compiled, in the forkserver or in a child, and numba's cache is as it was."""
    volume, before = tmp_path / "volume", _files(compiled)
    volume.mkdir()
    environment = _read_only(volume, compiled, "/nonexistent") | {"VOLUME": str(volume)}
    log = tmp_path / "service.log"
    confined = ("unshare", "-m", "sh", "-ec", _CONFINE, "sh", *REMAT, "serve")
    with _runs(*confined, log=log, env=environment, cwd="/") as server:
        line = server.stdout.readline()
        assert "ready on" in line, log.read_text()
        with httpx2.Client(base_url=line.split()[-1], timeout=60, trust_env=False) as http:
            for method, problem in _problems():
                body: dict[str, Any] = {"problem": problem.to_json(), "method": method, "time_limit_s": 3}
                reply = http.post("/v1/solves", json=body, headers={"Prefer": "wait=60"})
                assert reply.status_code == 200, (method, reply.text, log.read_text())
                checked(problem, reply.json())
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
    environment = _read_only(tmp_path, tmp_path / "kernels", str(tmp_path))
    log = tmp_path / "service.log"
    with _runs(*REMAT, "serve", "--port", str(port), log=log, env=environment, cwd=tmp_path) as server:
        eventually(lambda: "compiling" in log.read_text(), 120)
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            assert http.get("/livez").status_code == 200
            reply = http.get("/readyz")
            assert (reply.status_code, "kernels" in reply.text) == (503, True)
        below = psutil.Process(server.pid).children(recursive=True)
        assert len(below) >= 2  # the forkserver, and what compiles
        server.terminate()
        assert "ready on" not in server.communicate(timeout=60)[0]
    assert psutil.wait_procs(below, 30)[1] == []


@pytest.mark.thorough
def test_children_are_told_where_kernels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable by which the image has numba find what it has compiled."""
    assert len(NUMBA) >= 3
    for name, value in NUMBA.items():
        monkeypatch.setenv(name, value)
    assert NUMBA.items() <= scrubbed_environment(Settings()).items()
