"""The inner loops of the program over blocks, compiled once and cached on disk."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._numba import inner, int32, kernel

NEVER = 1 << 29
"""Stands for infinity; two of them and the costs of one pass still fit an int32."""

Array = Any  # numpy arrays, which numba types for itself


def row_of(s: int, t: int, count: int) -> int:
    """The row of the table that holds C(s, t, ·), 0 ≤ s ≤ t < count."""
    return s * count - (s * (s - 1)) // 2 + t - s


_row_of = inner(row_of)


@kernel(nogil=True)
def fill(
    s: int, count: int, forward: Array, joint: Array, need_pass: Array, first_choice: Array, tape: Array, paid: Array,
    need_forward: Array, need_backward: Array, held: Array, base: Array, table: Array,
) -> None:  # fmt: skip
    """Fill the rows C(s, ·, ·) of the table [rows, slots] from those of all later segments; see `BlockTable`.

    In units of cost: `forward` [L + 1], the prefix sum of forward costs, and `paid`, a choice's two parts. In slots:
    `joint` [L], what a checkpoint behind each segment takes; `need_pass` [L, L], what passing s … t − 1 takes; `tape`,
    `need_forward` and `need_backward` of each choice; `held` [L] while ops before the backward part of the next segment
    run; `base` [L] while the backward part of s runs. The choices of s are first_choice[s] … first_choice[s + 1] − 1.
    """
    slots = table.shape[1]
    best = np.empty(slots, np.int32)
    for t in range(s, count):
        best[:] = NEVER
        low = need_pass[s, t]
        for k in range(s + 1, t + 1):
            saved = joint[k - 1]
            start = max(low, saved)
            if start >= slots:
                continue
            ahead = int32(forward[k] - forward[s])
            right, left = table[_row_of(k, t, count)], table[_row_of(s, k - 1, count)]
            for m in range(start, slots):
                best[m] = min(best[m], int32(right[m - saved] + left[m] + ahead))
        for c in range(first_choice[s], first_choice[s + 1]):
            low = max(held[t] + need_forward[c], base[s] + need_backward[c])
            if s == t:
                for m in range(low, slots):
                    best[m] = min(best[m], paid[c])
            else:
                after = table[_row_of(s + 1, t, count)]
                for m in range(max(low, tape[c]), slots):
                    best[m] = min(best[m], int32(after[m - tape[c]] + paid[c]))
        row = table[_row_of(s, t, count)]
        for m in range(slots):
            row[m] = min(best[m], NEVER)
