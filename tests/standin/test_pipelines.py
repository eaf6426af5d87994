"""Reserved bytes of pipelines: two ranks, each a process with a stand-in of its own, over gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from remat_ir import readable

pytestmark = pytest.mark.standin


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_a_pipeline_reserves_what_its_rehearsal_did(name: str, tmp_path: Path) -> None:
    """On devices that are limited to the budgets; plans that were not rehearsed reserve more than these."""
    script = Path(__file__).with_name("ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path), name],
            env={**os.environ, "REMAT_CACHE_DIR": str(tmp_path / f"cache-{rank}")},
            stderr=(tmp_path / f"errors-{rank}").open("w"),
            start_new_session=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            process.wait(timeout=380)
    finally:
        for process in ranks:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # one that waits for the other does not end by itself
            process.wait()
    said = "\n".join((tmp_path / f"errors-{rank}").read_text()[-2000:] for rank in range(2))
    assert [process.returncode for process in ranks] == [0, 0], said
    found = [json.loads((tmp_path / f"found-{rank}").read_text()) for rank in range(2)]
    for rank in found:
        assert rank["seen"] == pytest.approx(rank["foreseen"], rel=0.01)
        assert rank["foreseen"] <= rank["budget"]
        assert rank["watched"][0] == pytest.approx(rank["watched"][1], rel=1e-4)
        assert rank["learned"][0] == rank["learned"][1]
        assert f"{readable(rank['foreseen'])} reserved" in rank["text"]
    less = [rank for rank in found if rank["budget"] < rank["plain"]]
    assert less
    for rank in less:
        assert rank["overhead"] > 0
        assert rank["bold"] > rank["budget"]
