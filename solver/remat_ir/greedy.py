"""A valid plan at once, in plain Python, with nothing proved about it: evict under pressure, recompute on demand.

The ops are run in order inside the budget. Where memory is short, the resident value is evicted that costs the least to
make again per byte and per op until its next use, and missing inputs are recomputed on demand. The idea is that of
dynamic tensor rematerialization (Kirisame et al., 2021, Section 3), with the true next use in place of its staleness,
since the whole step is known here. The verifier never imports this module.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from .graph import Graph, working_set
from .plan import Plan, makers, plain_plan, plan_of
from .problem import plain_peak
from .replay import replay

_NEVER = 1 << 60
_DEPTH = 64
"""Missing ancestors that are counted into the cost of an eviction."""
_LONGEST, _LONGEST_STAGE = 20, 64
"""Computes per op, in all, and before one first computation beyond one per earlier op, at which a walk is thrashing."""
_POLL = 64
"""First computations between two looks at the clock."""
_WIDTH = 200
"""Missing values that are looked at for the next use of one that they are made from."""


def never() -> bool:
    """Nothing stops a walk."""
    return False


def walk(graph: Graph, limit_bytes: int, weight: float, stop: Callable[[], bool] = never) -> list[int] | None:
    """The ops in the order of their computation, inside the limit; None where it found no way, or was stopped.

    Args:
        weight: exponent of the distance to the next use: the further it is, the longer an eviction relieves memory.
    """
    return _Walk(graph, limit_bytes, weight).sequence(stop)


class _Walk:
    """A value is resident, or missing and recoverable, or lost: made by an op that may not run again, or by one that
    reads a lost value, and of no further use. Values of `frozen` ops, which are these, are never evicted.

    The heap holds one valid entry per evictable value. Its score may be too low, since the cost of recomputing rises
    as ancestors go and the next use comes nearer; it is brought up to date before the value is chosen.
    """

    def __init__(self, graph: Graph, limit_bytes: int, weight: float) -> None:
        self.graph, self.limit, self.weight = graph, limit_bytes, weight
        self.now = 0
        self.memory = graph.fixed_bytes
        self.order: list[int] = []
        self.resident = bytearray(graph.values)
        self.evictable = bytearray(graph.values)
        self.keep = frozenset(graph.keep)
        self.frozen = bytearray(graph.ops)
        self.ending: dict[int, list[int]] = {}  # the last stage of ops that may run again until then
        for op, last in enumerate(graph.last_stage):
            self.frozen[op] = last == op
            if op < last < graph.ops:
                self.ending.setdefault(last, []).append(op)
        self.cursor = [0] * graph.values  # first entry of a value's users at or after `now`
        self.over = bytearray(graph.values)  # missing, and no longer read, not even to recompute what is missing
        self.next_use = [_NEVER] * graph.values
        self.locked = [0] * graph.values
        self.recompute = [graph.op_cost_ns[op] for op in graph.value_op]
        self.entry = [-1.0] * graph.values  # the score of the valid entry
        self.heap: list[tuple[float, int]] = []

    def sequence(self, stop: Callable[[], bool]) -> list[int] | None:
        """The ops in the order in which they run, or None where the limit could not be held."""
        for op in range(self.graph.ops):
            if not op % _POLL and stop():
                return None
            self.now = op
            if not (all(self._end(again) for again in self.ending.get(op, ())) and self._compute(op)):
                return None
            self.now = op + 1
            for value in (*self.graph.op_inputs[op], *self.graph.op_values[op]):
                self._settle(value)
        return self.order

    def _due(self, value: int) -> int:
        """The op, from `now` on, by which the value is read for a first computation, or `_NEVER`."""
        readers, at, now = self.graph.users[value], self.cursor[value], self.now
        while at < len(readers) and readers[at] < now:
            at += 1
        self.cursor[value] = at
        return readers[at] if at < len(readers) else self._indirectly_due(value)

    def _indirectly_due(self, value: int) -> int:
        """The same of what is missing and made from the value: whoever recomputes that reads the value again."""
        graph, now, seen, stack, nearest = self.graph, self.now, {value}, [value], _NEVER
        while stack and (nearest == _NEVER or len(seen) < _WIDTH):
            for op in graph.users[stack.pop()]:
                if op >= now:
                    nearest = min(nearest, op)
                    break
                if self.frozen[op]:
                    continue
                for made in graph.op_values[op]:
                    if not (self.resident[made] or self.over[made] or made in seen):
                        seen.add(made)
                        stack.append(made)
        return nearest

    def _settle(self, value: int) -> None:
        """Bring the next use of a resident value up to date, and drop it where there is none."""
        if not self.resident[value]:
            return
        due = self._due(value)
        if due == _NEVER and value not in self.keep and not self.locked[value]:
            self._drop(value)
            self.over[value] = 1
            if self.frozen[self.graph.value_op[value]]:
                self._freeze(self.graph.users[value])
        elif due != self.next_use[value]:
            self.next_use[value] = due
            self._queue(value)

    def _end(self, op: int) -> bool:
        """Make what is missing of an op's values and due, as it may not run after this stage; False where that fails.

        The op is computed where one of them is missing, as long as it is not frozen for what it reads.
        """
        missing = (v for v in self.graph.op_values[op] if not (self.resident[v] or self.over[v]))
        if not self.frozen[op] and any(self._due(v) != _NEVER for v in missing) and not self._compute(op):
            return False
        self._freeze([op])
        return True

    def _freeze(self, ops: Iterable[int]) -> None:
        """Ops can't run again: nor can those that read what is missing of their values."""
        stack = list(ops)
        while stack:
            op = stack.pop()
            if not self.frozen[op]:
                self.frozen[op] = 1
                for made in self.graph.op_values[op]:
                    self.evictable[made] = 0
                    if not self.resident[made]:
                        stack += self.graph.users[made]

    def _drop(self, value: int) -> None:
        self.resident[value] = self.evictable[value] = 0
        self.memory -= self.graph.value_bytes[value]

    def _evict(self, value: int) -> None:
        """Free a value that is due again: what its recomputation reads is due, too."""
        graph, stack = self.graph, [value]
        self._drop(value)
        while stack:
            for read in graph.op_inputs[graph.value_op[stack.pop()]]:
                if self.over[read]:
                    self.over[read] = 0
                    stack.append(read)

    def _compute(self, target: int) -> bool:
        """Run an op after whatever it misses; False where memory or patience runs out.

        The stack, which replaces a recursion that may go deep, ends with the walk where this fails.
        """
        graph, stack, waiting = self.graph, [target], {target}
        most = min(_LONGEST * graph.ops + 200, len(self.order) + target + _LONGEST_STAGE)
        self._lock(target)
        while stack:
            op = stack[-1]
            missing = [v for v in graph.op_inputs[op] if not self.resident[v]]
            if missing:
                maker = graph.value_op[max(missing, key=self._appetite) if len(missing) > 1 else missing[0]]
                if self.frozen[maker] or maker in waiting:
                    return False
                stack.append(maker)
                waiting.add(maker)
                self._lock(maker)
                continue
            if not self._run(op) or len(self.order) > most:
                return False
            waiting.remove(stack.pop())
            for value in graph.op_inputs[op]:
                self.locked[value] -= 1
                if stack:
                    self._settle(value)
        return True

    def _lock(self, op: int) -> None:
        for value in self.graph.op_inputs[op]:
            self.locked[value] += 1

    def _appetite(self, value: int) -> int:
        """What must be held to make a value, besides the value itself: the largest first (Sethi and Ullman, 1970)."""
        graph, op = self.graph, self.graph.value_op[value]
        inputs = sum(graph.value_bytes[v] for v in graph.op_inputs[op] if not self.resident[v])
        return inputs + graph.op_workspace_bytes[op] + sum(graph.value_bytes[v] for v in graph.op_always[op])

    def _run(self, op: int) -> bool:
        graph, resident, sizes = self.graph, self.resident, self.graph.value_bytes
        kept = [v for v in graph.op_values[op] if v in self.keep or self.locked[v] or self._due(v) != _NEVER]
        made = sum([sizes[v] for v in {*graph.op_always[op], *kept} if not resident[v]])
        need = graph.op_workspace_bytes[op] + made
        excess = self.memory + need - self.limit
        if excess > 0 and not self._make_room(excess, {*graph.op_inputs[op], *graph.op_values[op]}):
            return False
        self.order.append(op)
        for value in kept:
            if not resident[value]:
                resident[value], self.over[value] = 1, 0
                self.memory += sizes[value]
            self.next_use[value] = self._due(value)
            self.evictable[value] = not self.frozen[op]
            self._queue(value)
        return True

    def _make_room(self, excess: int, held: set[int]) -> bool:
        """Evict until `excess` bytes are free: first what nobody on the stack waits for, then that as well."""
        for spare_locked in (True, False):
            aside: list[tuple[float, int]] = []
            while excess > 0:
                victim = self._victim(held, spare_locked, aside)
                if victim is None:
                    break
                excess -= self.graph.value_bytes[victim]
                self._evict(victim)
            for entry in aside:
                heapq.heappush(self.heap, entry)
        return excess <= 0

    def _queue(self, value: int) -> None:
        if self.evictable[value] and self.graph.value_bytes[value]:
            self.entry[value] = score = self._score(value)
            heapq.heappush(self.heap, (score, value))

    def _victim(self, held: set[int], spare_locked: bool, aside: list[tuple[float, int]]) -> int | None:
        """The value of the lowest score that may go; valid entries of those that may not are laid aside."""
        heap = self.heap
        while heap:
            old, value = heapq.heappop(heap)
            if not self.evictable[value] or old != self.entry[value]:
                continue
            if value in held or (spare_locked and self.locked[value]):
                aside.append((old, value))
                continue
            self.recompute[value], self.next_use[value] = self._recompute_cost(value), self._due(value)
            self.entry[value] = score = self._score(value)
            if heap and score > old and score > heap[0][0]:
                heapq.heappush(heap, (score, value))
                continue
            return value
        return None

    def _score(self, value: int) -> float:
        away = float(max(self.next_use[value] - self.now, 0) + 1)
        relief: float = self.graph.value_bytes[value] * away**self.weight
        return (self.recompute[value] + 1.0) / relief

    def _recompute_cost(self, value: int) -> int:
        """The cost of making a value again, missing ancestors included, up to `_DEPTH` of them."""
        graph, start = self.graph, self.graph.value_op[value]
        seen, stack, cost = {start}, [start], 0
        while stack and len(seen) < _DEPTH:
            op = stack.pop()
            cost += graph.op_cost_ns[op]
            for read in graph.op_inputs[op]:
                maker = graph.value_op[read]
                if not self.resident[read] and maker not in seen:
                    seen.add(maker)
                    stack.append(maker)
        return cost


