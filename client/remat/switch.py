"""Plans turned off for a stretch, in this thread: what is enabled runs as it would without remat."""

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
