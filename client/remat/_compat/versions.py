"""The version gate: which torch this is, and what it lacks of what a module here relies on."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("remat")

OLDEST, NEWEST = (2, 11), (2, 15)
"""The releases that the tests were run on: an older one is refused, a newer one is said to be new."""


def version() -> tuple[int, int]:
    """The torch found here, as (major, minor)."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def _dotted(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


TRIED = f"{_dotted(OLDEST)} to {_dotted(NEWEST)}"

if version() < OLDEST:
    raise ImportError(f"remat needs torch {_dotted(OLDEST)} or later, and {torch.__version__} is installed")
if version() > NEWEST:
    log.warning("remat was tried with torch %s, and %s is installed", TRIED, torch.__version__)


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
        ImportError: it does; the message names all of it, and the releases that have it.
    """
    if missing:
        raise ImportError(
            f"torch {torch.__version__} lacks what {reliant} relies on: {', '.join(missing)}; torch {TRIED} have it"
        )


@contextlib.contextmanager
def required(reliant: str = "remat") -> Iterator[None]:
    """Imports of torch's modules and names inside are refused as by `require` where this torch lacks one."""
    try:
        yield
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise  # of another package; or a message of `require`
        raise ImportError(
            f"torch {torch.__version__} lacks what {reliant} relies on: {error}; torch {TRIED} have it", name="torch"
        ) from error


def library(name: str) -> ctypes.CDLL:
    """One of torch's own libraries, such as "c10".

    Raises:
        OSError: there is none of that name.
    """
    folder = Path(torch.__file__).parent / "lib"
    found = [path for path in folder.glob(f"lib{name}.*") if path.suffix in (".so", ".dylib")]
    if not found:
        raise OSError(f"{folder} has no lib{name}")
    return ctypes.CDLL(str(found[0]))
