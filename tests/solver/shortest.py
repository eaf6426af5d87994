"""Dijkstra's algorithm over states, for the brute forces: it shares nothing with any solver."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

State = TypeVar("State", bound=Hashable)
Step = TypeVar("Step")


def shortest(
    start: State, moves: Callable[[State], Iterable[tuple[Step, int, State]]], ended: Callable[[State], bool]
) -> tuple[int, list[Step]] | None:
    """The least cost of getting from `start` to a state that has ended, and the steps there; None without a way.

    `moves` yields the steps that may be taken from a state: each with its cost and the state after it.
    """
    heap: list[tuple[int, int, State]] = [(0, 0, start)]
    best = {start: 0}
    came: dict[State, tuple[State, Step]] = {}
    pushed = 0
    while heap:
        cost, _, state = heapq.heappop(heap)
        if cost > best[state]:
            continue
        if ended(state):
            steps: list[Step] = []
            while state in came:
                state, step = came[state]
                steps.append(step)
            return cost, steps[::-1]
        for step, more, after in moves(state):
            if cost + more < best.get(after, cost + more + 1):
                best[after] = cost + more
                came[after] = state, step
                pushed += 1
                heapq.heappush(heap, (cost + more, pushed, after))
    return None
