"""What a solver child has no use for is refused by the kernel: network, tracing, mounting, keys, other kernel doors.

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

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # BPF: LD|W|ABS, JMP|JEQ|K, JMP|JGE|K, RET|K
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_OTHER_ABI = 0x40000000  # x32's calls on x86-64

_SOCKET = {"x86_64": 41, "aarch64": 198}
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED = {
    # ptrace, mount, umount2, pivot_root, chroot, init_module, delete_module, finit_module, kexec_load, reboot,
    # add_key, request_key, keyctl, unshare, setns, perf_event_open, bpf, userfaultfd, open_by_handle_at,
    # process_vm_readv, process_vm_writev, io_uring_setup
    "x86_64": (101, 165, 166, 155, 161, 175, 176, 313, 246, 169, 248, 249, 250, 272, 308, 298, 321, 323, 304, 310, 311,
               425),
    "aarch64": (117, 40, 39, 41, 51, 105, 106, 273, 104, 142, 217, 218, 219, 97, 268, 241, 280, 282, 265, 270, 271,
                425),
}  # fmt: skip


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def enter() -> bool:
    """Put the filter on this process and all that it starts; False where that is not possible."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _AUDIT or sys.maxsize < 2**32:
        return False
    text = _filter(machine)
    held = ctypes.create_string_buffer(text, len(text))
    program = _Program(len(text) // 8, ctypes.cast(held, ctypes.c_void_p))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return bool(prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0) == 0)


def _filter(machine: str) -> bytes:
    """Refused: calls of another ABI, those listed, and sockets but for local ones."""
    refused = _REFUSED[machine]
    lines = [(_LOAD, 0, 0, _ARCHITECTURE)]
    after = len(refused) + 5  # lines from the one after the first test to the refusal
    lines += [(_EQUAL, 0, after + 1, _AUDIT[machine]), (_LOAD, 0, 0, _NUMBER), (_AT_LEAST, after - 1, 0, _OTHER_ABI)]
    for position, number in enumerate(refused):
        lines.append((_EQUAL, after - 2 - position, 0, number))
    lines += [
        (_EQUAL, 0, 2, _SOCKET[machine]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 0, 1, socket.AF_UNIX),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    return b"".join(struct.pack("<HBBI", *line) for line in lines)
