"""Local search over sets of tags, and all of them where there are few, compiled.

A set is a byte for each forward op: 1 where it is computed again. Its evaluation follows `remat_ir.tags` and
`remat_ir.replay` on arrays, and shares no code with them: a test holds them against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from remat_ir import Graph, Plan, Problem
from remat_ir.tags import tagged_plan

from .._numba import inner, kernel
from ..array_view import Flags, Ids, view_of
from ..search.local import cooling

Marks = NDArray[np.uint8]
FORBIDDEN = 1 << 60
"""The excess of a set in which an op is computed again that may not be."""


class Arrays(NamedTuple):
    """Arrays of a graph's `ArrayView`, by their names there, and the space that an evaluation needs.

    Attributes:
        numbers: ops, first op of the backward pass, budget and fixed bytes. cost … kept: those of the view.
        order: [2 · ops] the ops as they run. change: [2 · ops + 2] bytes. need: [2 · ops] bytes. stack: [ops].
        last: [values] the position of the last use. open: [ops] what is still to be computed again.
    """

    numbers: Ids
    cost: Ids
    workspace: Ids
    last_stage: Ids
    edge_start: Ids
    edge_value: Ids
    value_start: Ids
    size: Ids
    maker: Ids
    optional: Flags
    kept: Flags
    order: Ids
    change: Ids
    need: Ids
    stack: Ids
    last: Ids
    open: Marks


@inner
def _ordered(a: Any, again: Any) -> int:
    """Fill `order`; its length, or −1 where an op may not run again at its place."""
    ops: int = a.numbers[0]
    boundary: int = a.numbers[1]
    length = boundary
    for op in range(boundary):
        a.order[op] = op
        a.open[op] = again[op]
    for op in range(boundary, ops):
        start, top = length, 1
        a.stack[0] = op
        while top:
            top -= 1
            reader = a.stack[top]
            for i in range(a.edge_start[reader], a.edge_start[reader + 1]):
                maker = a.maker[a.edge_value[i]]
                if maker < boundary and a.open[maker]:
                    if a.last_stage[maker] < op:
                        return -1
                    a.open[maker] = 0
                    a.order[length] = maker
                    length += 1
                    a.stack[top] = maker
                    top += 1
        if length - start > 1:
            a.order[start:length].sort()
        a.order[length] = op
        length += 1
    return length


@kernel()
def evaluate(a: Any, again: Any) -> tuple[int, int, int]:
    """The cost, the peak and the sum over all steps of what exceeds the budget of a set of tags."""
    length = _ordered(a, again)
    if length < 0:
        return FORBIDDEN, FORBIDDEN, FORBIDDEN
    cost = 0
    a.change[: length + 2] = 0
    a.last[:] = -1
    for position in range(length - 1, -1, -1):
        op = a.order[position]
        cost += a.cost[op]
        need = a.workspace[op]
        for value in range(a.value_start[op], a.value_start[op + 1]):
            end = length - 1 if a.kept[value] else a.last[value]
            if end >= 0 or not a.optional[value]:
                need += a.size[value]
            if end > position:
                a.change[position + 1] += a.size[value]
                a.change[end + 1] -= a.size[value]
            a.last[value] = -1
        a.need[position] = need
        for i in range(a.edge_start[op], a.edge_start[op + 1]):
            value = a.edge_value[i]
            if a.last[value] < 0:
                a.last[value] = position
    budget, resident = a.numbers[2], a.numbers[3]
    peak, over = resident, 0
    for position in range(length):
        resident += a.change[position]
        here = resident + a.need[position]
        peak = max(peak, here)
        over += max(0, here - budget)
    return cost, peak, over


@inner
def _move(free: Any, again: Any) -> None:
    """Change a set at random: one op; one each way; a stretch; the border of a stretch by one."""
    count = free.shape[0]
    kind = np.random.random()
    at = np.random.randint(count)
    if kind < 0.5:
        again[free[at]] = 1 - again[free[at]]
    elif kind < 0.7:
        again[free[at]] = 1 - again[free[at]]
        other = min(count - 1, max(0, at + np.random.randint(-8, 9)))
        again[free[other]] = 1 - again[free[at]]
    elif kind < 0.85:
        to = 1 if np.random.random() < 0.5 else 0
        for i in range(at, min(count, at + 1 + np.random.randint(1 + count // 8))):
            again[free[i]] = to
    else:
        step = 1 if np.random.random() < 0.5 else -1
        for _ in range(count):
            nearby = at + step
            if not 0 <= nearby < count:
                break
            if again[free[nearby]] != again[free[at]]:
                here = again[free[at]]
                again[free[at]] = again[free[nearby]]
                again[free[nearby]] = here
                break
            at = nearby


@kernel()
def anneal(
    a: Any, free: Any, again: Any, best: Any, best_cost: int, weight: float, hot: float, cold: float, moves: int,
    seed: int,
) -> int:  # fmt: skip
    """Metropolis moves on `again` over the ops `free`; the cheapest set within the budget goes to `best`.

    `weight` is the price of a byte over the budget for a step, `hot` and `cold` are temperatures, all in ns. Returns
    the best cost.
    """
    np.random.seed(seed)
    cost, _, over = evaluate(a, again)
    if over == 0 and cost < best_cost:
        best_cost = cost
        best[:] = again
    before = again.copy()
    energy = cost + weight * over
    for number in range(moves):
        temperature = hot * (cold / hot) ** (number / moves)
        _move(free, again)
        cost, _, over = evaluate(a, again)
        new = cost + weight * over
        if new <= energy or np.random.random() < np.exp((energy - new) / temperature):
            energy = new
            before[:] = again
            if over == 0 and cost < best_cost:
                best_cost = cost
                best[:] = again
        else:
            again[:] = before
    return best_cost


@kernel()
def enumerate_all(a: Any, free: Any, again: Any, best: Any) -> int:
    """Try every set over the ops `free`; the cheapest within the budget goes to `best`. Its cost, or `FORBIDDEN`."""
    best_cost = FORBIDDEN
    for number in range(1 << free.shape[0]):
        for i in range(free.shape[0]):
            again[free[i]] = (number >> i) & 1
        cost, _, over = evaluate(a, again)
        if over == 0 and cost < best_cost:
            best_cost = cost
            best[:] = again
    return best_cost


MOST_TRIED = 14
"""Ops up to which every set is tried: some 16,000 sets."""
_SLICE = 1024
"""Moves between two looks at the clock."""
_HOT, _COLD = 2.0, 0.01
"""Temperatures of a cycle, in mean costs of an op."""
_PRICE = 8.0
"""The price of a step that is over the budget by the mean size of a value, in mean costs of an op."""


class TagSearch:
    """A graph with its budget, ready to be searched.

    Attributes:
        free: [free ops] forward ops that may be computed again and that something reads, ascending.
        cost_ns: of the best set within the budget; None while there is none.
    """

    def __init__(self, graph: Graph, budget_bytes: int, seed: int = 0) -> None:
        boundary = graph.backward_from
        if boundary is None:
            raise ValueError("the graph marks no backward pass")
        self.graph, self._boundary, self._seed, self._budget = graph, boundary, seed, budget_bytes
        self._arrays = _arrays(graph, boundary, budget_bytes)
        self.free = _free(graph, boundary)
        self._best = np.zeros(boundary, np.uint8)
        self._now = np.zeros(boundary, np.uint8)
        self._cost = FORBIDDEN
        self._mean = max(1.0, sum(graph.op_cost_ns[:boundary]) / max(1, boundary))
        sizes = [size for size in graph.value_bytes if size]
        self._weight = _PRICE * self._mean * len(sizes) / sum(sizes) if sizes else 1.0

    @property
    def cost_ns(self) -> int | None:
        """Of the best set within the budget."""
        return None if self._cost == FORBIDDEN else self._cost

    def evaluate(self, again: Collection[int]) -> tuple[int, int] | None:
        """The cost in ns and the peak in bytes of a set; None where an op of it may not run again at its place."""
        cost, peak, _ = evaluate(self._arrays, self._flags(again))
        return None if cost == FORBIDDEN else (int(cost), int(peak))

    def fits(self, again: Collection[int]) -> bool:
        """Whether a set is within the budget and may run."""
        found = self.evaluate(again)
        return found is not None and found[1] <= self._budget

    def plan(self) -> Plan:
        """The best set as a plan, where there is one."""
        return tagged_plan(self.graph, np.flatnonzero(self._best).tolist())

    def try_all(self) -> bool:
        """Try every set, where they are few; whether that was so."""
        if len(self.free) > MOST_TRIED:
            return False
        self._cost = int(enumerate_all(self._arrays, self.free, np.zeros_like(self._now), self._best))
        return True

    def adopt(self, again: Collection[int]) -> None:
        """Go on from a set, which may exceed the budget."""
        self._now[:] = self._flags(again)
        self._anneal(0, 1.0, 1.0)

    def cycle(self, moves: int, stop: Callable[[], bool], heat: float = 1.0) -> None:
        """Anneal once; `stop` is asked every thousand moves or so. `heat` multiplies the first temperature."""
        if not len(self.free):
            return
        for now, start, end in cooling(_HOT * heat, moves, _SLICE, _COLD):
            if stop():
                return
            self._anneal(now, start, end)

    def resume_best(self) -> None:
        """Go on from the best set, if there is one."""
        if self.cost_ns is not None:
            self._now[:] = self._best

    def _anneal(self, moves: int, hot: float, cold: float) -> None:
        self._seed = (self._seed * 1103515245 + 12345) % 2**31
        found = anneal(
            self._arrays, self.free, self._now, self._best, self._cost, self._weight, hot * self._mean,
            cold * self._mean, moves, self._seed,
        )  # fmt: skip
        self._cost = int(found)

    def _flags(self, again: Collection[int]) -> Marks:
        flags = np.zeros(self._boundary, np.uint8)
        flags[sorted(again)] = 1
        return flags


def _free(graph: Graph, boundary: int) -> Ids:
    """Forward ops that may run in the backward pass, and of which something is needed there."""
    needed = {value for op in range(boundary, graph.ops) for value in graph.op_inputs[op]}
    found = []
    for op in range(boundary - 1, -1, -1):
        if graph.last_stage[op] >= boundary and any(v in needed for v in graph.op_values[op]):
            found.append(op)
            needed.update(graph.op_inputs[op])
    return np.asarray(found[::-1], np.int64)


_OF_VIEW = (
    "cost", "workspace", "last_stage", "edge_start", "edge_value", "value_start", "size", "maker", "optional", "kept",
)  # fmt: skip


def _arrays(graph: Graph, boundary: int, budget_bytes: int) -> Arrays:
    view, ops = view_of(Problem(graph, budget_bytes)), graph.ops
    return Arrays(
        numbers=np.asarray((ops, boundary, budget_bytes, graph.fixed_bytes)),
        **{name: getattr(view, name) for name in _OF_VIEW},
        order=np.zeros(2 * ops, np.int64),
        change=np.zeros(2 * ops + 2, np.int64),
        need=np.zeros(2 * ops, np.int64),
        stack=np.zeros(ops + 1, np.int64),
        last=np.zeros(graph.values, np.int64),
        open=np.zeros(max(1, boundary), np.uint8),
    )
