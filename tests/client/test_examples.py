"""The examples run as they stand, each in a process of its own, and train as plain training does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str, folder: Path) -> str:
    """What a command prints; it must end well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "REMAT_CACHE_DIR": str(folder), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain_loop", "torch_compile", "accelerate_loop"])
def test_example_trains(name: str, tmp_path: Path) -> None:
    """Three steps, each with a loss."""
    assert run(str(EXAMPLES / f"{name}.py"), folder=tmp_path).count("step ") == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformers_trainer", "lightning_module"])
def test_trainer_losses_are_equal(name: str, tmp_path: Path) -> None:
    """The real library, from a config to three steps; the example itself asserts equal losses."""
    out = run(str(EXAMPLES / f"{name}.py"), folder=tmp_path)
    plain, planned = (re.findall(r"[\d.]+", line) for line in out.splitlines()[-2:])
    assert plain == planned
    assert len(plain) == 3


@pytest.mark.slow
def test_the_largest_batch(tmp_path: Path) -> None:
    """Each try is told; the result is one that was tried, and its measured peak is inside the budget."""
    out = run(str(EXAMPLES / "largest_batch.py"), folder=tmp_path)
    found = re.search(r"a batch of (\d+) trains within 32.0 MiB: overhead .* ([\d.]+) MiB measured", out)
    assert found is not None, out
    assert f"tried {found[1]}: trains inside the budget" in out
    assert float(found[2]) <= 32


@pytest.mark.slow
def test_two_ranks_share_a_plan(tmp_path: Path) -> None:
    """DDP over gloo: both ranks train three steps by the first rank's plan."""
    command = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone")
    out = run(*command, str(EXAMPLES / "ddp.py"), folder=tmp_path)
    assert out.count("rank 0 step") == 3
    assert out.count("rank 1 step") == 3
