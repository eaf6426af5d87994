"""A model whose plain step does not fit the memory that is left gets a plan there, and trains the same gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LEFT_MIB = 240


def child(folder: Path, how: str, left: int) -> subprocess.CompletedProcess[str]:
    # large blocks are given back at once, so that the address space in use is what the step needs
    environ = os.environ | {
        "REMAT_CACHE_DIR": str(folder),
        "MALLOC_MMAP_THRESHOLD_": str(2**20),
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(Path(__file__).with_name("starved.py")), how, str(left)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environ)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="address-space limits are Linux's")
def test_a_step_that_does_not_fit_gets_a_plan_and_trains(tmp_path: Path) -> None:
    free = child(tmp_path, "plain", 0)
    assert free.returncode == 0, free.stderr
    starved = child(tmp_path, "plain", LEFT_MIB)
    assert starved.returncode != 0
    assert "allocate memory" in starved.stderr
    planned = child(tmp_path, "planned", LEFT_MIB)
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout == free.stdout
