"""Another solver on the same problem in the same run, for ratios: a folder with `ddd.py GRAPH FRACTION SECONDS`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from remat_ir import Problem

_RESULT = re.compile(r"DDD ub=(\S+) lb=(\S+)")


class Prototype:
    """Copies the folder, builds its local search, and runs it on graphs of one value per op."""

    def __init__(self, folder: Path) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="remat-prototype-")
        self._folder = Path(self._place.name) / "solver"
        shutil.copytree(folder, self._folder)
        command = ["g++", "-O3", "-march=native", "-shared", "-fPIC", "ls.cpp", "-o", "libls.so"]
        subprocess.run(command, cwd=self._folder, check=True)

    def run(self, problem: Problem, fraction: float, seconds: float) -> str:
        """Its overhead in %, its bound in % and its seconds, start-up included; – where it has nothing to say."""
        graph = problem.graph
        plain = graph.values == graph.ops and not (graph.optional or graph.once or graph.keep or graph.fixed_bytes)
        if not plain or any(graph.op_workspace_bytes) or fraction > 1:
            return "–"
        path = Path(self._place.name) / "graph.json"
        path.write_text(json.dumps(graph.to_json()))
        command = [sys.executable, "ddd.py", str(path), str(fraction), f"{seconds:g}"]
        began = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=self._folder, capture_output=True, text=True, timeout=2 * seconds + 30, check=False
            )
        except subprocess.TimeoutExpired:
            return f"– / – / over {2 * seconds + 30:.0f}"
        found = _RESULT.search(done.stdout)
        if found is None:
            return "–"
        overhead = "–" if found[1] == "None" else f"{float(found[1]):.3f}"
        return f"{overhead} / {float(found[2]):.3f} / {time.monotonic() - began:.1f}"