_PRUNE_POLL = 16
"""Recomputations between two looks at the clock."""


def without_needless(
    graph: Graph,
    sequence: list[int],
    budget_bytes: int,
    most: int = 4_000,
    stop: Callable[[], bool] = never,
) -> list[int]:
    """The sequence less those recomputations whose values could simply have stayed, the most expensive tried first.

    Taking one out stretches the former instance of each value that it makes, from its last use to the next one. Where
    `stop` says so, the rest stay.
    """
    if stop():
        return sequence
    profile = [moment.peak_bytes for moment in replay(graph, plan_of(graph, sequence)) if moment.op is not None]
    uses: dict[tuple[int, int], list[int]] = {}  # (value, position made) -> positions that read that instance
    latest: dict[int, int] = {}
    made_at: dict[int, list[int]] = {}
    for position, op in enumerate(sequence):
        for value in graph.op_inputs[op]:
            uses[value, latest[value]].append(position)
        for value in graph.op_values[op]:
            latest[value] = position
            uses[value, position] = []
        made_at.setdefault(op, []).append(position)
    again = [position for positions in made_at.values() for position in positions[1:]]
    again.sort(key=lambda position: (-graph.op_cost_ns[sequence[position]], position))
    taken: set[int] = set()
    for tried, position in enumerate(again[:most]):
        if not tried % _PRUNE_POLL and stop():
            break
        op = sequence[position]
        former = max(p for p in made_at[op] if p < position and p not in taken)
        needed = [value for value in graph.op_values[op] if uses[value, position]]
        stretches = [(max(uses[v, former], default=former - 1) + 1, graph.value_bytes[v]) for v in needed]
        if not _stretch(profile, stretches, position, budget_bytes):
            continue
        for value in needed:
            uses[value, former].extend(uses[value, position])
        taken.add(position)
    return [op for position, op in enumerate(sequence) if position not in taken]


