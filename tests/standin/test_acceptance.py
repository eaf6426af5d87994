"""The acceptance test for GPUs, on the stand-in: the program works, and fails where it should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from remat.cli.doctor import expected, verdicts

pytestmark = pytest.mark.standin
ROOT = Path(__file__).parents[2]
RUN = [sys.executable, str(ROOT / "tests" / "gpu" / "run.py")]
CASES = ["bits fp32", "memory attention", "limit attention", "transfers", "ranks fsdp2"]


@pytest.mark.timeout(900)
def test_cases_hold_and_the_report_fails_for_what_did_not_run(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = [*RUN, "--stand-in", "--report", str(path), *CASES]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert ended.returncode == 1, ended.stderr
    report = json.loads(path.read_text())
    found = {verdict.case: verdict for verdict in verdicts(report)}
    assert [name for name in CASES if not found[name].fine] == [], ended.stdout
    assert {name for name, verdict in found.items() if not verdict.fine} == {
        "record",
        *(set(expected(report["record"])) - set(CASES)),
    }
    assert f"{len(found) - len(CASES)} fail" in ended.stdout


def test_nothing_is_green_where_there_is_no_device(tmp_path: Path) -> None:
    ended = subprocess.run([*RUN, "--report", str(tmp_path / "report.json")], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "no case ran" in ended.stdout
    assert not (tmp_path / "report.json").exists()
