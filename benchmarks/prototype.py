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
from remat_solver.deadline import Deadline
from remat_solver.incumbent import Incumbent
from remat_solver.search import Search

_SEARCH_S = 3.0
_SEARCH = f"""
import json, sys, graphs, lsolve
graph = graphs.get(sys.argv[1])
found = lsolve.ls(graph, int(graph.full_peak()[0] * float(sys.argv[2])), {_SEARCH_S}, 1)
print(json.dumps([found["iters"], found["cost"]]))
"""
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
        if not _understood(problem, fraction):
            return "–"
        command = [sys.executable, "ddd.py", str(self._write(problem)), str(fraction), f"{seconds:g}"]
        began = time.monotonic()
        try:
            done = self._call(command, 2 * seconds + 30)
        except subprocess.TimeoutExpired:
            return f"– / – / over {2 * seconds + 30:.0f}"
        found = _RESULT.search(done)
        if found is None:
            return "–"
        overhead = "–" if found[1] == "None" else f"{float(found[1]):.3f}"
        return f"{overhead} / {float(found[2]):.3f} / {time.monotonic() - began:.1f}"

    def beside(self, problem: Problem, fraction: float) -> str:
        """Both local searches alone, in turn: thousand moves per second, theirs and ours; both overheads in %."""
        if not _understood(problem, fraction):
            return "–"
        try:
            done = self._call([sys.executable, "-c", _SEARCH, str(self._write(problem)), str(fraction)], 60)
        except subprocess.TimeoutExpired:
            return "–"
        moves, cost = json.loads(done)
        search, incumbent = Search(problem.graph, problem.budget_bytes), Incumbent(problem, Deadline(_SEARCH_S))
        search.run(incumbent)
        total = problem.graph.total_cost_ns
        costs = ["–" if c is None else f"{100 * (c / total - 1):.2f}" for c in (cost, incumbent.cost_ns)]
        return f"{moves / _SEARCH_S / 1e3:.0f} / {search.moves / _SEARCH_S / 1e3:.0f}; {' / '.join(costs)}"

    def _write(self, problem: Problem) -> Path:
        path = Path(self._place.name) / "graph.json"
        path.write_text(json.dumps(problem.graph.to_json()))
        return path

    def _call(self, command: list[str], seconds: float) -> str:
        done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, timeout=seconds, check=False)
        return done.stdout


def _understood(problem: Problem, fraction: float) -> bool:
    graph = problem.graph
    plain = graph.values == graph.ops and not (graph.optional or graph.once or graph.keep or graph.fixed_bytes)
    return plain and not any(graph.op_workspace_bytes) and fraction <= 1