def _stretch(profile: list[int], stretches: list[tuple[int, int]], end: int, budget_bytes: int) -> bool:
    """Add each (start, bytes) to the profile up to `end`; False, with nothing added, where that breaks the budget."""
    for done, (start, size) in enumerate(stretches):
        if max(profile[start : end + 1], default=0) + size > budget_bytes:
            for undo, taken in stretches[:done]:
                profile[undo : end + 1] = [bytes_then - taken for bytes_then in profile[undo : end + 1]]
            return False
        profile[start : end + 1] = [bytes_then + size for bytes_then in profile[start : end + 1]]
    return True


WEIGHTS = (0.5, 0.0, 1.0)
"""Exponents of the distance to the next use that are tried, in this order."""


def greedy_plan(
    graph: Graph, budget_bytes: int, *, stop: Callable[[], bool] = never, tries: int = len(WEIGHTS)
) -> Plan | None:
    """The cheapest of a few eviction plans within the budget, or None if none was found; see `greedy_plans`."""
    last = deque(greedy_plans(graph, budget_bytes, stop=stop, tries=tries), maxlen=1)
    return last[0] if last else None


def greedy_plans(
    graph: Graph,
    budget_bytes: int,
    *,
    stop: Callable[[], bool] = never,
    tries: int = len(WEIGHTS),
    failures: int = len(WEIGHTS),
    skip: int = 0,
    patient: bool = False,
) -> Iterator[Plan]:
    """A few plans within the budget in bytes, as they are found, each cheaper than the one before.

    The plain plan alone where it fits; else the plan that computes the forward pass once more, where that fits, and
    walks through the graph by several rules, all without those recomputations that the budget does not need.
    Deterministic, as long as `stop` is.

    Args:
        stop: asked all the time; once it says so, what is under way is left, and a plan is yielded as it is.
        tries: how many walks are made once one has led to a plan.
        failures: after how many walks that have led to none it gives up.
        skip: how many rules are left out, and with them the plan that computes the forward pass once more.
        patient: the first walk is made to its end, whatever `stop` says.

    >>> from remat_ir import graph_of
    >>> graph = graph_of([1, 9, 1, 1], [4, 1, 4, 1], [[], [0], [1], [0, 2]])
    >>> [plan.computes for plan in greedy_plans(graph, 9)]
    [(0, 1, 2, 3)]
    """
    if plain_peak(graph) <= budget_bytes:
        yield plain_plan(graph)
        return
    best: int | None = None
    for order in _orders(graph, budget_bytes, stop, tries, failures, skip, patient):
        order = without_needless(graph, order, budget_bytes, stop=stop)
        cost = sum(graph.op_cost_ns[op] for op in order)
        if best is None or cost < best:
            best = cost
            yield plan_of(graph, order)


