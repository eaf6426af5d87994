"""The version gate: which torch this is, and what it lacks of what a module here relies on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

OLDEST = (2, 13)


def version() -> tuple[int, int]:
    """The torch found here, as (major, minor)."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


if version() < OLDEST:
    raise ImportError(f"remat needs torch {OLDEST[0]}.{OLDEST[1]} or later, and {torch.__version__} is installed")


def lacking(
    wanted: Sequence[tuple[Callable[..., Any], tuple[str, ...]]], owned: Sequence[tuple[Any, str]]
) -> list[str]:
    """Which parameters of functions, and which attributes of their owners, this torch lacks."""
    found: list[str] = []
    for function, names in wanted:
        parameters = inspect.signature(function).parameters
        found.extend(f"{function.__name__}({name}=…)" for name in names if name not in parameters)
    found.extend(f"{getattr(owner, '__name__', owner)}.{name}" for owner, name in owned if not hasattr(owner, name))
    return found


def require(missing: Sequence[str], reliant: str = "remat") -> None:
    """Refuse a torch that lacks something.

    Raises:
        ImportError: it does; the message names all of it.
    """
    if missing:
        raise ImportError(f"torch {torch.__version__} lacks what {reliant} relies on: {', '.join(missing)}")
