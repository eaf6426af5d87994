"""Plans turned off for a stretch, in this thread, and the calls counted that run by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_OFF: ContextVar[bool] = ContextVar("remat plans are off", default=False)


def plans_are_off() -> bool:
    """Whether calls run without their plans."""
    return _OFF.get()


@contextlib.contextmanager
def without_plans() -> Iterator[None]:
    """Inside, no call runs by a plan, and none is planned."""
    before = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(before)


class PlannedCalls:
    """How many calls have run by a plan."""

    number = 0


_COUNTED: list[PlannedCalls] = []


@contextlib.contextmanager
def planned_calls() -> Iterator[PlannedCalls]:
    """Count the calls that run by a plan, in all threads: autograd's run a reentrant checkpoint's module again."""
    counted = PlannedCalls()
    _COUNTED.append(counted)
    try:
        yield counted
    finally:
        _COUNTED.remove(counted)


def note_planned_call(more: int = 1) -> None:
    """A call runs by a plan; −1: one that was noted has not."""
    for counted in _COUNTED:
        counted.number += more
