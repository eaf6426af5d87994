"""The local search: annealing cycles over sets of recomputations, from the greedy plan, from the best, from nothing.

Temperatures are in mean op costs.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from remat_ir import Graph, Plan, plan_of
from remat_ir.greedy import peak_of

from ..deadline import Deadline, never
from ..incumbent import Incumbent
from .layout import BEST_COST, BEST_LENGTH, Ints, profile_of
from .moves import anneal
from .profile import best_keys, keys_of, load, sequence_of

HOT, WARM, COOL, COOLEST, COLD = 2.0, 0.6, 0.1, 0.02, 0.002
"""Where cycles from nothing start, where others start, where all end."""
_LONG = 400
"""Moves per op below which what a warm cycle breaks is not mended by its end."""


def start_of(number: int, moves: int, ops: int) -> float:
    """How hot the cycle of this number starts, given its length: long ones in turns cool, from nothing, and warm."""
    if moves < _LONG * ops:
        return (COOL, COOLEST)[number % 2]
    return (COOL, HOT, WARM)[number % 3]


def cooling(hot: float, moves: int, slice_moves: int, cold: float = COLD) -> Iterator[tuple[int, float, float]]:
    """The slices of a cycle: how many moves, and between which temperatures, the last one ending at `cold`.

    >>> [(moves, round(end, 3)) for moves, _, end in cooling(2.0, 5, 2)]
    [(2, 0.126), (2, 0.008), (1, 0.002)]
    """
    for made in range(0, moves, slice_moves):
        now = min(slice_moves, moves - made)
        yield now, hot * (cold / hot) ** (made / moves), hot * (cold / hot) ** ((made + now) / moves)


SLICE, SHORT_SLICE = 8192, 2048
"""Moves between two looks at the clock: 10 to 100 ms; fewer while there is no schedule within the budget."""
_FIRST_CYCLE = 8
"""Slices in the first cycle; each later one is longer by `_GROWTH`."""
_GROWTH = 1.3
_LONGEST_CYCLE = 2500
_ATTEMPT = 2 * SLICE
"""Moves of a start from nothing, times those of `luby`: near the least budget it finds a schedule soon or never."""


def cycles() -> Iterator[int]:
    """The lengths in moves of one cycle after the other."""
    length = float(_FIRST_CYCLE * SLICE)
    while True:
        yield int(length)
        length = min(length * _GROWTH, float(_LONGEST_CYCLE * SLICE))


def luby(number: int) -> int:
    """The sequence 1, 1, 2, 1, 1, 2, 4, 1, … from number 1 on (Luby et al., 1993).

    >>> [luby(number) for number in range(1, 10)]
    [1, 1, 2, 1, 1, 2, 4, 1, 1]
    """
    size = 1
    while size < number + 1:
        size *= 2
    return size // 2 if size == number + 1 else luby(number - size // 2 + 1)


_MOVE_S, _MOVE_OP_S = 2e-6, 1e-8
"""What a move counts where work is counted in place of time, and for each op of the graph."""


def move_s(graph: Graph) -> float:
    """The seconds that a move counts where work is counted."""
    return _MOVE_S + _MOVE_OP_S * graph.ops


_SHARE = 9
"""How many times as long as making and verifying a plan the search goes on before it delivers the next one."""
_REST_S = 0.02


class Delivery:
    """Brings a search's plans to the incumbent, not so often that making and verifying them becomes the main work."""

    def __init__(self, search: Search, incumbent: Incumbent) -> None:
        self.search, self.incumbent = search, incumbent
        self.due = 0.0
        self._counted = search.moves

    def check(self) -> bool:
        """Deliver if it is time to; whether the search should stop."""
        watch = self.incumbent.deadline
        watch.spend((self.search.moves - self._counted) * move_s(self.search.graph))
        self._counted = self.search.moves
        stopped = self.incumbent.stopped()
        while not stopped and watch.work is None and self.incumbent.claimed_enough():
            # all that is left is to certify a claim: the cores are for that
            time.sleep(_REST_S)
            stopped = self.incumbent.stopped()
        if stopped or self.incumbent.cost_ns is None or watch.elapsed() >= self.due:
            self.deliver()
        return stopped or self.incumbent.stopped()

    def deliver(self) -> None:
        """Offer the best plan if the incumbent's is more expensive."""
        cost, known = self.search.cost_ns, self.incumbent.cost_ns
        if cost is None or (known is not None and known <= cost):
            return
        start = self.incumbent.deadline.elapsed()
        plan = self.search.plan()
        if plan is not None:
            self.incumbent.offer(plan, "search")
        end = self.incumbent.deadline.elapsed()
        self.due = end + _SHARE * (end - start)


