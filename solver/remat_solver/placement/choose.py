"""Which gaps of a sequence are spent on the host: as few as memory asks for, those first that the link hides best."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import numpy as np

from remat_ir import InvalidPlan, Problem

from .place import Gap, Placed, Timetable, place, room_left


def chosen_gaps(
    table: Timetable, budget_bytes: int, allowed: Callable[[Gap], bool] = lambda gap: True, spare: int = 0
) -> list[Gap] | None:
    """Gaps that make every op fit with `spare` bytes to spare, or as nearly as they can; None where an op can't.

    Where most is lacking, the gap is taken next whose bytes are away longest for the time that the link takes, of those
    that the host has room for.
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
    limit, host = graph.link.host_bytes, np.zeros(len(load), np.int64)
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
        there_for = slice(gaps[best].made + 1, end[best])
        if limit is not None and host[there_for].max() + size[best] > limit:
            continue
        host[there_for] += size[best]
        over[first[best] : end[best]] -= size[best]
        chosen.append(gaps[best])


def placed(problem: Problem, table: Timetable, moved: Collection[Gap]) -> Placed | None:
    """The plan of a choice of gaps; None where it does not fit."""
    try:
        return place(table, problem.budget_bytes, moved)
    except InvalidPlan:
        return None


def pruned(
    problem: Problem, table: Timetable, moved: Iterable[Gap], found: Placed, stop: Callable[[], bool]
) -> tuple[Placed, list[Gap]]:
    """Fewer gaps where the makespan does not rise without one: the largest values are tried first."""
    size = table.graph.value_bytes
    kept = list(moved)
    room = room_left(table, problem.budget_bytes, kept)
    for gap in sorted(kept, key=lambda gap: (-size[gap.value], gap)):
        if stop():
            break
        if room[gap.last + 1 : gap.next].min() < size[gap.value]:
            continue
        fewer = [other for other in kept if other != gap]
        better = placed(problem, table, fewer)
        if better is not None and better.cost_ns <= found.cost_ns:
            found, kept = better, fewer
            room[gap.last + 1 : gap.next] -= size[gap.value]
    return found, kept
