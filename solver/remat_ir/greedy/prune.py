"""A sequence of computations without those that the budget does not need."""

from __future__ import annotations

from collections.abc import Callable

from ..graph import Graph
from ..plan import plan_of
from ..replay import replay
from .walk import never

_POLL = 16
"""Recomputations between two looks at the clock."""


def without_needless(
    graph: Graph,
    sequence: list[int],
    budget_bytes: int,
    most: int = 4_000,
    stop: Callable[[], bool] = never,
) -> list[int]:
    """The sequence less those recomputations whose values could simply have stayed, the most expensive tried first.

    Taking one out stretches the former instance of each value that it makes, from its last use to the next one. Where
    `stop` says so, the rest stay.
    """
    if stop():
        return sequence
    profile = [moment.peak_bytes for moment in replay(graph, plan_of(graph, sequence)) if moment.op is not None]
    uses: dict[tuple[int, int], list[int]] = {}  # (value, position made) -> positions that read that instance
    latest: dict[int, int] = {}
    made_at: dict[int, list[int]] = {}
    for position, op in enumerate(sequence):
        for value in graph.op_inputs[op]:
            uses[value, latest[value]].append(position)
        for value in graph.op_values[op]:
            latest[value] = position
            uses[value, position] = []
        made_at.setdefault(op, []).append(position)
    again = [position for positions in made_at.values() for position in positions[1:]]
    again.sort(key=lambda position: (-graph.op_cost_ns[sequence[position]], position))
    taken: set[int] = set()
    for tried, position in enumerate(again[:most]):
        if not tried % _POLL and stop():
            break
        op = sequence[position]
        former = max(p for p in made_at[op] if p < position and p not in taken)
        needed = [value for value in graph.op_values[op] if uses[value, position]]
        stretches = [(max(uses[v, former], default=former - 1) + 1, graph.value_bytes[v]) for v in needed]
        if not _stretch(profile, stretches, position, budget_bytes):
            continue
        for value in needed:
            uses[value, former].extend(uses[value, position])
        taken.add(position)
    return [op for position, op in enumerate(sequence) if position not in taken]


def _stretch(profile: list[int], stretches: list[tuple[int, int]], end: int, budget_bytes: int) -> bool:
    """Add each (start, bytes) to the profile up to `end`; False, with nothing added, where that breaks the budget."""
    for done, (start, size) in enumerate(stretches):
        if max(profile[start : end + 1], default=0) + size > budget_bytes:
            for undo, taken in stretches[:done]:
                profile[undo : end + 1] = [bytes_then - taken for bytes_then in profile[undo : end + 1]]
            return False
        profile[start : end + 1] = [bytes_then + size for bytes_then in profile[start : end + 1]]
    return True