_PRESSURE = 100.0
"""Factor on the penalty weight while there is no schedule within the budget: by trial on budgets near the least."""


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
        self._attempts = (_ATTEMPT * luby(number) for number in itertools.count(1))
        self._profile: Ints = profile_of(graph, budget_bytes, seed)
        self._mean_cost = max(1.0, graph.total_cost_ns / graph.ops)
        mean_size = max(1.0, sum(graph.value_bytes) / max(1, graph.values))
        self._weight = self._usual_weight = 3.0 * self._mean_cost / mean_size
        self._plain = keys_of(graph, range(graph.ops))
        self.restart()

    @property
    def cost_ns(self) -> int | None:
        """Of the best schedule found within the budget, in ns."""
        return int(self._profile[BEST_COST]) if self._profile[BEST_LENGTH] else None

    def plan(self) -> Plan | None:
        """The best schedule found as a plan."""
        sequence = self.sequence()
        return None if sequence is None else plan_of(self.graph, sequence)

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
        return True

    def restart(self) -> None:
        """Go on from the schedule without recomputations."""
        load(self._profile, self._plain)

    def resume_best(self) -> None:
        """Go on from the best schedule found, if there is one."""
        if self._profile[BEST_LENGTH]:
            load(self._profile, best_keys(self._profile))

    def cycle(self, moves: int, hot: float, each: Callable[[], bool], slice_moves: int = SLICE) -> bool:
        """Anneal once from `hot` mean op costs in slices; `each` is called after every slice, and ends it by True.

        Returns whether it was ended so.
        """
        scale = self._mean_cost
        for now, start, end in cooling(hot, moves, slice_moves):
            self._weight = anneal(self._profile, self._weight, start * scale, end * scale, now)
            self.moves += now
            if each():
                return True
        return False

    def cool(self, moves: int, hot: float, each: Callable[[], bool]) -> bool:
        """Anneal once at the usual penalty weight, whatever it has risen to; whether `each` ended it."""
        self._weight = self._usual_weight
        return self.cycle(moves, hot, each)

    def seek(self, each: Callable[[], bool], moves: int | None = None) -> bool:
        """Look for a first schedule within the budget, at a high penalty weight; whether there is one.

        Starts from nothing again and again, where the last call has left off; `each` is called after every slice and
        ends it by True.
        """
        end = None if moves is None else self.moves + moves
        while True:
            length = next(self._attempts)
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
        """A plan within the budget by one cool cycle from one that exceeds it, at a high penalty weight, if found."""
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
        between: Callable[[int], object] = lambda moves: None,
    ) -> None:
        """Search until the incumbent says stop, or for so many moves; offers what is better.

        Between cycles it goes on from the incumbent's plan where that is cheaper. `between` is called after every slice
        with the number of moves made. The result for a given number of moves depends on the seed alone, as long as
        nobody else offers plans.
        """
        delivery = Delivery(self, incumbent)

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
            theirs, cost, own = incumbent.plan, incumbent.cost_ns, self.cost_ns
            if isinstance(theirs, Plan) and cost is not None and (own is None or cost < own):
                self.adopt(theirs.computes)
            if self.cost_ns is None and number % 2:
                # the plan that is known has no equal among schedules
                self.seek(check, moves)
            else:
                hot = start_of(number, moves, self.graph.ops)
                # from nothing where it starts hot, else from the best, which its first moves disturb
                self.restart() if hot == HOT else self.resume_best()
                self.cycle(moves, hot, check)
            delivery.deliver()


def polish(
    graph: Graph,
    budget_bytes: int,
    sequence: Sequence[int],
    *,
    moves: int,
    seed: int = 0,
    stop: Callable[[], bool] = never,
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
            deadline.spend(search.moves * move_s(graph))
            tried += 1
            if better is None:
                step = 1 - _SMALLER * (1 - step)
            else:
                plan, peak = better, peak_of(graph, better)
                step = max(_LARGEST_STEP, 1 - _LARGER * (1 - step))
    return plan


_STARTS_KEPT = 4
_START_MOVES = 8 * SLICE
"""Moves of one cycle: where a few short ones lead differs more than where a long one does."""


class Starts:
    """A search that makes short cool cycles from the last few sequences of relaxations, in turn, the newest first.

    Any thread may add a sequence; one thread runs the search.
    """

    def __init__(self, incumbent: Incumbent, seed: int) -> None:
        self._incumbent, self._seed = incumbent, seed
        self._recent: deque[Sequence[int]] = deque(maxlen=_STARTS_KEPT)
        self._new = 0
        self._search: Search | None = None

    def add(self, sequence: Sequence[int]) -> None:
        """Take a sequence, which is the next one; the oldest is forgotten."""
        self._recent.appendleft(sequence)
        self._new = 0

    def run(self, moves: int) -> None:
        """Go on until so many moves have been made since the first call, where there are starts at all."""
        problem = self._incumbent.problem
        while self._recent:
            search = self._search = self._search or Search(problem.graph, problem.budget_bytes, self._seed)
            if search.moves >= moves:
                return
            start = self._recent[self._new % len(self._recent)]
            self._new += 1
            delivery = Delivery(search, self._incumbent)
            if not search.adopt(start) or search.cool(_START_MOVES, (COOL, COOLEST)[self._new % 2], delivery.check):
                return
            delivery.deliver()
