"""The local search: annealing cycles over sets of recomputations, from the greedy plan, from the best, from nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import cache

from remat_ir import Graph, Plan, graph_of
from remat_ir.greedy import greedy_plans

from ..incumbent import Incumbent
from .anneal import anneal
from .profile import BEST_COST, BEST_LENGTH, Ints
from .state import best_keys, keys_of, load, note_loaded, plan_from, profile_of, sequence_of

_log = logging.getLogger("remat.solver")

SLICE, _SHORT = 8192, 2048
"""Moves between two looks at the clock: 10 to 100 ms; fewer while there is no schedule within the budget."""
_HOT, _WARM, _COOL, _COOLEST, _COLD = 2.0, 0.6, 0.1, 0.02, 0.002
"""Temperatures in mean op costs: where cycles from nothing start, where others start, where all end."""
_POOL = 3
_FIRST_CYCLE = 8
"""Slices in the first cycle; each later one is longer by `_GROWTH`."""
_GROWTH = 1.3
_LONGEST_CYCLE = 2500
_ATTEMPT = 2 * SLICE
_PRESSURE = 100.0
"""Factor on the price of memory while there is no schedule within the budget: by trial on budgets near the least."""
_LONG = 400
"""Moves per op below which what a warm cycle breaks is not mended by its end."""


class Search:
    """A local search on one problem; its state lasts from one call to the next.

    Its space: the fixed op order, one recomputation per op and stage. Deterministic for a seed and a number of moves.
    Compiled code runs without the interpreter's lock; a search belongs to one thread at a time.

    Attributes:
        graph: the graph that is searched.
        moves: moves made so far.
    """

    def __init__(self, graph: Graph, budget_bytes: int, seed: int = 0) -> None:
        self.graph = graph
        self.moves = 0
        self._budget = budget_bytes
        self._profile: Ints = profile_of(graph, budget_bytes, seed)
        self._mean_cost = max(1.0, graph.total_cost_ns / graph.ops)
        mean_size = max(1.0, sum(graph.value_bytes) / max(1, graph.values))
        self._weight = self._usual_weight = 3.0 * self._mean_cost / mean_size
        self._plain = keys_of(graph, range(graph.ops))
        load(self._profile, self._plain)
        note_loaded(self._profile, self._plain)

    @property
    def cost_ns(self) -> int | None:
        """Of the best schedule found within the budget, in ns."""
        return int(self._profile[BEST_COST]) if self._profile[BEST_LENGTH] else None

    def plan(self) -> Plan | None:
        """The best schedule found as a plan."""
        return plan_from(self.graph, best_keys(self._profile)) if self._profile[BEST_LENGTH] else None

    def sequence(self) -> tuple[int, ...] | None:
        """The best schedule found as ops in the order in which they run."""
        return sequence_of(self.graph, best_keys(self._profile)) if self._profile[BEST_LENGTH] else None

    def adopt(self, sequence: Sequence[int]) -> bool:
        """Go on from a plan's ops; False where there is no room for so many recomputations.

        Where an op runs more than once in a stage, or a stage not in op order, the schedule differs from the plan and
        may need more memory.
        """
        keys = keys_of(self.graph, sequence)
        if len(keys) > 3 * self.graph.ops:
            return False
        load(self._profile, keys)
        note_loaded(self._profile, keys)
        return True

    def restart(self) -> None:
        """Go on from the schedule without recomputations."""
        load(self._profile, self._plain)

    def resume_best(self) -> None:
        """Go on from the best schedule found, if there is one."""
        if self._profile[BEST_LENGTH]:
            load(self._profile, best_keys(self._profile))

    def step(self, moves: int, hot: float, cold: float) -> None:
        """Make moves while the temperature falls from `hot` to `cold` mean op costs."""
        scale = self._mean_cost
        self._weight, _ = anneal(self._profile, self._weight, hot * scale, cold * scale, moves, _POOL)
        self.moves += moves

    def seek(self, each: Callable[[], bool], moves: int | None = None) -> bool:
        """Look for a first schedule within the budget, at a high price of memory; whether there is one.

        Starts over from nothing again and again, at lengths in the ratios 1, 1, 2, 1, 1, 2, 4, … (Luby et al., 1993):
        near the least budget a start finds a schedule soon or never.
        """
        end = None if moves is None else self.moves + moves
        attempt = 0
        while self.cost_ns is None and (end is None or self.moves < end):
            attempt += 1
            self.restart()
            self._weight = _PRESSURE * self._usual_weight
            length = _luby(attempt) * _ATTEMPT
            if end is not None:
                length = min(length, end - self.moves)
            found_or_over = self.cycle(length, _HOT, lambda: each() or self.cost_ns is not None, _SHORT)
            if found_or_over and self.cost_ns is None:
                break
        self._weight = self._usual_weight
        return self.cost_ns is not None

    def cycle(self, moves: int, hot: float, each: Callable[[], bool], slice_moves: int = SLICE) -> bool:
        """Anneal once from `hot` in slices; `each` is called after every slice and ends the cycle by True.

        Returns whether it was ended so.
        """
        made = 0
        while made < moves:
            now = min(slice_moves, moves - made)
            start, end = made / moves, (made + now) / moves
            self.step(now, hot * (_COLD / hot) ** start, hot * (_COLD / hot) ** end)
            made += now
            if each():
                return True
        return False

    def run(self, incumbent: Incumbent, iterations: int | None = None, source: str = "search") -> None:
        """Search until the incumbent says stop, or for so many moves; offers what is better.

        Between cycles it goes on from the incumbent's plan where that is cheaper. The result for a given number of
        moves depends on the seed alone, as long as nobody else offers plans.
        """
        courier = _Courier(self, incumbent, source)
        number, length = 0, float(_FIRST_CYCLE * SLICE)
        if incumbent.plan is None and not self.seek(courier.check, iterations):
            return
        courier.deliver()
        left = None if iterations is None else iterations - self.moves
        while not incumbent.stopped() and (left is None or left > 0):
            plan, cost, own = incumbent.plan, incumbent.cost_ns, self.cost_ns
            if isinstance(plan, Plan) and cost is not None and (own is None or cost < own):
                self.adopt(plan.computes)
            moves = int(length) if left is None else min(int(length), left)
            if self.cost_ns is None and number % 2:
                # the plan that is known has no equal among schedules
                self.seek(courier.check, moves)
                moves = 0
            if moves < _LONG * self.graph.ops:
                hot = (_COOL, _COOLEST)[number % 2]
            else:
                hot = (_COOL, _HOT, _WARM)[number % 3]
            if hot == _HOT:
                self.restart()
            else:
                self.resume_best()
            self.cycle(moves, hot, courier.check)
            courier.deliver()
            left = None if iterations is None else iterations - self.moves
            number, length = number + 1, min(length * _GROWTH, float(_LONGEST_CYCLE * SLICE))


def _luby(number: int) -> int:
    """The sequence 1, 1, 2, 1, 1, 2, 4, 1, … from number 1 on."""
    size = 1
    while size < number + 1:
        size *= 2
    return size // 2 if size == number + 1 else _luby(number - size // 2 + 1)


class _Courier:
    """Brings a search's plans to the incumbent, not so often that making and judging them becomes the main work."""

    def __init__(self, search: Search, incumbent: Incumbent, source: str) -> None:
        self.search, self.incumbent, self.source = search, incumbent, source
        self.due = 0.0

    def check(self) -> bool:
        """Deliver if it is time to; whether the search should stop."""
        stopped = self.incumbent.stopped()
        if stopped or self.incumbent.cost_ns is None or self.incumbent.deadline.elapsed() >= self.due:
            self.deliver()
        return stopped or self.incumbent.stopped()

    def deliver(self) -> None:
        """Offer the best plan if the incumbent's is dearer."""
        cost, known = self.search.cost_ns, self.incumbent.cost_ns
        if cost is None or (known is not None and known <= cost):
            return
        start = self.incumbent.deadline.elapsed()
        plan = self.search.plan()
        if plan is not None:
            self.incumbent.offer(plan, self.source)
        end = self.incumbent.deadline.elapsed()
        self.due = end + 9 * (end - start)


