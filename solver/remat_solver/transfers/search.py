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

from remat_ir import AnyPlan, Graph, Offload, Plan
from remat_ir.greedy import greedy_plan, least_memory
from remat_ir.plan import recomputed, without_unread

from ..deadline import Deadline
from ..incumbent import Incumbent
from ..placement import Gap, Placed, Timetable, chosen_gaps, placed, pruned, timetable
from ..program import Floats
from ..search.local import Search

SOURCE = "transfers"
_MOVES = 8192
"""Moves of the search over recomputations after each change of the set: some tens of milliseconds."""
_FIRST_MOVES = 16384
_TRIES = 6
"""Sequences made for one set, each with more memory held back for copies under way than the one before."""
_CHEAPER = 0.8
"""What becomes of the price of the host's bytes with each plan that it has room for."""
_POLISH_EVERY = 32
"""Changes of the set after which the best plan is polished again, if it is another one."""
_LEVELS = (0.02, 0.5, 0.98)
"""How much of a value a relaxation moves for it to be in a set."""


@dataclass(frozen=True, eq=False)
class Found:
    """A plan, as verified: its makespan, the ops in their order, the values that may move, those that do, and the bytes
    that were held back."""

    cost_ns: int
    order: tuple[int, ...]
    moved: frozenset[int]
    used: frozenset[int]
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


def without_again(graph: Graph, order: Sequence[int], op: int) -> tuple[int, ...]:
    """A sequence that computes an op once, less the recomputations that nothing reads then.

    >>> from remat_ir import graph_of
    >>> without_again(graph_of([1] * 4, [1] * 4, [[], [0], [1], [1, 2]]), (0, 1, 2, 0, 1, 3), 1)
    (0, 1, 2, 3)
    """
    first = order.index(op)
    return without_unread(graph, [each for at, each in enumerate(order) if each != op or at == first])


