"""Starting solver children when the forkserver hangs or dies, and listening without leaving anything behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from remat_service.notify import Notifier
from remat_service.processes.supervisor import Supervisor
from remat_service.settings import Settings


async def _forkserver() -> psutil.Process:
    (found,) = [p for p in psutil.Process(os.getpid()).children() if "forkserver" in " ".join(p.cmdline())]
    return found


@pytest.mark.thorough
async def test_a_hung_forkserver_is_replaced_and_every_caller_gets_a_child_of_its_own() -> None:
    """Stopped while three wait: each is given a child of the next forkserver, none the child of another."""
    supervisor = Supervisor(Settings(), start_limit_s=2.0)
    try:
        await supervisor.warm()
        hung = await _forkserver()
        hung.send_signal(signal.SIGSTOP)
        children = await asyncio.gather(*(supervisor.start_child(5) for _ in range(3)))
        assert len({child.pid for child in children}) == 3
        assert not hung.is_running() or hung.status() == psutil.STATUS_ZOMBIE
        parent = await _forkserver()
        assert {p.pid for p in parent.children()} == {child.pid for child in children}
        for child in children:  # its socket is its own: closing it ends this child and no other
            child.link.close()
            async with asyncio.timeout(10):
                await child.died.wait()
    finally:
        await supervisor.close()


@pytest.mark.thorough
async def test_close_leaves_nobody_waiting() -> None:
    """A caller that waits for a child when the supervisor is closed is refused at once."""
    supervisor = Supervisor(Settings())
    await supervisor.warm()
    (await _forkserver()).send_signal(signal.SIGSTOP)
    asked = [asyncio.create_task(supervisor._ordered(5)) for _ in range(2)]
    await asyncio.sleep(0.1)
    await supervisor.close()
    for task in asked:
        with pytest.raises(OSError, match="died"):
            await task


async def test_a_killed_forkserver_is_replaced(tmp_path: Path) -> None:
    """SIGKILL between two children: the next one comes from a fresh forkserver."""
    supervisor = Supervisor(Settings())
    try:
        first = await supervisor.start_child(5)
        (await _forkserver()).kill()
        async with asyncio.timeout(10):
            await first.died.wait()
        second = await supervisor.start_child(5)
        assert second.pid != first.pid
        assert second.status is None
    finally:
        await supervisor.close()


async def test_listening_leaves_nothing_behind() -> None:
    """Ids that nobody knows, cancelled waits, two listeners on one key: the last to leave takes the key along."""
    notifier = Notifier()
    with notifier.subscribe("a") as first, notifier.subscribe("a", "b") as second:
        first.reset()
        notifier.notify_here("a", "unknown")
        assert await first.wait(0)
        assert await second.wait(0)
        second.reset()
        assert not await second.wait(0)
        notifier.notify("b")
        assert await second.wait(1)
        assert len(notifier.keys()) == 2
    assert len(notifier.keys()) == 0
    task = asyncio.create_task(_listen(notifier))
    await asyncio.sleep(0)
    assert len(notifier.keys()) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(notifier.keys()) == 0


async def _listen(notifier: Notifier) -> None:
    with notifier.subscribe("c") as changes:
        await changes.wait(5)
