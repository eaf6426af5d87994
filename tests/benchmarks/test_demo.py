"""The demo, whole: exit code 0, one table, the pictures, and a second run that is served from the store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_demo_keeps_its_word(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    code = f"import sys; sys.path.insert(0, {str(root)!r}); from benchmarks.demo import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "--time-limit", "15", "--store", str(tmp_path / "store.sqlite")]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1400)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("served from the cache") == 2
    assert ran.stdout.count("profiled 0 of") == 2
    assert "NO" not in ran.stdout.split("activation memory, times, gradients")[1]
    assert len(list((tmp_path / "demo-out").glob("memory-*.png"))) == 2