class TransferSearch:
    """The search on one incumbent; `best` is the best plan that it has made.

    `linked` is the incumbent of the graph that is searched, with its link: of a graph the same. `price`, in ns a byte,
    is what a byte on the host has to save: it rises where the host has no room for the plan of a set, else it falls.
    """

    def __init__(self, incumbent: Incumbent, seed: int = 0, linked: Incumbent | None = None) -> None:
        self.incumbent, self.linked = incumbent, linked or incumbent
        self.problem = self.linked.problem
        self.graph = self.problem.graph
        self.deadline: Deadline = incumbent.deadline
        self.random = random.Random(seed)
        self.best: Found | None = None
        self.price = 0.0
        keep = frozenset(self.graph.keep)
        self.movable = [
            value
            for value in range(self.graph.values)
            if value not in keep and self.graph.value_bytes[value] and self.graph.users[value]
        ]
        self.worth = {value: self._worth(value) for value in self.movable}

    def stop(self) -> bool:
        """Whether to stop."""
        return self.incumbent.stopped() or self.deadline.passed()

    def _again_ns(self, value: int) -> int:
        return self.graph.op_cost_ns[self.graph.value_op[value]]

    def _worth(self, value: int) -> float:
        """The time that it takes to make a value again, over the time that the link takes for it."""
        link, size = self.graph.link, self.graph.value_bytes[value]
        assert link is not None
        return (1 + self._again_ns(value)) / (1 + link.to_host_ns(size) + link.to_device_ns(size))

    def table(self, order: Sequence[int]) -> Timetable:
        """What is resident when, in the terms in which copies are placed."""
        return timetable(self.graph, order)

    def values_of(self, gap: Gap) -> Collection[int]:
        """The values of the graph that are elsewhere in a gap of such a table; none of what cannot move."""
        return (gap.value,)

    def may_move(self, gap: Gap, allowed: Collection[int]) -> bool:
        """Whether a gap may be spent on the host where some values may move."""
        return any(value in allowed for value in self.values_of(gap))

    def planned(self, found: Placed) -> tuple[int, AnyPlan]:
        """The plan of the incumbent's problem that a placement stands for, and its makespan."""
        return found

    def offload_only(self) -> Found | None:
        """Every op once, and as many values on the host as memory asks for."""
        return self.take(range(self.graph.ops), frozenset(self.movable), 0, prune=True)

    def adopt(self, plan: AnyPlan) -> None:
        """Go on from a plan, if it is the best, with its copies placed anew."""
        assert isinstance(plan, Plan)
        moved = frozenset(step.value for step in plan.steps if isinstance(step, Offload))
        self.take(plan.computes, moved, 0, prune=True)

    def take(self, order: Sequence[int], moved: frozenset[int], reserve: int, *, prune: bool = False) -> Found | None:
        """Place the copies of a sequence and offer its plan; None where it does not fit."""
        table = self.table(order)
        placing = self._placing(table, moved) or self._placing(table, frozenset(self.movable))
        if placing is None:
            return None
        found, gaps = placing
        best_ns = None if self.best is None else self.best.cost_ns
        if prune and (best_ns is None or found.cost_ns < 1.02 * best_ns):
            found, gaps = pruned(self.problem, table, gaps, found, self.stop)
        cost_ns, plan = self.planned(found)
        used = frozenset(value for gap in gaps for value in self.values_of(gap))
        taken = Found(cost_ns, tuple(order), moved, used, reserve)
        if best_ns is None or cost_ns < best_ns:
            self.incumbent.offer(plan, SOURCE)
            self.best = taken
        return taken

    def polish(self) -> None:
        """Move what the best plan makes again, an op at a time, as long as that makes it better; nothing is random.

        A plan that was made without transfers, or with whole tapes, leaves the link time that this uses.
        """
        while (begun := self.best) is not None:
            best = begun
            again = [op for op, count in enumerate(recomputed(begun.order, self.graph.ops)) if count]
            worth = {op: max((self.worth.get(v, 0.0) for v in self.graph.op_values[op]), default=0.0) for op in again}
            for op in sorted(again, key=lambda op: (-worth[op], op)):
                if self.stop():
                    return
                best = self.best or best
                order = without_again(self.graph, best.order, op)
                if worth[op] and len(order) < len(best.order):
                    moved = best.moved.union(v for v in self.graph.op_values[op] if v in self.worth)
                    self.take(order, moved, best.reserve)
            if self.best is begun:
                return

    def _placing(self, table: Timetable, allowed: frozenset[int]) -> tuple[Placed, list[Gap]] | None:
        """A placement in which some of the allowed values move, with as much to spare as it takes."""
        spare = 0
        for _ in range(3):
            gaps = chosen_gaps(table, self.problem.budget_bytes, lambda gap: self.may_move(gap, allowed), spare)
            if gaps is None:
                return None
            if (found := placed(self.problem, table, gaps)) is not None:
                return found, gaps
            spare += max((table.graph.value_bytes[gap.value] for gap in gaps), default=1)
        return None

    def solve(
        self, moved: frozenset[int], moves: int, start: Sequence[int] | None = None, reserve: int = 0
    ) -> Found | None:
        """Look for recomputations that go with a set of values that move; None where nothing fits.

        Of the set, those move that are worth the price of the host's bytes.
        """
        moved = frozenset(
            value for value in moved if self._again_ns(value) >= self.price * self.graph.value_bytes[value]
        )
        best = self._solve(moved, moves, start, reserve)
        assert self.graph.link is not None
        if self.graph.link.host_bytes is not None and not self.stop():
            rates = sorted(self._again_ns(value) / self.graph.value_bytes[value] for value in moved)
            if best is not None:
                self.price *= _CHEAPER
            elif rates:
                self.price = max(2 * self.price, rates[len(rates) // 4])
        return best

    def _solve(self, moved: frozenset[int], moves: int, start: Sequence[int] | None, reserve: int) -> Found | None:
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
            computing_ns = sum(graph.op_cost_ns[op] for op in order)
            if self.best is not None and computing_ns >= self.best.cost_ns:
                break  # copies only add to it, and so does less room
            taken = self.take(order, moved, reserve, prune=True)
            if taken is not None and (best is None or taken.cost_ns < best.cost_ns):
                best = taken
            elif best is not None:
                break
            if not moved or (taken is not None and taken.cost_ns <= computing_ns):
                break
            start = order
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

    def suggested(self, moved: Floats) -> list[frozenset[int]]:
        """The sets that a relaxation suggests, from few values to many."""
        sets = (frozenset(np.flatnonzero(moved >= level).tolist()) & frozenset(self.movable) for level in _LEVELS)
        return list(dict.fromkeys(sets))

    def run(self, more: Callable[[], Floats | None]) -> None:
        """Change the best set a value at a time until there is a reason to stop, and in turn try those that relaxations
        suggest; `more` brings the next one. Where somebody else has found a better plan it goes on from that, polished.
        """
        known: AnyPlan | None = None
        sets: list[frozenset[int]] = []
        suggested = False
        self.polish()
        polished, rounds = self.best, 0
        while not self.stop():
            if (moved := more()) is not None:
                sets = self.suggested(moved)
            plan, cost_ns = self.incumbent.plan, self.incumbent.cost_ns
            cheaper = cost_ns is not None and (self.best is None or cost_ns < self.best.cost_ns)
            if cheaper and plan is not None and plan is not known:
                known = plan
                self.adopt(plan)
                rounds = _POLISH_EVERY
            rounds += 1
            if rounds > _POLISH_EVERY and self.best is not polished:
                self.polish()
                polished, rounds = self.best, 0
            suggested = bool(sets) and (self.best is None or not suggested)
            if suggested:
                self.solve(sets.pop(), _FIRST_MOVES, None if self.best is None else self.best.order)
            elif self.best is not None:
                found = self.best
                self.solve(self.changed(found), _MOVES, found.order, self.random.choice((0, found.reserve)))
            else:
                half = self.random.sample(self.movable, len(self.movable) // 2)
                for chosen in (self.movable, half):
                    if self.best is None:
                        self.solve(frozenset(chosen), _FIRST_MOVES)

    def changed(self, found: Found) -> frozenset[int]:
        """A set near that of a plan: a value that is made again is moved instead, or one that moves is kept."""
        graph = self.graph
        used = found.used
        counts = recomputed(found.order, graph.ops)
        again = [v for v in self.movable if counts[graph.value_op[v]] and v not in used]
        moved = set(found.moved & used) if self.random.random() < 0.5 else set(found.moved)
        for _ in range(1 + int(self.random.expovariate(1.0))):
            if again and (not used or self.random.random() < 0.6):
                moved.add(self.random.choices(again, [self.worth[v] for v in again])[0])
            elif used:
                moved.discard(self.random.choice(sorted(used)))
            elif self.movable:
                moved ^= {self.random.choice(self.movable)}
        return frozenset(moved)
