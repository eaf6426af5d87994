"""What solver children may not do: import from the working folder, reach the network, trace, mount, read secrets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from remat_service.processes.sandbox import landlock
from remat_service.processes.supervisor import scrubbed_environment
from remat_service.settings import Settings
from service.serving import checked, eventually, hard_graph, posed, serving

_TRIES = """
import ctypes, errno, os, signal, socket, subprocess, sys, threading
from remat_service.processes import sandbox
if "--free" not in sys.argv:
    assert sandbox.enter()
libc = ctypes.CDLL(None, use_errno=True)
def refused(act):
    try:
        act()
    except OSError as error:
        return error.errno == errno.EPERM
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
    "local": refused(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).close()),
}
def system(number, *arguments, needs=1):
    def act():
        if libc.syscall(number, *arguments) < needs:
            raise OSError(ctypes.get_errno(), "")
    return act
CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
def cloned(flags):
    def act():
        child = libc.syscall(CLONE, flags | signal.SIGCHLD, 0, 0, 0, 0)
        if child == 0:
            os._exit(0)
        if child < 0:
            raise OSError(ctypes.get_errno(), "")
        os.waitpid(child, 0)
    return act
cloned(0)()
threading.Thread(target=print, args=("",), kwargs={"end": ""}).start()
for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
    found[f"clone {bit:#x}"] = refused(cloned(bit | 0x10000000))
for name, number in dict(open_tree=428, move_mount=429, fsopen=430, fsmount=432, mount_setattr=442).items():
    found[name] = refused(system(number, -1, b"/nothing", -1, b"/nothing", 0))
found["unshare"] = refused(call("unshare", 0x10000000))
libc.syscall(435, 0, 0)
found["clone3 is not there"] = ctypes.get_errno() == errno.ENOSYS
found["capabilities"] = not [
    line for line in open("/proc/self/status") if line.startswith(("CapPrm", "CapEff")) and int(line.split()[1], 16)
]
left, right = socket.socketpair()
left.sendall(b"x")
assert right.recv(1) == b"x"
inherited = subprocess.run([sys.executable, "-c", "import socket; socket.socket()"], capture_output=True)
found["by what it starts"] = b"PermissionError" in inherited.stderr
found["trace"] = refused(call("ptrace", 0, 0, 0, 0))  # last: who is traced stops at its next signal
print(*sorted(name for name, was in found.items() if not was), sep=", ")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")
def test_the_filter_refuses_and_lets_through() -> None:
    """No socket but a local one, no tracing, mount or namespace, also by what it starts; threads and forks go."""
    said = {}
    for mode in ("--confined", "--free"):
        done = subprocess.run(
            [sys.executable, "-c", _TRIES, mode], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        said[mode] = done.stdout.strip().split(", ") if done.stdout.strip() else []
    assert not said["--confined"]
    assert {"inet", "inet6", "netlink", "by what it starts", "trace"} <= set(said["--free"])


@pytest.mark.thorough
def test_children_are_confined_and_import_nothing_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A numpy.py where the server was started is not run; forkserver and child have the filter; solving goes on."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # for the server; children have only what the service gives them
    for name in ("numpy", "json", "highspy"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w').close()\nraise SystemExit(3)\n")
    with serving(tmp_path, workers=1) as own:
        problem = posed(hard_graph(60, 4), 0.5)
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


_REACHES = """
import os, signal, socket, sqlite3, subprocess, sys, tempfile
from pathlib import Path
from remat_service.processes import sandbox
assert sandbox.enter()
own = Path(tempfile.mkdtemp())
assert sandbox.confine(str(own))
pid, file = int(sys.argv[1]), Path(sys.argv[2])
def reads(path, size=None):
    with open(path, "rb") as found:
        found.read() if size is None else found.seek(size)
def asks(statement, mode):
    found = sqlite3.connect(f"file:{file}?mode={mode}", uri=True)
    found.execute(statement).fetchone()
tries = {
    "environment": lambda: reads(f"/proc/{pid}/environ"),
    "memory": lambda: reads(f"/proc/{pid}/mem", 4096),
    "descriptors": lambda: os.readlink(f"/proc/{pid}/fd/0"),
    "another child's memory": lambda: reads(f"/proc/{sys.argv[3]}/mem", 4096),
    "reading the database": lambda: asks("SELECT count(*) FROM requests", "ro"),
    "writing to the database": lambda: asks("CREATE TABLE owned (x)", "rw"),
    "signals": lambda: os.kill(pid, 0),
    "signals to other children": lambda: os.kill(int(sys.argv[3]), 0),
    "a socket": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
    "other files": lambda: reads("/etc/passwd"),
    "a folder": lambda: os.listdir(file.parent),
    "writing elsewhere": lambda: (file.parent / "owned").write_text("x"),
    "writing to the installation": lambda: (Path(sandbox.__file__).parent / "owned").write_text("x"),
    "making a device": lambda: os.mkfifo(file.parent / "fifo"),
    "by what it starts": lambda: subprocess.run(["/bin/cat", file], check=True, stderr=subprocess.DEVNULL),
}
(own / "its own file").write_text("x")
(own / "folder").mkdir()
os.rename(own / "its own file", own / "folder" / "renamed")
assert b"python" in open("/proc/self/cmdline", "rb").read()
open("/dev/null", "w").write("x")
os.urandom(8)
open("/dev/urandom", "rb").read(8)
import xml.dom.minidom, highspy
subprocess.run([sys.executable, "-c", "pass"], check=True)
for name, reach in tries.items():
    try:
        reach()
    except (PermissionError, sqlite3.OperationalError, subprocess.CalledProcessError):
        continue
    print(name)
"""


@pytest.fixture(scope="module")
def reached(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a process confined as a solver child reaches of a running service."""
    folder = tmp_path_factory.mktemp("reached")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REMAT_SEAL_KEY", "a key of seals that no child may read")
        with serving(folder, workers=1, metrics_key="secret of the metrics") as own:
            service, (forkserver, *_) = own.process.pid, psutil.Process(own.process.pid).children()
            arguments = [str(service), str(folder / "service.sqlite"), str(forkserver.pid)]
            done = subprocess.run(
                [sys.executable, "-c", _REACHES, *arguments], capture_output=True, text=True, timeout=60, check=False
            )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_child_cannot_read_the_services_memory_and_environment(reached: list[str]) -> None:
    """They hold the key of seals, the key of metrics and the database's password."""
    assert not {"environment", "memory", "descriptors"} & set(reached)


@pytest.mark.thorough
@pytest.mark.skipif(landlock() < 6, reason="needs the Landlock of Linux 6.12")
def test_a_child_reaches_nothing_of_the_service(reached: list[str]) -> None:
    """Nor the database, other children, any other file, nor may it end the service; what solving needs is there."""
    assert reached == []


@pytest.mark.thorough
def test_no_entry_of_the_path_leads_into_the_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty and relative entries of PYTHONPATH mean the working folder: they are not handed on."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/somewhere", "", ".", "here", "/else"]))
    assert scrubbed_environment(Settings())["PYTHONPATH"] == os.pathsep.join(["/somewhere", "/else"])
