"""Options of methods: frozen dataclasses whose fields say which values they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

_MOST = 2**53


@dataclass(frozen=True)
class Options:
    """The options of a method; those of one that has none.

    Each field is made by a function of this module, and None is taken where it is the default.

    Raises:
        ValueError: a value is of another type or out of range.

    >>> @dataclass(frozen=True)
    ... class Mine(Options):
    ...     tries: int = whole(3, 1, 9)
    >>> Mine(tries=0)
    Traceback (most recent call last):
    ValueError: tries must be an integer from 1 to 9, not 0
    """

    def __post_init__(self) -> None:
        for each in fields(self):
            value, none = getattr(self, each.name), each.default is None
            if not (each.metadata["takes"](value) or (none and value is None)):
                raise ValueError(f"{each.name} must be {each.metadata['what']}, not {value!r}")


def _option(default: Any, what: str, takes: Callable[[Any], bool]) -> Any:
    return field(default=default, metadata={"what": what, "takes": takes})


def whole(default: int | None, least: int = 0, most: int = _MOST) -> Any:
    """An option that is an integer from `least` to `most`."""
    what = f"an integer from {least}" + (f" to {most}" if most < _MOST else "")
    return _option(default, what, lambda value: type(value) is int and least <= value <= most)


def share(default: float | None) -> Any:
    """An option that is a number from 0 to below 1."""
    return _option(default, "at least 0 and below 1", lambda value: type(value) in (int, float) and 0 <= value < 1)


def flag(default: bool = True) -> Any:
    """An option that is true or false."""
    return _option(default, "true or false", lambda value: type(value) is bool)


def word(default: str, words: Sequence[str]) -> Any:
    """An option that is one of some words."""
    return _option(default, f"one of {', '.join(words)}", lambda value: value in words)
