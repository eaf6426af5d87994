"""How many moves a search makes before it starts again, from its best schedule or from nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

SLICE, SHORT_SLICE = 8192, 2048
"""Moves between two looks at the clock: 10 to 100 ms; fewer while there is no schedule within the budget."""
_FIRST_CYCLE = 8
"""Slices in the first cycle; each later one is longer by `_GROWTH`."""
_GROWTH = 1.3
_LONGEST_CYCLE = 2500
_ATTEMPT = 2 * SLICE


def cycles() -> Iterator[int]:
    """The lengths in moves of one cycle after the other."""
    length = float(_FIRST_CYCLE * SLICE)
    while True:
        yield int(length)
        length = min(length * _GROWTH, float(_LONGEST_CYCLE * SLICE))


def attempts() -> Iterator[int]:
    """The lengths in moves of starts from nothing, in the ratios 1, 1, 2, 1, 1, 2, 4, … (Luby et al., 1993).

    Near the least budget a start finds a schedule soon or never.
    """
    return (_ATTEMPT * luby(number) for number in itertools.count(1))


def luby(number: int) -> int:
    """The sequence 1, 1, 2, 1, 1, 2, 4, 1, … from number 1 on.

    >>> [luby(number) for number in range(1, 10)]
    [1, 1, 2, 1, 1, 2, 4, 1, 1]
    """
    size = 1
    while size < number + 1:
        size *= 2
    return size // 2 if size == number + 1 else luby(number - size // 2 + 1)
