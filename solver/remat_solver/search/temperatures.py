"""How hot a cycle of annealing starts, and how it cools; all in mean op costs."""

from __future__ import annotations

from collections.abc import Iterator

HOT, WARM, COOL, COOLEST, COLD = 2.0, 0.6, 0.1, 0.02, 0.002
"""Where cycles from nothing start, where others start, where all end."""
_LONG = 400
"""Moves per op below which what a warm cycle breaks is not mended by its end."""


def start_of(number: int, moves: int, ops: int) -> float:
    """How hot the cycle of this number starts, given its length: long ones in turns cool, from nothing, and warm."""
    if moves < _LONG * ops:
        return (COOL, COOLEST)[number % 2]
    return (COOL, HOT, WARM)[number % 3]


def cooling(hot: float, moves: int, slice_moves: int) -> Iterator[tuple[int, float, float]]:
    """The slices of a cycle: how many moves, and between which temperatures, the last one ending at `COLD`.

    >>> [(moves, round(end, 3)) for moves, _, end in cooling(2.0, 5, 2)]
    [(2, 0.126), (2, 0.008), (1, 0.002)]
    """
    for made in range(0, moves, slice_moves):
        now = min(slice_moves, moves - made)
        yield now, hot * (COLD / hot) ** (made / moves), hot * (COLD / hot) ** ((made + now) / moves)
