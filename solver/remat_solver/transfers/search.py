"""Local search with the third choice: which values move to the host, and what runs again next to them.

A set of values that move makes a graph without a link: each of them takes no memory but while its maker and its readers
run. The search over recomputations (`remat_solver.search`) solves that graph; its sequence, with the moved values'
copies placed, is a plan, whose makespan is what counts. The sets come from relaxations, and are then changed a value at
a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from remat_ir import Graph, InvalidPlan, Offload, Plan
from remat_ir.greedy import greedy_plan, least_memory

from ..incumbent import Incumbent
from ..program import Floats
from ..search import Search, await_compiled
from .choose import chosen_gaps, placed, pruned
from .place import Gap, Placed, timetable

SOURCE = "transfers"
_MOVES = 8192
"""Moves of the search over recomputations after each change of the set: some tens of milliseconds."""
_FIRST_MOVES = 16384
_TRIES = 6
"""Sequences made for one set, each with more memory held back for copies under way than the one before."""
_LEVELS = (0.02, 0.5, 0.98)
"""How much of a value a relaxation moves for it to be in a set."""


@dataclass(frozen=True, eq=False)
class Found:
    """A plan, as verified: its makespan, the ops in their order, the values that move, the gaps that they spend there,
    and the bytes that were held back."""

    cost_ns: int
    plan: Plan
    order: tuple[int, ...]
    moved: frozenset[int]
    gaps: tuple[Gap, ...]
    reserve: int = 0


def relieved(graph: Graph, moved: Collection[int]) -> Graph:
    """The graph in which moved values take memory only while an op makes or reads them, without the link.

    >>> from remat_ir import graph_of
    >>> graph = relieved(graph_of([1, 1, 1], [4, 5, 6], [[], [0], [0, 1]]), {0})
    >>> graph.value_bytes, graph.op_workspace_bytes
    ((0, 5, 6), (4, 4, 4))
    """
    size = list(graph.value_bytes)
    workspace = list(graph.op_workspace_bytes)
    for value in moved:
        size[value] = 0
        for op in (graph.value_op[value], *graph.users[value]):
            workspace[op] += graph.value_bytes[value]
    return replace(graph, value_bytes=tuple(size), op_workspace_bytes=tuple(workspace), link=None)


class TransferSearch:
    """The search on one incumbent; `best` is the best plan that it has made."""

    def __init__(self, incumbent: Incumbent, seed: int = 0) -> None:
        self.incumbent, self.problem = incumbent, incumbent.problem
        self.graph = incumbent.problem.graph
        self.random = random.Random(seed)
        self.best: Found | None = None
        keep = frozenset(self.graph.keep)
        self.movable = [
            value
            for value in range(self.graph.values)
            if value not in keep and self.graph.value_bytes[value] and self.graph.users[value]
        ]

    def stop(self) -> bool:
        """Whether to stop."""
        return self.incumbent.stopped()

    def offload_only(self) -> Found | None:
        """Every op once, and as many values on the host as memory asks for."""
        return self.take(range(self.graph.ops), frozenset(self.movable), 0, prune=True)

    def adopt(self, plan: Plan) -> None:
        """Go on from a plan, if it is the best."""
        moved = frozenset(step.value for step in plan.steps if isinstance(step, Offload))
        self.take(plan.computes, moved, 0, prune=True)

    def take(
        self, order: Sequence[int], moved: frozenset[int], reserve: int, *, prune: bool = False, source: str = SOURCE
    ) -> Found | None:
        """Place the copies of a sequence and offer its plan; None where it does not fit."""
        table = timetable(self.graph, order)
        spare = 0
        found: Placed | None = None
        gaps: list[Gap] | None = None
        for allowed in (moved, frozenset(self.movable)):
            spare, within = 0, allowed
            for _ in range(3):
                gaps = chosen_gaps(table, self.problem.budget_bytes, lambda gap: gap.value in within, spare)  # noqa: B023
                found = None if gaps is None else placed(self.problem, table, gaps)
                if found is not None or gaps is None:
                    break
                spare += max((self.graph.value_bytes[gap.value] for gap in gaps), default=1)
            if found is not None:
                break
        if found is None or gaps is None:
            return None
        best_ns = None if self.best is None else self.best.cost_ns
        if prune and (best_ns is None or found.cost_ns < 1.02 * best_ns):
            found, gaps = pruned(self.problem, table, gaps, found, self.stop)
        taken = Found(found.cost_ns, found.plan, table.order, moved, tuple(gaps), reserve)
        if best_ns is None or taken.cost_ns < best_ns:
            try:
                self.incumbent.offer(taken.plan, source)
            except InvalidPlan:
                assert self.graph.link is not None
                if self.graph.link.host_bytes is None:
                    raise
                return None  # more than the host holds
            self.best = taken
        return taken

    def solve(
        self, moved: frozenset[int], moves: int, start: Sequence[int] | None = None, reserve: int = 0
    ) -> Found | None:
        """Look for recomputations that go with a set of values that move; None where nothing fits."""
        graph = relieved(self.graph, moved)
        room = self.problem.budget_bytes
        step = max((self.graph.value_bytes[v] for v in moved), default=0)
        best: Found | None = None
        for _ in range(_TRIES):
            if self.stop():
                break
            order = self._sequence(graph, room - reserve, moves, start)
            if order is None:
                break
            taken = self.take(order, moved, reserve, prune=True)
            if taken is not None and (best is None or taken.cost_ns < best.cost_ns):
                best = taken
            elif best is not None:
                break
            if not moved or (taken is not None and taken.cost_ns == sum(graph.op_cost_ns[op] for op in order)):
                break
            reserve += step
        return best

    def _sequence(
        self, graph: Graph, budget_bytes: int, moves: int, start: Sequence[int] | None
    ) -> tuple[int, ...] | None:
        if start is None:
            plan = greedy_plan(graph, budget_bytes, stop=self.stop, tries=1) or least_memory(graph, stop=self.stop)
            start = plan.computes
        search = Search(graph, budget_bytes, self.random.randrange(2**31))
        if not search.adopt(start):
            return None
        search.cycle(moves, 0.3, self.stop)
        if search.cost_ns is None:
            search.seek(self.stop, moves)
        return search.sequence()

    def seeds(self, moved: Floats) -> None:
        """Solve the sets that a relaxation suggests, from few values to many."""
        known: set[frozenset[int]] = set()
        for level in _LEVELS:
            chosen = frozenset(np.flatnonzero(moved >= level).tolist()) & frozenset(self.movable)
            if self.stop() or not await_compiled(self.incumbent):
                return
            if chosen not in known:
                known.add(chosen)
                self.solve(chosen, _FIRST_MOVES)

    def run(self, more: Callable[[], Floats | None]) -> None:
        """Change the best set a value at a time until the incumbent says stop; `more` brings relaxations."""
        while not self.stop() and await_compiled(self.incumbent):
            if (moved := more()) is not None:
                self.seeds(moved)
            if self.best is None:
                if self.solve(frozenset(self.movable), _FIRST_MOVES) is None and self.stop():
                    return
                if self.best is None:
                    self.solve(frozenset(self.random.sample(self.movable, len(self.movable) // 2)), _FIRST_MOVES)
                continue
            found = self.best
            self.solve(self.changed(found), _MOVES, found.order, found.reserve)

    def changed(self, found: Found) -> frozenset[int]:
        """A set near that of a plan: a value that is made again is moved instead, or one that moves is kept."""
        graph = self.graph
        used = {gap.value for gap in found.gaps}
        counts = [0] * graph.ops
        for op in found.order:
            counts[op] += 1
        again = [v for v in self.movable if counts[graph.value_op[v]] > 1 and v not in used]
        moved = set(found.moved & used) if self.random.random() < 0.5 else set(found.moved)
        for _ in range(1 + int(self.random.expovariate(1.0))):
            if again and (not used or self.random.random() < 0.6):
                moved.add(self.random.choices(again, [1 + graph.op_cost_ns[graph.value_op[v]] for v in again])[0])
            elif used:
                moved.discard(self.random.choice(sorted(used)))
            elif self.movable:
                moved ^= {self.random.choice(self.movable)}
        return frozenset(moved)
