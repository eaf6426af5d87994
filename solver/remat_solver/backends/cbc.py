"""CBC, as PuLP bundles it: a program written once as MPS, and the binary run on it; from the worker process only.

PuLP's `PULP_CBC_CMD` is not used: it writes 12 digits, drops CBC's log and cannot interrupt a run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..interchange import mps, read_solution, solution_text
from ..program import INFINITY, Floats, Program
from .worker import Link, tie_to_parent

_PREFIX = "remat-cbc-"
_INCREMENT = 1e-9
"""By how much a better solution must be better; CBC's own 1e-5 would be left out of its proof."""

_NUMBER = r"([-+]?[\d.]+(?:[eE][-+]?\d+)?)"
_POSSIBLE = re.compile(r"best possible " + _NUMBER)
_LOWER = re.compile(r"^(?:Lower bound:|Continuous objective value is) +" + _NUMBER)


def serve(kind: str, program: Program, members: dict[str, Any], arrays: Mapping[str, Any], link: Link) -> None:
    """Solve one message's program and say how it ended. Options are CBC commands, as {"cuts": "off"}."""
    if kind != "solve":
        raise ValueError("CBC solves no linear programs here")
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    try:
        _serve_in(folder, program, members, arrays.get("start"), link)
    finally:
        link.at_exit = None
        shutil.rmtree(folder, ignore_errors=True)


def _serve_in(folder: Path, program: Program, members: dict[str, Any], start: Floats | None, link: Link) -> None:
    # the offset stays outside: it is added to what CBC says
    (folder / "model.mps").write_text(mps(replace(program, offset=0.0)))
    command = [_binary(), str(folder / "model.mps"), "-timeMode", "elapsed"]
    if members["time_limit_s"] is not None:
        # it looks at the clock once in a thousand nodes, and its only solution is the one that it writes at the end
        limit = float(members["time_limit_s"])
        command += ["-sec", repr(max(0.6 * limit, limit - 1.5))]
    command += ["-ratio", repr(float(members["relative_gap"])), "-allow", repr(float(members["absolute_gap"]))]
    command += ["-inc", repr(_INCREMENT), "-randomC", str(int(members["seed"]) + 1)]
    if int(members["threads"]) > 1:
        command += ["-threads", str(int(members["threads"]))]
    if start is not None and not np.isnan(start).any():
        (folder / "start.sol").write_text(solution_text(start))
        command += ["-mips", str(folder / "start.sol")]
    command += ["-branch", "-printingOptions", "all", "-solution", str(folder / "found.sol")]
    # its own end is tied to this process, and its words go nowhere but here
    child = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
        preexec_fn=tie_to_parent(),
    )

    def interrupt() -> None:
        # at an interrupt CBC stops its search and carries out the commands that are left: it writes the solution
        with contextlib.suppress(OSError):
            child.send_signal(signal.SIGINT)

    def leave() -> None:
        with contextlib.suppress(OSError):
            child.kill()
        shutil.rmtree(folder, ignore_errors=True)

    link.at_exit, link.on_stop = leave, interrupt
    if link.stop.is_set():
        interrupt()
    try:
        bound = _follow(child, program, link)
        child.wait()
    finally:
        link.on_stop = None
        if child.poll() is None:
            child.kill()
            child.wait()
    _report(folder / "found.sol", child.returncode, bound, program, members, link)


def _follow(child: subprocess.Popen[str], program: Program, link: Link) -> float:
    """Read the log to its end for bounds, printed with about 6 digits: one unit of the last is taken off."""
    bound = -INFINITY
    assert child.stdout is not None
    for line in child.stdout:
        found = _POSSIBLE.search(line) or _LOWER.search(line)
        if found is None:
            continue
        printed = float(found.group(1))
        if abs(printed) < 1e40:
            bound = max(bound, printed - 1e-5 * max(1.0, abs(printed)) + program.offset)
            link.improved(bound=bound)
    return bound


def _report(found: Path, code: int, bound: float, program: Program, members: dict[str, Any], link: Link) -> None:
    if not found.exists():
        why = f"CBC ended with code {code} and wrote no solution"
        stopped = link.stop.is_set()
        said: dict[str, Any] = {"message": "CBC was stopped" if stopped else why}
        if np.isfinite(bound):
            said["bound"] = bound
        link.say("outcome" if stopped else "failed", said | {"status": "nothing_found"})
        return
    text = found.read_text()
    head = text.partition("\n")[0].strip()
    words = head.lower()
    said = {"message": f"CBC: {head}"}
    if "infeasible" in words:
        link.say("outcome", said | {"status": "infeasible"})
        return
    x = read_solution(text, [f"C{column}" for column in range(program.columns)]).x
    whole = program.violation(x) < 1e-4
    whole = whole and bool(np.all(np.abs(x - np.round(x))[program.integer] < 1e-4))
    if words.startswith("optimal") and whole:
        objective = program.objective(x)
        gap = max(float(members["absolute_gap"]), float(members["relative_gap"]) * abs(objective), 10 * _INCREMENT)
        said |= {"status": "optimal", "bound": max(bound, objective - gap)}
    elif "unbounded" in words:
        link.say("failed", said)
        return
    else:
        # "Stopped on time" with no integer solution still prints the last relaxation: told by its fractions
        said["status"] = "feasible" if whole else "nothing_found"
        if np.isfinite(bound):
            said["bound"] = bound
    link.say("outcome", said, {"x": x} if whole else {})


def _binary() -> str:
    import pulp

    path = str(pulp.PULP_CBC_CMD(msg=False).path)
    if not os.access(path, os.X_OK):
        raise FileNotFoundError(f"PuLP's CBC is not there to run: {path}")
    return path


def _sweep() -> None:
    """Remove the folders of workers that were killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(folder, ignore_errors=True)
