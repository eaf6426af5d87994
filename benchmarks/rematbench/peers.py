"""What others published, written here from their papers: DTR's online heuristics, torch's knapsack of saved values.

Each function takes a problem and the seconds that it has, and gives a plan of the graph or raises `Unanswered` with the
reason. None of them proves anything.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Literal

from benchmarks.rematbench import Unanswered
from remat_ir import Compute, Free, Graph, Plan, Problem, Step, verify
from remat_ir.errors import InvalidPlan
from remat_ir.tags import tagged_plan

Heuristic = Literal["h", "lru", "msps"]


class Tensors:
    """DTR (Kirisame et al., ICLR 2021) as a simulation: ops run in order, and memory that is short is made by evicting.

    What is evicted is the value with the least of its heuristic: `h`, its cost and that of the evicted values that
    computing it again needs or that need it (`e*`), by its bytes and the time since its last use; `lru`, the inverse of
    that time; `msps`, its cost and that of the evicted ones that it needs, by its bytes. A value is evicted for free
    once the program reads it no more (the paper's eager eviction). Values that can't be computed again (of `once` ops,
    kept ones, those of ops that read what is consumed) stay while something may need them. The paper's model has no
    such ops, no workspaces, and one value a storage.
    """

    MOST_RUNS = 40

    def __init__(self, problem: Problem, heuristic: Heuristic, seconds: float) -> None:
        self.graph, self.limit, self.heuristic = problem.graph, problem.budget_bytes, heuristic
        graph = self.graph
        self.until = time.monotonic() + seconds
        self.steps: list[Step] = []
        self.resident: dict[int, int] = {}  # value -> when it was used last
        self.held = graph.fixed_bytes
        self.locks = [0] * graph.values
        self.now = self.runs = 0
        self.reached = -1
        self.last_read = [max(users, default=-1) for users in graph.users]
        self.reach = [-1] * graph.values
        for value in reversed(range(graph.values)):
            later = (
                max(user, min(graph.last_stage[user], max((self.reach[v] for v in graph.op_values[user]), default=-1)))
                for user in graph.users[value]
            )
            self.reach[value] = graph.ops if value in graph.keep else max(later, default=-1)
        kept = set(graph.keep)
        again = [graph.last_stage[op] >= graph.ops for op in range(graph.ops)]
        self.evictable = [again[graph.value_op[v]] and v not in kept for v in range(graph.values)]
        self.optional = frozenset(graph.optional)

    def plan(self) -> Plan:
        """Run the program."""
        graph = self.graph
        for op in range(graph.ops):
            self.compute(op, [v for v in graph.op_values[op] if self.reach[v] > op or v in graph.keep])
            self.reached = op
            for value in [v for v in self.resident if self._dead(v)]:
                self.free(value)
        return Plan(tuple(self.steps))

    def _dead(self, value: int) -> bool:
        """Whether the program needs a value no more, and it can be had again or is of no use any more."""
        return self.reach[value] <= self.reached or (self.evictable[value] and self.last_read[value] <= self.reached)

    def compute(self, op: int, wanted: list[int]) -> None:
        """Run an op once its inputs are there, and keep these of its values."""
        graph = self.graph
        self.runs += 1
        if self.runs > self.MOST_RUNS * graph.ops or time.monotonic() > self.until:
            raise Unanswered("thrashes" if self.runs > self.MOST_RUNS * graph.ops else "time")
        for value in graph.op_inputs[op]:
            self.locks[value] += 1
        for value in graph.op_inputs[op]:
            if value not in self.resident:
                self.compute(graph.value_op[value], [value])
        always = graph.op_always[op]
        there = [v for v in graph.op_values[op] if v in self.resident and (v not in self.optional or v in wanted)]
        for value in there:  # it is made again with the others
            self.free(value)
        kept = tuple(v for v in graph.op_values[op] if v in wanted or v in there)
        size = graph.op_workspace_bytes[op] + sum(graph.value_bytes[v] for v in {*always, *kept})
        self.make_room(size)
        self.steps.append(Compute(op, kept))
        self.now += graph.op_cost_ns[op]
        self.resident |= dict.fromkeys((*kept, *graph.op_inputs[op]), self.now)
        self.held += sum(graph.value_bytes[v] for v in kept)
        for value in graph.op_inputs[op]:
            self.locks[value] -= 1

    def free(self, value: int) -> None:
        """Evict a value."""
        del self.resident[value]
        self.held -= self.graph.value_bytes[value]
        self.steps.append(Free(value))

    def make_room(self, size: int) -> None:
        """Evict until so many bytes are free."""
        while self.held + size > self.limit:
            able = [v for v in self.resident if self.evictable[v] and not self.locks[v] and self.graph.value_bytes[v]]
            if not able:
                raise Unanswered("out of memory: nothing is left to evict")
            self.free(min(able, key=lambda v: (self.score(v), v)))

    def score(self, value: int) -> float:
        """The heuristic: less is evicted first."""
        stale = 1 + self.now - self.resident[value]
        if self.heuristic == "lru":
            return 1 / stale
        cost = self.graph.op_cost_ns[self.graph.value_op[value]] + self.evicted_cost(value)
        size = self.graph.value_bytes[value]
        return cost / size / stale if self.heuristic == "h" else cost / size

    def evicted_cost(self, value: int) -> int:
        """Ns of the ops of evicted values that one needs to be computed again, and for `h` of those that need it."""
        graph, found = self.graph, set[int]()
        self._evicted(value, lambda v: graph.op_inputs[graph.value_op[v]], found)
        if self.heuristic == "h":
            self._evicted(value, lambda v: [w for user in graph.users[v] for w in graph.op_values[user]], found)
        return sum(graph.op_cost_ns[op] for op in {graph.value_op[v] for v in found})

    def _evicted(self, value: int, near: Callable[[int], Any], found: set[int]) -> None:
        stack, seen = [value], {value}
        while stack:
            for v in near(stack.pop()):
                if v not in seen and v not in self.resident and self.graph.value_op[v] <= self.reached:
                    seen.add(v)
                    found.add(v)
                    stack.append(v)


def dtr(heuristic: Heuristic) -> Callable[[Problem, float], Plan]:
    """The method with one of the heuristics."""

    def run(problem: Problem, seconds: float) -> Plan:
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(max(before, 4 * problem.graph.ops + 1000))
        try:
            return Tensors(problem, heuristic, seconds).plan()
        except RecursionError:
            raise Unanswered("recursion") from None
        finally:
            sys.setrecursionlimit(before)

    return run


def knapsack(kind: str) -> Callable[[Problem, float], Plan]:
    """Torch's knapsack of what the forward pass saves, by its public memory budget, and its partitioner's placement.

    As `torch._functorch.partitioners` does with `activation_memory_budget`: each value that the backward pass reads is
    an item of its bytes, and the time of its op what saving it spares; a budget is the share of their bytes that may be
    saved. Shares from 1 down are tried, and the cheapest plan that fits is given. The min-cut that chooses the items on
    the knapsack's border in torch is not here: all values that are read are items.
    """

    def run(problem: Problem, seconds: float) -> Plan:
        from torch._functorch._activation_checkpointing import knapsack as solvers

        graph, until = problem.graph, time.monotonic() + seconds
        if graph.backward_from is None:
            raise Unanswered("no joint graph: nothing marks its backward pass")
        items = _items(graph, graph.backward_from)
        if not items:
            raise Unanswered("nothing can be computed again")
        size = [max(1, sum(graph.value_bytes[v] for v in graph.op_values[op])) for op in items]
        memory, runtimes = [s / sum(size) for s in size], [float(graph.op_cost_ns[op]) for op in items]
        best: tuple[int, Plan] | None = None
        for share in range(20, -1, -1):
            if time.monotonic() > until:
                break
            _, _, again = getattr(solvers, f"{kind}_knapsack")(memory, runtimes, share / 20)
            plan = tagged_plan(graph, [items[i] for i in again])
            try:
                cost = verify(problem, plan).cost_ns
            except InvalidPlan:
                continue
            best = min(filter(None, (best, (cost, plan))), key=lambda found: found[0])
        if best is None:
            raise Unanswered("no share of the saved bytes fits")
        return best[1]

    return run


def _items(graph: Graph, boundary: int) -> list[int]:
    """The forward ops that the backward pass reads and that may run again, with all that they need for it."""
    able = [graph.last_stage[op] >= graph.ops for op in range(boundary)]
    read = {graph.value_op[v] for op in range(boundary, graph.ops) for v in graph.op_inputs[op]}
    return [op for op in range(boundary) if able[op] and op in read]
