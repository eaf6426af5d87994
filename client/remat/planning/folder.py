"""Files that are kept on this machine: written whole, and those used least lately deleted where they grow too many."""

from __future__ import annotations

import os
import stat
import time
import uuid
from contextlib import suppress
from pathlib import Path

MOST_BYTES = 512 * 2**20
"""Of the files under one folder, in whole blocks of `BLOCK` bytes; when there are more, a quarter is deleted."""

BLOCK = 4096
"""What a file of one byte takes on the usual file systems."""

UNUSED_S = 180 * 86400
"""A file that nothing has read or written for so long is deleted."""

ABANDONED_S = 3600
"""A file is written in less; one that is older, under a temporary name, is of a process that was killed."""

EVERY_S = 86400
"""So often a folder is looked through, and so often reading a file notes that it is in use."""

_TEMPORARY, _MARK = ".writing-", ".trimmed"


def write_whole(path: Path, content: bytes, *, replace_existing: bool = True, durable: bool = True) -> bool:
    """Write a file so that no reader ever sees a part of it: a temporary name, fsync, rename.

    With `replace_existing=False` the first writer wins; returns whether this one was written. Who may read it is what
    the process's umask says, as for any new file.

    Args:
        durable: whether it outlives a loss of power. Otherwise it may be empty then, which its reader must see.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if replace_existing:
            os.replace(name, path)
            return True
        try:
            os.link(name, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without links: of writers at once the last one wins
            if path.exists():
                return False
            os.replace(name, path)
        return True
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


def write_named(path: Path, content: bytes) -> None:
    """Write what a user has named: a file whole, through links to it; a pipe or a device as it is, and it stays one.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
    else:
        write_whole(Path(os.path.realpath(path)), content)


def used(path: Path) -> bytes:
    """What is in a file, which counts as used now.

    Raises:
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    with suppress(OSError):  # another user's
        if time.time() - path.stat().st_mtime > EVERY_S:
            os.utime(path)
    return content


def trim(folder: Path, most_bytes: int = MOST_BYTES) -> int:
    """Delete what killed writers have left in a folder, what is not used any more, and of the rest what is too much.

    Once a day; else it is one look at a file's time. A folder that cannot be read or written is left as it is.

    Returns:
        How many files were deleted.
    """
    now, mark = time.time(), folder / _MARK
    try:
        if now - mark.stat().st_mtime < EVERY_S:
            return 0
    except OSError:
        pass
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError:
        return 0
    found: list[tuple[float, int, str]] = []
    deleted = 0
    for inside, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(inside, name)
            with suppress(OSError):
                about = os.lstat(path)
                age = now - about.st_mtime
                if not stat.S_ISREG(about.st_mode):
                    continue
                if age > (ABANDONED_S if name.startswith(_TEMPORARY) else UNUSED_S):
                    os.unlink(path)
                    deleted += 1
                elif name != _MARK:
                    found.append((about.st_mtime, -(-max(1, about.st_size) // BLOCK) * BLOCK, path))
    total = sum(size for _, size, _ in found)
    left = total if total <= most_bytes else most_bytes * 3 // 4
    for _, size, path in sorted(found):
        if total <= left:
            break
        with suppress(OSError):
            os.unlink(path)
            deleted += 1
        total -= size
    return deleted
