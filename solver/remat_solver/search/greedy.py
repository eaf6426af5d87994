"""A first plan at once, in plain Python and numpy: run the ops in order and evict by cost, size and next use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from remat_ir import Graph, Plan, plain_peak, plain_plan, plan_of, replay

from ..bounds import pinned_ops, working_set
from ..deadline import Deadline

_NEVER = 1 << 60
_SHORTLIST = 8
"""Victims whose recomputation cost is looked at afresh before one is chosen."""
_DEPTH = 64
"""Missing ancestors that are counted into the cost of an eviction."""
_WEIGHTS = (0.5, 0.0, 1.0)
"""Exponents of the distance to the next use: the further it is, the longer an eviction relieves memory."""
_LONGEST, _LONGEST_STAGE = 4, 64
"""Computes per op, in all, and before one first computation beyond one per earlier op, at which a try is thrashing."""


def greedy(graph: Graph, budget_bytes: int, *, deadline: Deadline | None = None, tries: int = 2) -> Plan | None:
    """The cheapest of a few eviction plans within the budget, or None if none was found; see `greedy_plans`."""
    last = deque(greedy_plans(graph, budget_bytes, deadline=deadline, tries=tries), maxlen=1)
    return last[0] if last else None


def greedy_plans(
    graph: Graph, budget_bytes: int, *, deadline: Deadline | None = None, tries: int = 2, failures: int = len(_WEIGHTS)
) -> Iterator[Plan]:
    """A few eviction plans within the budget, as they are found, each cheaper than the one before.

    Each try runs the ops in order; where memory is short it evicts the resident value that costs the least to make
    again per byte and per op until its next use, and recomputes missing inputs on demand. The idea is that of dynamic
    tensor rematerialization (Kirisame et al., 2021, Section 3), here with the future known. Deterministic; O(plan ·
    values) numpy work.

    Args:
        tries: how many rules are tried once one has led to a plan.
        failures: after how many rules that have led to none it gives up.
    """
    if plain_peak(graph) <= budget_bytes:
        yield plain_plan(graph)
        return
    best: int | None = None
    for count, weight in enumerate(_WEIGHTS):
        if count >= (failures if best is None else tries) or (count and deadline is not None and deadline.passed()):
            break
        order = _Run(graph, budget_bytes, weight).sequence()
        if order is not None:
            cost = sum(graph.op_cost_ns[op] for op in order)
            if best is None or cost < best:
                best = cost
                yield plan_of(graph, order)


def least_memory(graph: Graph, *, deadline: Deadline | None = None, rounds: int = 12) -> Plan:
    """A plan with a small peak, at whatever cost: greedy plans under budgets halved towards the working-set bound.

    The plain plan where nothing smaller is found. Stops at the deadline with the best so far.
    """
    low, plan = working_set(graph).least_bytes, plain_plan(graph)
    high = peak_of(graph, plan)
    for number in range(rounds):
        if low >= high or (number and deadline is not None and deadline.passed()):
            break
        middle = low if number == 0 else (low + high) // 2
        found = None
        for weight in _WEIGHTS[:2]:
            order = _Run(graph, middle, weight).sequence()
            if order is not None:
                found = plan_of(graph, order)
                break
        if found is None:
            low = middle + 1
        else:
            plan, high = found, peak_of(graph, found)
    return plan


def peak_of(graph: Graph, plan: Plan) -> int:
    """The peak of a valid plan in bytes, fixed bytes included."""
    return max(moment.peak_bytes for moment in replay(graph, plan))


class _Run:
    """One pass over the ops under a budget.

    A value is resident, or missing and recoverable, or lost: made by a pinned op, or by one that reads a lost value,
    and of no further use. Values of pinned and of `frozen` ops (which read a lost value) are never evicted.
    """

    def __init__(self, graph: Graph, budget_bytes: int, weight: float) -> None:
        self.graph, self.budget, self.weight = graph, budget_bytes, weight
        self.now = 0
        self.memory = graph.fixed_bytes
        self.order: list[int] = []
        self.resident = np.zeros(graph.values, bool)
        self.size: NDArray[np.float64] = np.array(graph.value_bytes, float)
        self.recompute = np.array([graph.op_cost_ns[op] for op in graph.value_op], float)
        self.keep = frozenset(graph.keep)
        self.optional = frozenset(graph.optional)
        self.pinned = pinned_ops(graph)
        self.frozen = bytearray(graph.ops)
        for op in self.pinned:
            self.frozen[op] = 1
        self.evictable = np.zeros(graph.values, bool)
        self.uses = graph.users
        self.cursor = [0] * graph.values  # first entry of `uses` at or after `now`
        self.wanted = [_NEVER] * graph.values  # the next use by a recomputation, as far as evictions foretell it
        self.next_use = np.full(graph.values, _NEVER, float)
        self.locked = [0] * graph.values
        self.longest = _LONGEST * graph.ops + 200

    def sequence(self) -> list[int] | None:
        """The ops in the order in which they run, or None where the budget could not be held."""
        expiring: list[list[int]] = [[] for _ in range(self.graph.ops + 1)]
        for value, readers in enumerate(self.uses):
            expiring[readers[-1] if readers else self.graph.value_op[value]].append(value)
        for op in range(self.graph.ops):
            self.now = op
            if not self._compute(op):
                return None
            self.now = op + 1
            for value in self.graph.op_inputs[op]:
                self._settle(value)
            for value in self.graph.op_values[op]:
                self._settle(value)
        return self.order

    def _due(self, value: int) -> int:
        """The next stage at which the value is read, or `_NEVER`."""
        readers, at = self.uses[value], self.cursor[value]
        while at < len(readers) and readers[at] < self.now:
            at += 1
        self.cursor[value] = at
        due = readers[at] if at < len(readers) else _NEVER
        return min(due, self.wanted[value]) if self.wanted[value] >= self.now else due

    def _settle(self, value: int) -> None:
        """Bring the next use of a resident value up to date, and drop it where there is none."""
        if not self.resident[value]:
            return
        due = self._due(value)
        self.next_use[value] = due
        if due == _NEVER and value not in self.keep and not self.locked[value]:
            self._drop(value)
            op = self.graph.value_op[value]
            if self.frozen[op]:
                self._lose(value)

    def _lose(self, value: int) -> None:
        """A value that can never be made again is gone: who reads it can't run again either."""
        stack = [value]
        while stack:
            for user in self.uses[stack.pop()]:
                if not self.frozen[user]:
                    self.frozen[user] = 1
                    for made in self.graph.op_values[user]:
                        self.evictable[made] = False
                        if not self.resident[made]:
                            stack.append(made)

    def _drop(self, value: int) -> None:
        self.resident[value] = False
        self.evictable[value] = False
        self.memory -= self.graph.value_bytes[value]

    def _evict(self, value: int) -> None:
        """Free a value that has a future use; what its recomputation reads is wanted by then."""
        due = self._due(value)
        self._drop(value)
        self._want(value, due)

    def _want(self, value: int, due: int) -> None:
        stack = [value]
        while stack:
            for read in self.graph.op_inputs[self.graph.value_op[stack.pop()]]:
                if not self.now <= self.wanted[read] <= due:
                    self.wanted[read] = due
                    if self.resident[read]:
                        self.next_use[read] = min(self.next_use[read], due)
                    else:
                        stack.append(read)

    def _compute(self, target: int) -> bool:
        """Run an op after whatever it misses; False where memory or patience runs out."""
        graph, stack = self.graph, [target]
        most = min(self.longest, len(self.order) + target + _LONGEST_STAGE)
        ran = True
        frames: list[tuple[int, ...]] = []  # values locked by each op on the stack
        while stack:
            op = stack[-1]
            if len(frames) < len(stack):
                frames.append(graph.op_inputs[op])
                for value in frames[-1]:
                    self.locked[value] += 1
            missing = [v for v in graph.op_inputs[op] if not self.resident[v]]
            if missing:
                first = max(missing, key=self._appetite)
                maker = graph.value_op[first]
                if self.frozen[maker] or maker in stack:
                    ran = False
                    break
                stack.append(maker)
                continue
            if not self._run(op, len(stack) == 1) or len(self.order) > most:
                ran = False
                break
            stack.pop()
            for value in frames.pop():
                self.locked[value] -= 1
                if stack:
                    self._settle(value)
        for locked in frames:
            for value in locked:
                self.locked[value] -= 1
        return ran

    def _appetite(self, value: int) -> int:
        """What must be held to make a value, beyond the value itself: the largest first (Sethi and Ullman, 1970)."""
        graph, op = self.graph, self.graph.value_op[value]
        inputs = sum(graph.value_bytes[v] for v in graph.op_inputs[op] if not self.resident[v])
        return inputs + graph.op_workspace_bytes[op] + sum(graph.value_bytes[v] for v in graph.op_always[op])

    def _run(self, op: int, first: bool) -> bool:
        graph = self.graph
        kept = [v for v in graph.op_values[op] if v in self.keep or self.locked[v] or self._due(v) != _NEVER]
        need = graph.op_workspace_bytes[op]
        for value in graph.op_always[op]:
            need += 0 if self.resident[value] else graph.value_bytes[value]
        for value in kept:
            if value in self.optional and not self.resident[value]:
                need += graph.value_bytes[value]
        held = set(graph.op_inputs[op]) | set(graph.op_values[op])
        if self.memory + need > self.budget and not self._make_room(self.memory + need - self.budget, held):
            return False
        self.order.append(op)
        for value in kept:
            if not self.resident[value]:
                self.resident[value] = True
                self.memory += graph.value_bytes[value]
            self.next_use[value] = self._due(value)
            self.evictable[value] = not self.frozen[op]
        return True

    def _make_room(self, excess: int, held: set[int]) -> bool:
        """Evict until `excess` bytes are free: first what nobody on the stack waits for, then that as well."""
        for spare_locked in (True, False):
            while excess > 0:
                victim = self._victim(held, spare_locked)
                if victim is None:
                    break
                excess -= self.graph.value_bytes[victim]
                self._evict(victim)
        return excess <= 0

    def _victim(self, held: set[int], spare_locked: bool) -> int | None:
        candidates = np.flatnonzero(self.evictable)
        if not len(candidates):
            return None
        scores = self._scores(candidates)
        take = min(len(candidates), _SHORTLIST + (len(held) if spare_locked else 0))
        while True:
            some = np.argpartition(scores, take - 1)[:take] if take < len(candidates) else np.arange(len(candidates))
            free = [
                int(v)
                for v in candidates[some].tolist()
                if v not in held and not (spare_locked and self.locked[v]) and self.graph.value_bytes[v]
            ]
            if free:
                break
            if take == len(candidates):
                return None
            take = min(len(candidates), 4 * take)
        for value in free:
            self.recompute[value] = self._recompute_cost(value)
        chosen = self._scores(np.array(free))
        return min(zip(chosen.tolist(), free, strict=True))[1]

    def _scores(self, values: NDArray[np.int64]) -> NDArray[np.float64]:
        away = np.maximum(self.next_use[values] - self.now, 0) + 1.0
        relief = self.size[values] * away**self.weight
        scores: NDArray[np.float64] = (self.recompute[values] + 1.0) / np.maximum(relief, 1e-9)
        return scores

    def _recompute_cost(self, value: int) -> float:
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
        return float(cost)
