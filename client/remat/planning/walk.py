"""One walk through a training step inside a limit: evict under pressure, remake on demand."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple

from remat_ir import Graph, plan_of, replay

MOST_COMPUTES = 20
"""A walk that computes more than this many times the number of ops thrashes, and is given up."""

DEEPEST_LOOK = 200
"""Ops or values looked at when the worth of a value is estimated."""


class Taste(NamedTuple):
    """Exponents of remake cost, bytes and distance to the next use in the eviction score."""

    cost: float
    size: float
    distance: float


class Stuck(Exception):
    """A walk cannot go on inside its limit."""


class Walk:
    """One pass over the ops inside a limit in bytes, evicting by one taste; `run` gives the order of computation."""

    def __init__(self, graph: Graph, limit_bytes: int, taste: Taste) -> None:
        self.graph, self.limit, self.taste = graph, limit_bytes, taste
        self.keep = frozenset(graph.keep)
        self.pinned = set(graph.once) | {graph.value_op[v] for v in graph.keep}
        self.optional = frozenset(graph.optional)
        self.resident = [False] * graph.values
        self.locks = [0] * graph.values
        self.lost = [False] * graph.values  # not resident, and cannot be remade
        self.used = [0] * graph.values  # how many first readings are over
        self.memory = graph.fixed_bytes
        self.now = 0  # the op whose first computation is next
        self.heap: list[tuple[float, int]] = []
        self.sequence: list[int] = []
        self.most = MOST_COMPUTES * graph.ops

    def run(self) -> list[int]:
        """The ops in the order of their computation.

        Raises:
            Stuck: the limit leaves no way on.
        """
        for op in range(self.graph.ops):
            self.now = op
            self._make(op)
            for value in self.graph.op_inputs[op]:
                self.used[value] += 1
                self._queue(value)
        return self.sequence

    def _make(self, op: int) -> None:
        """Compute an op, after whatever it reads that is gone; the stack replaces recursion, which may go deep."""
        graph, stack = self.graph, [op]
        self._lock(op, 1)
        while stack:
            top = stack[-1]
            missing = next((v for v in graph.op_inputs[top] if not self.resident[v]), None)
            if missing is None:
                stack.pop()
                self._compute(top)
                self._lock(top, -1)
                continue
            maker = graph.value_op[missing]
            if maker in self.pinned or len(self.sequence) > self.most:
                raise Stuck
            stack.append(maker)
            self._lock(maker, 1)

    def _lock(self, op: int, by: int) -> None:
        for value in self.graph.op_inputs[op]:
            self.locks[value] += by

    def _compute(self, op: int) -> None:
        graph, sizes = self.graph, self.graph.value_bytes
        made = graph.op_values[op]
        for value in made:
            if self.resident[value]:
                self.resident[value] = False
                self.memory -= sizes[value]
        kept = [v for v in made if self.locks[v] or v in self.keep or self._next_use(v) is not None]
        need = graph.op_workspace_bytes[op] + sum(sizes[v] for v in graph.op_always[op])
        need += sum(sizes[v] for v in kept if v in self.optional)
        self._evict(self.memory + need - self.limit)
        for value in kept:
            self.resident[value] = True
            self.lost[value] = False
            self.memory += sizes[value]
            self._queue(value)
        self.sequence.append(op)

    def _next_use(self, value: int) -> int | None:
        users, used = self.graph.users[value], self.used[value]
        return users[used] if used < len(users) else None

    def _queue(self, value: int) -> None:
        if self.resident[value] and value not in self.keep:
            heapq.heappush(self.heap, (self._score(value), value))

    def _evict(self, excess: int) -> None:
        """Free values until `excess` bytes are gone, the lowest score first; scores in the heap may be out of date."""
        heap, aside = self.heap, []
        while excess > 0:
            if not heap:
                raise Stuck
            old, value = heapq.heappop(heap)
            if not self.resident[value]:
                continue
            score = self._score(value)
            if self.locks[value] or score == math.inf:
                aside.append((old, value))
                continue
            if heap and score > old and score > heap[0][0]:
                heapq.heappush(heap, (score, value))
                continue
            self._drop(value)
            excess -= self.graph.value_bytes[value]
        for entry in dict.fromkeys(aside):
            heapq.heappush(heap, entry)

    def _drop(self, value: int) -> None:
        self.resident[value] = False
        self.memory -= self.graph.value_bytes[value]
        if self._remaking(value) == math.inf:
            self.lost[value] = True
            for other in tuple(self._gone_after(value)):
                self.lost[other] = True

    def _score(self, value: int) -> float:
        """What losing a value now would cost, per byte and op of its absence; infinite where it must stay."""
        remaking = self._remaking(value)
        use = self._next_use(value)
        if use is None:
            use = self._indirect_use(value, remaking == math.inf)
            if use is None:
                return 0.0
        if remaking == math.inf:
            return remaking
        taste, size = self.taste, self.graph.value_bytes[value]
        distance = max(1, use - self.now)
        return float((remaking + 1) ** taste.cost / ((size + 1) ** taste.size * distance**taste.distance))

    def _remaking(self, value: int) -> float:
        """The cost of remaking a value from what is resident, itself not; infinite where it cannot be."""
        graph = self.graph
        first = graph.value_op[value]
        if first in self.pinned:
            return math.inf
        seen, stack, cost = {first}, [first], 0
        while stack:
            op = stack.pop()
            cost += graph.op_cost_ns[op]
            for source in graph.op_inputs[op]:
                if self.resident[source]:
                    continue
                if self.lost[source]:
                    return math.inf
                maker = graph.value_op[source]
                if maker not in seen and len(seen) < DEEPEST_LOOK:
                    seen.add(maker)
                    stack.append(maker)
        return cost

    def _indirect_use(self, value: int, whole: bool) -> int | None:
        """The next op for which a value that no op has yet to read may still be wanted, to remake one that is gone.

        Unless `whole`, no more than `DEEPEST_LOOK` values are looked at; with it, any such op will do.
        """
        nearest: int | None = None
        for looked, other in enumerate(self._gone_after(value)):
            use = self._next_use(other)
            if use is not None:
                nearest = use if nearest is None else min(use, nearest)
                if whole:
                    break
            if not whole and looked == DEEPEST_LOOK:
                break
        return nearest

    def _gone_after(self, value: int) -> Iterator[int]:
        """The values made from this one that are not resident now but have been, directly or through such values."""
        graph, seen, stack = self.graph, {value}, [value]
        while stack:
            for op in graph.users[stack.pop()]:
                if op >= self.now:
                    break
                if op in self.pinned:
                    continue
                for made in graph.op_values[op]:
                    if not self.resident[made] and not self.lost[made] and made not in seen:
                        seen.add(made)
                        stack.append(made)
                        yield made


def without_needless(graph: Graph, sequence: list[int], budget_bytes: int, most: int = 4_000) -> list[int]:
    """The sequence less those recomputations whose values could simply have stayed, the dearest tried first.

    Taking one out stretches the former instance of each value that it makes, from its last use to the next one.
    """
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
    for position in again[:most]:
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
