"""How large a stage program would be, and how long its writing takes, before it is built."""

from __future__ import annotations

import numpy as np

from ..array_view import ArrayView

BYTES_PER_ENTRY = 1500
BASE_BYTES = 100_000_000
"""Measured: HiGHS's process held 0.27 GB at the root of a program of 350 thousand coefficients, 0.24 GB while branching
on one of 120 thousand, 0.1 GB on small ones. The arrays of the program while it is built stay below that."""
SECONDS_PER_ENTRY = 1e-7
"""Measured: from 0.05 to 0.2 µs of processor time to write one; its hand-over and the engine's reading take no less."""


def entries(view: ArrayView, *, sweeps: int = 1, first: int = 0, pairs: bool = False) -> int:
    """About how many coefficients the program has that are not zero.

    Each stage of frontier f has rows for the uses by ops up to f, the values of ops before f, and the ops up to f:
    about 8, 5 and 3 coefficients for each. The paper's rows 7b and 7c also have one for each pair of uses of a value.
    """
    # in how many stages each is there: those whose frontier is its op or later
    of_use = view.ops - np.maximum(view.uses.op, first)
    of_value = view.ops - np.maximum(view.maker + 1, first)
    of_op = view.ops - np.maximum(np.arange(view.ops), first)
    total = 8 * int(of_use.sum()) + 5 * int(of_value.sum()) + 3 * int(of_op.sum())
    if pairs and view.uses.count:
        total += 2 * int((of_use * (np.arange(view.uses.count) - view.uses.first[view.uses.value])).sum())
    return total * sweeps


def engine_bytes(coefficients: int) -> int:
    """About how much memory an engine needs for a program of so many coefficients, in bytes."""
    return coefficients * BYTES_PER_ENTRY + BASE_BYTES
