"""The local search: annealing cycles over sets of recomputations, from the greedy plan, from the best, from nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from remat_ir import Graph, Plan

from ..incumbent import Incumbent
from .anneal import anneal
from .delivery import Delivery
from .layout import BEST_COST, BEST_LENGTH, Ints
from .restarts import SHORT_SLICE, SLICE, attempts, cycles
from .state import best_keys, keys_of, load, note_loaded, plan_from, profile_of, sequence_of
from .temperatures import COOL, HOT, cooling, start_of

_POOL = 3
_PRESSURE = 100.0
"""Factor on the price of memory while there is no schedule within the budget: by trial on budgets near the least."""


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

    def cycle(self, moves: int, hot: float, each: Callable[[], bool], slice_moves: int = SLICE) -> bool:
        """Anneal once from `hot` in slices; `each` is called after every slice and ends the cycle by True.

        Returns whether it was ended so.
        """
        for now, start, end in cooling(hot, moves, slice_moves):
            self.step(now, start, end)
            if each():
                return True
        return False

    def cool(self, moves: int, hot: float, each: Callable[[], bool]) -> bool:
        """Anneal once at the usual price of memory, whatever it has risen to; whether `each` ended it."""
        self._weight = self._usual_weight
        return self.cycle(moves, hot, each)

    def seek(self, each: Callable[[], bool], moves: int | None = None) -> bool:
        """Look for a first schedule within the budget, at a high price of memory; whether there is one.

        Starts from nothing again and again; `each` is called after every slice and ends it by True.
        """
        end = None if moves is None else self.moves + moves
        for length in attempts():
            left = length if end is None else min(length, end - self.moves)
            if self.cost_ns is not None or left <= 0:
                break
            self.restart()
            self._weight = _PRESSURE * self._usual_weight
            ended = self.cycle(left, HOT, lambda: each() or self.cost_ns is not None, SHORT_SLICE)
            if ended and self.cost_ns is None:
                break
        self._weight = self._usual_weight
        return self.cost_ns is not None

    def tighten(self, sequence: Sequence[int], moves: int, stop: Callable[[], bool]) -> Plan | None:
        """A plan within the budget by one cool cycle from one that exceeds it, at a high price of memory, if found."""
        if not self.adopt(sequence):
            return None
        self._weight = _PRESSURE * self._usual_weight
        self.cycle(moves, COOL, lambda: stop() or self.cost_ns is not None, SHORT_SLICE)
        self._weight = self._usual_weight
        return self.plan()

    def run(
        self,
        incumbent: Incumbent,
        iterations: int | None = None,
        source: str = "search",
        between: Callable[[int], object] = lambda moves: None,
    ) -> None:
        """Search until the incumbent says stop, or for so many moves; offers what is better.

        Between cycles it goes on from the incumbent's plan where that is cheaper. `between` is called after every slice
        with the number of moves made. The result for a given number of moves depends on the seed alone, as long as
        nobody else offers plans.
        """
        delivery = Delivery(self, incumbent, source)

        def check() -> bool:
            between(self.moves)
            return delivery.check()

        if incumbent.plan is None and not self.seek(check, iterations):
            return
        delivery.deliver()
        for number, length in enumerate(cycles()):
            moves = length if iterations is None else min(length, iterations - self.moves)
            if incumbent.stopped() or moves <= 0:
                return
            if (theirs := delivery.cheaper()) is not None:
                self.adopt(theirs.computes)
            if self.cost_ns is None and number % 2:
                # the plan that is known has no equal among schedules
                self.seek(check, moves)
            else:
                hot = start_of(number, moves, self.graph.ops)
                self.perturb(hot)
                self.cycle(moves, hot, check)
            delivery.deliver()

    def perturb(self, hot: float) -> None:
        """Go on from nothing where a cycle starts hot, else from the best schedule, which its first moves disturb."""
        if hot == HOT:
            self.restart()
        else:
            self.resume_best()


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
    search.cycle(moves, COOL, stop)
    return None if search.cost_ns == before else search.sequence()
