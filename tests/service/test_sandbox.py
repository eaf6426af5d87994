"""What solver children may not do: import from the working folder, reach the network, trace, mount."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from remat_ir import Problem, budget_at
from remat_service.processes.supervisor import scrubbed_environment
from remat_service.settings import Settings
from service.serving import checked, eventually, hard_graph, serving

_TRIES = """
import ctypes, os, socket, subprocess, sys
from remat_service.processes import sandbox
if "--free" not in sys.argv:
    assert sandbox.enter()
libc = ctypes.CDLL(None, use_errno=True)
def refused(act):
    try:
        act()
    except PermissionError:
        return True
    return False
def call(name, *arguments):
    def act():
        if getattr(libc, name)(*arguments) != 0:
            raise OSError(ctypes.get_errno(), name)
    return act
found = {
    "inet": refused(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).close()),
    "inet6": refused(lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).close()),
    "netlink": refused(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close()),
}
left, right = socket.socketpair()
left.sendall(b"x")
assert right.recv(1) == b"x"
inherited = subprocess.run([sys.executable, "-c", "import socket; socket.socket()"], capture_output=True)
found["started from it"] = b"PermissionError" in inherited.stderr
found["trace"] = refused(call("ptrace", 0, 0, 0, 0))  # last: who is traced stops at its next signal
print(sorted(name for name, was in found.items() if was))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")
def test_the_filter_refuses_and_lets_through() -> None:
    """No socket but a local one, no tracing, and the same for what is started from it; without it all of that goes."""
    said = {}
    for mode in ("--confined", "--free"):
        done = subprocess.run(
            [sys.executable, "-c", _TRIES, mode], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        said[mode] = done.stdout.strip()
    assert said["--confined"] == str(["inet", "inet6", "netlink", "started from it", "trace"])
    assert said["--free"] == "[]"


def test_children_are_confined_and_import_nothing_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A numpy.py where the server was started is not run; forkserver and child have the filter; solving goes on."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # for the server; children have only what the service gives them
    for name in ("numpy", "json", "highspy"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w').close()\nraise SystemExit(3)\n")
    with serving(tmp_path, workers=1) as own:
        graph = hard_graph(60, 4)
        problem = Problem(graph, budget_at(graph, 0.5))
        _, posted = own.post(problem, wait=0, time_limit_s=8, max_gap=0)
        eventually(lambda: own.get(posted["id"], 0)[1]["cost_ns"])
        below = psutil.Process(own.process.pid).children(recursive=True)
        assert len(below) >= 2
        for process in below:
            status = Path(f"/proc/{process.pid}/status").read_text()
            assert "NoNewPrivs:\t1" in status
            assert "Seccomp:\t2" in status
        checked(problem, own.get(posted["id"], 30)[1])  # engines, which are processes of their own, have run by now
    assert not (tmp_path / "was-run").exists()


def test_no_entry_of_the_path_leads_into_the_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty and relative entries of PYTHONPATH mean the working folder: they are not handed on."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/somewhere", "", ".", "here", "/else"]))
    assert scrubbed_environment(Settings())["PYTHONPATH"] == os.pathsep.join(["/somewhere", "/else"])
