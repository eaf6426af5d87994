"""What a solver child has no use for is refused by the kernel: network, tracing, mounts, namespaces, keys, privileges.

A seccomp filter (seccomp(2)) is put on the forkserver before its first fork, and every process below inherits it.
Linux on x86-64 and AArch64; elsewhere, and where the system allows no filter, children run without one.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import socket
import struct
import sys

_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 4, 24, 38, 22
_MODE_FILTER, _CAPABILITIES_V3 = 2, 0x20080522
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF: LD|W|ABS, JMP|JEQ|K, JGE, JSET, RET|K
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_OTHER_ABI = 0x40000000  # x32's calls on x86-64
_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435  # its flags are in memory, where no filter sees them; the C library falls back to clone
_REFUSED = {
    # ptrace, mount, umount2, pivot_root, chroot, init_module, delete_module, finit_module, kexec_load, reboot,
    # add_key, request_key, keyctl, unshare, setns, perf_event_open, bpf, userfaultfd, open_by_handle_at,
    # process_vm_readv, process_vm_writev
    "x86_64": (101, 165, 166, 155, 161, 175, 176, 313, 246, 169, 248, 249, 250, 272, 308, 298, 321, 323, 304, 310, 311),
    "aarch64": (117, 40, 39, 41, 51, 105, 106, 273, 104, 142, 217, 218, 219, 97, 268, 241, 280, 282, 265, 270, 271),
}
_REFUSED_EVERYWHERE = (425, 428, 429, 430, 431, 432, 433, 438, 442, 467)
"""io_uring_setup, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, pidfd_getfd, mount_setattr, open_tree_attr.
"""


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


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """A service that runs as root gives its children none of root's rights; any other has none to lose."""
    number = 0
    while libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    none = (ctypes.c_uint32 * 6)()
    libc.capset((ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), none)


def _filter(machine: str) -> bytes:
    """Refused: calls of another ABI, those listed, namespaces of clone, and sockets but for local ones."""
    lines: list[tuple[int, str, str, int]] = [  # what, where to if so and if not (the next one), with what
        (_LOAD, "", "", _ARCHITECTURE),
        (_EQUAL, "", "refuse", _AUDIT[machine]),
        (_LOAD, "", "", _NUMBER),
        (_AT_LEAST, "refuse", "", _OTHER_ABI),
        *((_EQUAL, "refuse", "", number) for number in (*_REFUSED[machine], *_REFUSED_EVERYWHERE)),
        (_EQUAL, "missing", "", _CLONE3),
        (_EQUAL, "clone", "", _CLONE[machine]),
        (_EQUAL, "socket", "allow", _SOCKET[machine]),
    ]
    parts = {
        "clone": [(_LOAD, "", "", _FIRST_ARGUMENT), (_ANY_BIT, "refuse", "allow", _NAMESPACES)],
        "socket": [(_LOAD, "", "", _FIRST_ARGUMENT), (_EQUAL, "allow", "refuse", socket.AF_UNIX)],
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
