"""What a solver child has no use for is refused by the kernel: files, network, other processes, privileges.

`enter` puts a seccomp filter (seccomp(2)) on the forkserver before its first fork; every process below inherits it. It
lists the system calls that are let through. `confine` puts a Landlock domain (landlock(7)) on each child: it reads the
installation, its libraries and its own part of /proc, writes to its own folder, and neither signals nor traces a
process outside of its domain. Linux on x86-64 and AArch64; what holds on which kernel is on the page of threats.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import struct
import sys
import sysconfig
from collections.abc import Iterable

_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 4, 24, 38, 22
_MODE_FILTER, _CAPABILITIES_V3 = 2, 0x20080522
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF: LD|W|ABS, JMP|JEQ|K, JGE, JSET, RET|K
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24  # offsets in struct seccomp_data
_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435  # its flags are in memory, where no filter sees them; the C library falls back to clone
_IOCTL = {"x86_64": 16, "aarch64": 29}
_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Of ioctl: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. TIOCSTI would type into a terminal."""
_ALLOWED = {
    # Files, memory, threads, time, signals, pipes and open sockets, forks and execve, Landlock, and what says who one
    # is. Not socket, connect, bind, listen and accept; mounts, chroot, modules, keys, bpf, io_uring, ptrace, perf,
    # process_vm_*, pidfd_*, unshare, setns, set*id, personality, userfaultfd, open_by_handle_at.
    "x86_64": "0-15 17-28 32-40 44-48 51-55 57-63 72-91 95-100 102 104 107-112 115 118 120-121 124-125 127-128 "
    "130-132 137-138 140-150 157-158 160 186-187 200-204 213 217-219 222-226 228-235 237 239 247 "
    "257-258 262-271 273-276 280-281 283-287 290-293 295-296 299 302 307 309 314-319 322 324-328 332 "
    "334 436-437 439 441 444-446 449 452 454-456",
    "aarch64": "17 19-25 32 34-38 43-50 52-53 56-57 59 61-73 76-80 82-83 85-88 90 93-96 98-103 107-111 113-115 "
    "118-137 139-141 148 150 153-158 160 163-169 172-179 199 204-216 221-222 226-229 232-233 235-236 "
    "243 260-261 269 274-279 281 283-287 291 293 436-437 439 441 444-446 449 452 454-456",
}
_NEWER = 468
"""From here on calls are answered as a kernel does that lacks them, so that a newer C library falls back."""

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _PATH_BENEATH = 444, 445, 446, 1
_EXECUTE, _WRITE, _READ, _READ_FOLDER = 1, 2, 4, 8
_OF_FILES = _EXECUTE | _WRITE | _READ | 1 << 14 | 1 << 15
"""Rights that a rule about a file may name: those on contents, truncation and device controls."""
_FILES = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many rights to files each version of Landlock knows; the last for all that follow."""
_TCP, _SCOPES = 0b11, 0b11  # bind and connect; abstract sockets and signals


def hide() -> None:
    """Let no other process of the same user read this one: its environment and memory hold the service's secrets.

    Clearing `os.environ` would not do: /proc shows the environment that a process was started with.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def enter() -> bool:
    """Put the filter on this process and all that it starts, without capabilities; False where that is not possible."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _AUDIT or sys.maxsize < 2**32:
        return False
    text = _filter(machine)
    held = ctypes.create_string_buffer(text, len(text))
    program = _Program(len(text) // 8, ctypes.cast(held, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    _drop_capabilities(libc)
    return bool(libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0) == 0)


def landlock() -> int:
    """The version of Landlock that the kernel has, 0 for none: 4 refuses TCP, 6 signals to other processes."""
    if sys.platform != "linux" or platform.machine() not in _AUDIT:
        return 0
    return max(0, int(ctypes.CDLL(None, use_errno=True).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)))


def confine(folder: str) -> bool:
    """Let this process and all that it starts write to a folder alone, and read what solving needs; False without
    Landlock.
    """
    version = landlock()
    if not version:
        return False
    rights = (1 << _FILES.get(version, _FILES[5])) - 1
    parts = (rights, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    attributes = struct.pack("=QQQ", *parts)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    libc = ctypes.CDLL(None, use_errno=True)
    rules = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return False
    try:
        for path, allowed in (
            *((each, _EXECUTE | _READ | _READ_FOLDER) for each in _installation()),
            ("/proc/self", _READ | _READ_FOLDER),
            *((path, _READ) for path in ("/proc/meminfo", "/proc/cpuinfo", "/proc/stat")),
            ("/dev/null", _READ | _WRITE),
            ("/dev/urandom", _READ),
            (folder, rights),
        ):
            _let(libc, rules, path, allowed & rights)
        return bool(libc.syscall(_RESTRICT_SELF, rules, 0) == 0)
    finally:
        os.close(rules)


def _installation() -> Iterable[str]:
    """Where programs, packages, libraries and compiled kernels are."""
    named = [*os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), os.environ.get("NUMBA_CACHE_DIR", "")]
    packages = [path for path in (*sys.path, *named) if os.path.isabs(path)]
    prefixes = [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()]
    system = ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/sys/devices/system/cpu"]
    return sorted({os.path.realpath(path) for path in (*packages, *prefixes, *system) if os.path.exists(path)})


def _let(libc: ctypes.CDLL, rules: int, path: str, allowed: int) -> None:
    """Allow some rights below a path; one that is not there needs none."""
    with contextlib.suppress(FileNotFoundError):
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            rule = struct.pack("=Qi", allowed if os.path.isdir(path) else allowed & _OF_FILES, handle)
            if libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0) != 0:
                raise OSError(ctypes.get_errno(), "a solver child can't be confined", path)
        finally:
            os.close(handle)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """A service that runs as root gives its children none of root's rights; any other has none to lose."""
    number = 0
    while libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    none = (ctypes.c_uint32 * 6)()
    libc.capset((ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), none)


