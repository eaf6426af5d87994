"""The plan of the least memory that a quick search finds, where the budget asked for has none yet."""

from __future__ import annotations

from collections.abc import Callable

from remat_ir import Graph, Plan
from remat_ir.greedy import peak_of

from ..deadline import Deadline
from .local import Search

_FIRST_STEP, _LARGEST_STEP, _LAST_STEP = 0.95, 0.9, 0.999
"""By what the peak is multiplied first and at most; the step is made smaller at each failure, until it is the last."""
_SMALLER, _LARGER = 0.7, 1.2
"""Factors on what a step takes off, after a failure and after a success."""
_MOVES_PER_OP, _LEAST_MOVES, _ROUNDS = 16, 1024, 3
"""Moves of an attempt in the first round; in each later one there are four times as many."""


def least_plan(
    graph: Graph, low: int, plan: Plan, deadline: Deadline, stopped: Callable[[], bool], seed: int = 0
) -> Plan:
    """The plan of the least peak found, starting from a known one; `low` bytes, fixed ones included, are enough.

    Steps go down from the smallest peak that is known, each from its plan: most that succeed do so at once.
    """
    peak, tried = peak_of(graph, plan), 0
    for round_ in range(_ROUNDS):
        moves, step = max(_LEAST_MOVES, _MOVES_PER_OP * graph.ops) << 2 * round_, _FIRST_STEP
        while low < peak and step < _LAST_STEP and not deadline.passed() and not stopped():
            search = Search(graph, max(low, min(peak - 1, int(peak * step))), seed + tried)
            better = search.tighten(plan.computes, moves, lambda: deadline.passed() or stopped())
            tried += 1
            if better is None:
                step = 1 - _SMALLER * (1 - step)
            else:
                plan, peak = better, peak_of(graph, better)
                step = max(_LARGEST_STEP, 1 - _LARGER * (1 - step))
    return plan
