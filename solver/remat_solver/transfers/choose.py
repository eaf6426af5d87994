"""Which gaps of a sequence are spent on the host: as few as memory asks for, those first that the link hides best."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import numpy as np

from remat_ir import InvalidPlan, Plan, Problem, verify

from .place import Gap, Timetable, place


def chosen_gaps(
    table: Timetable, budget_bytes: int, allowed: Callable[[Gap], bool] = lambda gap: True, spare: int = 0
) -> list[Gap] | None:
    """Gaps that make every op fit with `spare` bytes to spare, or as nearly as they can; None where an op can't.

    Where most is lacking, the gap is taken next whose bytes are away longest for the time that the link takes.
    """
    graph = table.graph
    assert graph.link is not None
    load = np.array(table.load, np.int64)
    gaps = [gap for gap in table.gaps if graph.value_bytes[gap.value] and allowed(gap)]
    size = np.array([graph.value_bytes[gap.value] for gap in gaps], np.int64)
    first = np.array([gap.last + 1 for gap in gaps], np.int64)
    end = np.array([gap.next for gap in gaps], np.int64)
    begin = np.array(table.begin, np.int64)
    times = [graph.link.to_host_ns(int(b)) + graph.link.to_device_ns(int(b)) for b in size]
    carried = np.array(times, np.int64)
    away = begin[end] - begin[first]
    # bytes · time that is free per time of the link; a gap shorter than its copies makes the plan wait
    worth = size * np.maximum(away, 1) / np.maximum(carried, 1) * np.where(away >= carried, 1.0, 1e-3)
    left = np.ones(len(gaps), np.bool_)
    chosen: list[Gap] = []
    over = load - budget_bytes + spare
    hard = np.zeros(len(load), np.bool_)
    while True:
        wanting = np.where(hard, 0, over)
        worst = int(np.argmax(wanting))
        if wanting[worst] <= 0:
            return chosen
        there = np.flatnonzero(left & (first <= worst) & (end > worst))
        if not len(there):
            if load[worst] - budget_bytes > 0 and over[worst] > spare:
                return None
            hard[worst] = True
            continue
        best = int(there[np.argmax(worth[there])])
        left[best] = False
        over[first[best] : end[best]] -= size[best]
        chosen.append(gaps[best])


def placed(problem: Problem, table: Timetable, moved: Collection[Gap]) -> tuple[int, Plan] | None:
    """The makespan of a choice of gaps and its plan, as verified; None where it does not fit."""
    try:
        plan = place(table, problem.budget_bytes, moved)
        return verify(problem, plan).cost_ns, plan
    except InvalidPlan:
        return None


def pruned(
    problem: Problem, table: Timetable, moved: Iterable[Gap], found: tuple[int, Plan], stop: Callable[[], bool]
) -> tuple[tuple[int, Plan], list[Gap]]:
    """Fewer gaps where the makespan does not rise without one: the largest values are tried first."""
    graph = table.graph
    kept = list(moved)
    for gap in sorted(kept, key=lambda gap: (-graph.value_bytes[gap.value], gap)):
        if stop():
            break
        fewer = [other for other in kept if other != gap]
        better = placed(problem, table, fewer)
        if better is not None and better[0] <= found[0]:
            found, kept = better, fewer
    return found, kept