def _orders(
    graph: Graph, budget_bytes: int, stop: Callable[[], bool], tries: int, failures: int, skip: int, patient: bool
) -> Iterator[list[int]]:
    if not skip and (patient or not stop()):
        again = checkpointed(graph)
        if peak_of(graph, again) <= budget_bytes:
            yield list(again.computes)
    found = False
    for count, weight in enumerate(WEIGHTS[skip:]):
        until = never if patient and not count else stop
        if count >= (tries if found else failures) or until():
            return
        order = walk(graph, budget_bytes, weight, until)
        if order is not None:
            found = True
            yield order


def least_memory(
    graph: Graph,
    *,
    stop: Callable[[], bool] = never,
    rounds: int = 12,
    weights: tuple[float, ...] = WEIGHTS,
    above_bytes: int | None = None,
) -> Plan:
    """A plan with a small peak, at whatever cost: walks inside limits halved towards the working-set bound.

    The plain plan where nothing smaller is found. Where `stop` says so, the best so far. `weights` are
    the rules that are tried in each round. `above_bytes`, a limit that walks were not inside of, is looked no further.
    """
    low, plan = working_set(graph).least_bytes if above_bytes is None else above_bytes + 1, plain_plan(graph)
    high = plain_peak(graph)
    for number in range(rounds):
        if low >= high or stop():
            break
        middle = low if number == 0 and above_bytes is None else (low + high) // 2
        orders = (walk(graph, middle, weight, stop) for weight in weights)
        found = next((plan_of(graph, order) for order in orders if order is not None), None)
        if found is None:
            low = middle + 1
        else:
            plan, high = found, peak_of(graph, found)
    return plan


def peak_of(graph: Graph, plan: Plan) -> int:
    """The peak of a valid plan in bytes, fixed bytes included."""
    return max(moment.peak_bytes for moment in replay(graph, plan))


def checkpointed(graph: Graph) -> Plan:
    """The plan that computes the forward pass once more when the backward pass begins, and holds what it cannot.

    Of a graph without a backward pass it is the plain plan.
    """
    boundary = graph.backward_from
    if boundary is None:
        return plain_plan(graph)
    read = (v for op in range(boundary, graph.ops) for v in graph.op_inputs[op])
    again = makers(graph, read, lambda v: graph.value_op[v] < boundary < graph.last_stage[graph.value_op[v]])
    return plan_of(graph, (*range(boundary + 1), *sorted(again), *range(boundary + 1, graph.ops)))
