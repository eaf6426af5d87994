"""A client in TypeScript, generated from openapi.yaml alone: the contract has all that one needs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from service.serving import serving
from service.test_tenants import cli

HERE = Path(__file__).parent
CONTRACT = HERE.parents[1] / "openapi.yaml"


@pytest.mark.slow
def test_a_generated_client_compiles_and_works(tmp_path: Path) -> None:
    """Strictly typed, it asks, waits, polls, lists, sweeps and reads a refusal; a wrong field does not compile."""
    build = tmp_path / "build"
    shutil.copytree(HERE / "typescript", build)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=build, capture_output=True, text=True, timeout=240, check=False)

    installed = run("npm", "install", "--silent", "--no-audit", "--no-fund")
    assert installed.returncode == 0, installed.stderr
    # fields with a default may be left out of a request
    made = run("npx", "openapi-typescript", "--default-non-nullable=false", str(CONTRACT), "-o", "api.d.ts")
    assert made.returncode == 0, made.stderr
    compiled = run("npx", "tsc", "-p", ".")
    assert compiled.returncode == 0, compiled.stdout
    with serving(tmp_path / "service", workers=1, require_keys="true") as own:
        said = run("node", "out/client.js", own.url, cli(own, "keys", "create", "page", "--new-tenant"))
    assert said.returncode == 0, said.stderr
    found = {line["what"]: line["value"] for line in map(json.loads, said.stdout.splitlines())}
    assert found["status"] == "optimal"
    assert found["cost_ns"] == found["polled"] == 640
    assert found["listed"] == 1
    assert found["refused"] == [422, "/problem/graph/keep/0"]

    source = build / "client.ts"
    source.write_text(source.read_text().replace("budget_bytes: 1300", "budget: 1300"))
    assert "budget" in run("npx", "tsc", "-p", ".").stdout