def _filter(machine: str) -> bytes:
    """Let through: the calls that are listed, clone without namespaces, and a few requests of ioctl."""
    ranges = [[int(end) for end in part.split("-")] for part in _ALLOWED[machine].split()]
    lines: list[tuple[int, str, str, int]] = [  # what, where to if so and if not (the next one), with what
        (_LOAD, "", "", _ARCHITECTURE),
        (_EQUAL, "", "refuse", _AUDIT[machine]),
        (_LOAD, "", "", _NUMBER),
        (_EQUAL, "missing", "", _CLONE3),
        (_EQUAL, "clone", "", _CLONE[machine]),
        (_EQUAL, "ioctl", "", _IOCTL[machine]),
    ]
    for first, *last in ranges:  # in order: what is below the next range is in none
        lines += [(_AT_LEAST, "", "refuse", first), (_AT_LEAST, "", "allow", (last or [first])[0] + 1)]
    lines.append((_AT_LEAST, "missing", "refuse", _NEWER))
    parts = {
        "clone": [(_LOAD, "", "", _FIRST_ARGUMENT), (_ANY_BIT, "refuse", "allow", _NAMESPACES)],
        "ioctl": [
            (_LOAD, "", "", _SECOND_ARGUMENT),
            *((_EQUAL, "allow", "", request) for request in _REQUESTS),
            (_EQUAL, "refuse", "refuse", 0),
        ],
        "allow": [(_RETURN, "", "", _ALLOW)],
        "refuse": [(_RETURN, "", "", _ERRNO | errno.EPERM)],
        "missing": [(_RETURN, "", "", _ERRNO | errno.ENOSYS)],
    }
    at = {}
    for name, part in parts.items():
        at[name] = len(lines)
        lines += part

    def jump(to: str, position: int) -> int:
        return at[to] - position - 1 if to else 0

    return b"".join(
        struct.pack("<HBBI", what, jump(then, position), jump(otherwise, position), value)
        for position, (what, then, otherwise, value) in enumerate(lines)
    )
