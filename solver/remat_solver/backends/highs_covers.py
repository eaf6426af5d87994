"""Lifted covers: of values that do not fit together not all are resident, and others count for what they displace.

Of Σ a_j x_j ≤ b with whole a_j > 0 over columns that are 0 or 1, a cover is a set C with Σ_C a_j > b. At most |C| − 1
of its columns are 1. Each other column in turn gets the largest weight with which the row still holds: |C| − 1 less
the most that the columns weighted before it can have within b − a_j, found by dynamic programming over weights (Balas
and Zemel, 1978). Which cover, and in what order, the point that is to be cut off says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

_THERE = 1e-9


def lifted_cover(weight: Sequence[int], room: int, x: Sequence[float]) -> tuple[dict[int, int], int] | None:
    """The weights α > 0 of positions, and what they add up to at most; None where all that the point holds fits.

    >>> lifted_cover([5, 5, 5, 9], 14, [1.0, 1.0, 0.8, 0.0])
    ({0: 1, 1: 1, 2: 1, 3: 1}, 2)
    """
    cover = _cover(weight, room, x)
    if not cover:
        return None
    most = len(cover) - 1
    # [t] the least room that columns weighted so far take whose weights add up to t or more
    least = [0]
    for i in sorted(cover, key=lambda i: weight[i])[:most]:
        least.append(least[-1] + weight[i])
    alpha = dict.fromkeys(sorted(cover), 1)
    others = (i for i in range(len(weight)) if i not in alpha)
    for i in sorted(others, key=lambda i: (-x[i], -weight[i])):
        left = room - weight[i]
        displaced = most - (bisect_right(least, left) - 1) if left >= 0 else most
        if displaced > 0:
            alpha[i] = displaced
            for t in range(most, 0, -1):
                least[t] = min(least[t], least[max(0, t - displaced)] + weight[i])
    return alpha, most


def _cover(weight: Sequence[int], room: int, x: Sequence[float]) -> list[int]:
    """Positions that do not fit together, none of them to spare, by a greedy knapsack; empty if there are none."""
    order = sorted((i for i in range(len(weight)) if x[i] > _THERE), key=lambda i: (1.0 - x[i]) / weight[i])
    cover: list[int] = []
    total = 0
    for i in order:
        cover.append(i)
        total += weight[i]
        if total > room:
            break
    if total <= room:
        return []
    for i in sorted(cover, key=lambda i: (x[i], weight[i])):
        if total - weight[i] > room:
            cover.remove(i)
            total -= weight[i]
    return cover
