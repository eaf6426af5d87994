"""The inner loops of the chain programs, compiled once and cached on disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .._numba import inner, int32, kernel

WIDTH = 64
"""Memory slots that one pass of the table handles: their rows of all (s', t) stay in the last-level cache."""

NEVER = 1 << 29
"""Stands for infinity; two of them and a prefix of costs still fit an int32."""

Array = Any  # numpy arrays, which numba types for itself


def row_of(s: int, t: int, stages: int) -> int:
    """The row of the table that holds C(s, t, ·), 1 ≤ s ≤ t ≤ stages."""
    return (s - 1) * stages - ((s - 1) * (s - 2)) // 2 + t - s


_row_of = inner(row_of)


@inner
def _relax_four(best: Array, right: Array, left: Array) -> None:
    r0, r1, r2, r3 = right[0], right[1], right[2], right[3]
    l0, l1, l2, l3 = left[0], left[1], left[2], left[3]
    for j in range(best.size):
        # the casts keep the sums in 32 bits, so that eight fit one vector register
        x = min(int32(r0[j] + l0[j]), int32(r1[j] + l1[j]))
        y = min(int32(r2[j] + l2[j]), int32(r3[j] + l3[j]))
        best[j] = min(best[j], min(x, y))


@inner
def _relax_one(best: Array, right: Array, left: Array) -> None:
    for j in range(best.size):
        best[j] = min(best[j], int32(right[j] + left[j]))


def spans(stages: int, width: int, work: int) -> Iterator[tuple[int, int]]:
    """Ranges of s, from high to low, that take about so many sums each in a table of `width` slots, or one s."""
    high = stages
    while high > 0:
        low, sums = high, 0
        while low > 1 and (sums := sums + (stages - low + 1) ** 2 // 2 * width) < work:
            low -= 1
        yield high, low
        high = low - 1


@kernel(nogil=True)
def fill(
    stages: int, tapes: bool, forward: Array, pair: Array, once: Array, activation: Array, tape: Array,
    need_none: Array, need_all: Array, table: Array, right: Array, left: Array, first: int, high: int, low_s: int,
) -> None:  # fmt: skip
    """Fill the table of C(s, t, m) for s from `high` down to `low_s`, all t from s on and the WIDTH memory slots m from
    `first` on (RR-9302, Theorem 1, Algorithm 1); greater s and smaller m come before, with the same `right` and `left`.

    `forward` [L+1] is the prefix sum of u_f, `once` that of u_f + u_b, `pair` [L+1] is u_f + u_b; `activation` [L+1]
    and `tape` [L+1] are in slots; `need_none` and `need_all` [L+1, L+1] are the slots below which the forward steps
    s … t−1 without saving, or F_all^s and B^s, do not fit. Without `tapes`, F_all is used only right before its
    backward step. The table has `row_of` rows and a multiple of WIDTH slots.

    C(s', t, m − ω_a^(s'−1)) is laid out as `right` [t, s'], C(s, s'−1, m) + the forward costs as `left` [s'−1]: the
    minimum over s' runs along contiguous rows.
    """
    best = np.empty(WIDTH, np.int32)
    for s in range(high, low_s - 1, -1):
        for t in range(s, stages + 1):
            row = _row_of(s, t, stages)
            cheapest = once[t] - once[s - 1]
            if first > 0 and table[row, first - 1] == cheapest:
                best[:] = cheapest
            else:
                best[:] = NEVER
                if t > s and need_none[s, t] < first + WIDTH:
                    k = s
                    while k + 4 <= t:
                        _relax_four(best, right[t, k + 1 : k + 5], left[k : k + 4])
                        k += 4
                    while k < t:
                        _relax_one(best, right[t, k + 1], left[k])
                        k += 1
                    for j in range(WIDTH):
                        best[j] -= forward[s - 1]
                        if best[j] > NEVER or first + j < need_none[s, t]:
                            best[j] = NEVER
                low = max(need_all[s, t], first)
                if s == t:
                    for m in range(low, first + WIDTH):
                        best[m - first] = pair[s]
                elif tapes:
                    held, after = tape[s], _row_of(s + 1, t, stages)
                    for m in range(max(low, held), first + WIDTH):
                        best[m - first] = min(best[m - first], int32(table[after, m - held] + pair[s]))
            held, shifted = activation[s - 1], right[t, s]
            for j in range(WIDTH):
                table[row, first + j] = best[j]  # an assignment of slices takes a second to compile
            for j in range(WIDTH):
                left[t, j] = best[j] + forward[t]
                m = first + j - held
                shifted[j] = table[row, m] if m >= 0 else NEVER


@kernel()
def fill_least(
    stages: int, tapes: bool, activation: Array, tape: Array, need_none: Array, need_all: Array, least: Array,
    high: int, low: int,
) -> None:  # fmt: skip
    """The least memory [L+1, L+1] in bytes with which stages s … t can be processed by a persistent schedule.

    For s from `high` down to `low`; greater s come before.
    """
    for s in range(high, low - 1, -1):
        least[s, s] = need_all[s, s]
        for t in range(s + 1, stages + 1):
            best = max(need_all[s, t], tape[s] + least[s + 1, t]) if tapes else np.iinfo(np.int64).max
            for k in range(s + 1, t + 1):
                split = max(max(need_none[s, t], activation[k - 1] + least[k, t]), least[s, k - 1])
                best = min(best, split)
            least[s, t] = best