def polish(
    graph: Graph,
    budget_bytes: int,
    sequence: Sequence[int],
    *,
    moves: int,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[int, ...] | None:
    """A cheaper sequence of ops within the budget, or a first one, by one cool cycle from the one given; else None.

    `sequence` may exceed the budget. `stop` is polled about every 50 ms.
    """
    search = Search(graph, budget_bytes, seed)
    if not search.adopt(sequence):
        return None
    before = search.cost_ns
    search.cycle(moves, _COOL, stop)
    return None if search.cost_ns == before else search.sequence()


_compiled = threading.Event()


@cache
def compiling() -> threading.Event:
    """Compile the search in a thread of its own, or load it from numba's cache; the event tells when that is over."""

    def compile_all() -> None:
        try:
            search = Search(graph_of([1, 1, 1], [1, 1, 1], [[], [0], [0, 1]]), 2)
            search.adopt((0, 1, 0, 2))
            search.step(64, _HOT, _COLD)
        except Exception:  # nobody waits in vain: the first search compiles again, and raises what is the matter
            _log.warning("the search could not be compiled ahead of its use", exc_info=True)
        finally:
            _compiled.set()

    threading.Thread(target=compile_all, name="compile-search", daemon=True).start()
    return _compiled


def is_compiled() -> bool:
    """Whether the search can run at once; asking does not start the compiler."""
    return _compiled.is_set()


def first_plan(incumbent: Incumbent, *, brief: bool = False) -> None:
    """Offer greedy plans where the incumbent has none yet; `brief`: try one rule only, since better is to follow."""
    if incumbent.plan is None:
        problem, rules = incumbent.problem, {"tries": 1, "failures": 1} if brief else {}
        for plan in greedy_plans(problem.graph, problem.budget_bytes, stop=incumbent.deadline.passed, **rules):
            incumbent.offer(plan, "greedy")


def await_compiled(incumbent: Incumbent) -> bool:
    """Wait for the compiler; False if the incumbent says stop before it is done."""
    ready = compiling()
    while not ready.wait(0.02):
        if incumbent.stopped():
            return False
    return True
