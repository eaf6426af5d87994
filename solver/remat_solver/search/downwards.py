"""The smallest budget that a quick search finds a plan for, where the budget asked for has none yet."""

from __future__ import annotations

from collections.abc import Callable

from remat_ir import Graph
from remat_ir.greedy import peak_of

from ..deadline import Deadline
from .local import Search

_FIRST_STEP, _LAST_STEP = 0.88, 0.995
"""By what the budget is multiplied first; the step is halved at each failure until it is smaller than the last."""
_SHARE, _LEAST_S = 0.3, 0.1
"""The share of the time left, and the seconds at least, that one attempt may take."""


def smallest_budget(
    graph: Graph, low: int, high: int, deadline: Deadline, stopped: Callable[[], bool], seed: int = 0
) -> int:
    """The peak of the least plan found, in bytes with the fixed ones: at most `high`, which is known to suffice.

    Steps go down from the smallest budget that has a plan, not below `low`, since most attempts that succeed do so at
    once and each one that fails takes all of its time.
    """
    step = _FIRST_STEP
    while low < high and step <= _LAST_STEP and not deadline.passed() and not stopped():
        attempt = deadline.within(max(_LEAST_S, _SHARE * deadline.remaining()))
        search = Search(graph, max(low, int(high * step)), seed)
        search.seek(lambda end=attempt: end.passed() or stopped())  # type: ignore[misc]
        plan = search.plan()
        if plan is None:
            step = 1 - (1 - step) / 2
        else:
            high = peak_of(graph, plan)
    return high
