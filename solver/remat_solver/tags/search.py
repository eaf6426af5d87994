"""Local search over sets of tags, and all of them where there are few."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from remat_ir import Graph, Plan
from remat_ir.tags import tagged_plan
from remat_ir.working_set import pinned_ops

from . import kernel
from .kernel import FORBIDDEN, Arrays

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
        self.graph, self._boundary, self._seed = graph, boundary, seed
        self._arrays = _arrays(graph, boundary, budget_bytes)
        self.free = _free(graph, boundary)
        self._best = np.zeros(boundary, np.uint8)
        self._now = np.zeros(boundary, np.uint8)
        self._cost = FORBIDDEN
        makers = np.asarray(graph.op_cost_ns[:boundary] or (0,), np.float64)
        self._mean = max(1.0, float(makers.mean()))
        sizes = [size for size in graph.value_bytes if size]
        self._weight = _PRICE * self._mean * len(sizes) / sum(sizes) if sizes else 1.0

    @property
    def cost_ns(self) -> int | None:
        """Of the best set within the budget."""
        return None if self._cost == FORBIDDEN else self._cost

    def evaluate(self, again: Collection[int]) -> tuple[int, int] | None:
        """The cost in ns and the peak in bytes of a set; None where an op of it may not run again at its place."""
        cost, peak, _ = kernel.evaluate(self._arrays, self._flags(again))
        return None if cost == FORBIDDEN else (int(cost), int(peak))

    def fits(self, again: Collection[int]) -> bool:
        """Whether a set is within the budget and may run."""
        cost, _, over = kernel.evaluate(self._arrays, self._flags(again))
        return bool(cost != FORBIDDEN and over == 0)

    def plan(self) -> Plan | None:
        """The best set as a plan."""
        if self.cost_ns is None:
            return None
        return tagged_plan(self.graph, [int(op) for op in np.flatnonzero(self._best)])

    def try_all(self) -> bool:
        """Try every set, where they are few; whether that was so."""
        if len(self.free) > MOST_TRIED:
            return False
        self._cost = int(kernel.enumerate_all(self._arrays, self.free, np.zeros_like(self._now), self._best))
        return True

    def adopt(self, again: Collection[int]) -> None:
        """Go on from a set, which may exceed the budget."""
        self._now[:] = self._flags(again)
        self._anneal(0, 1.0, 1.0)

    def cycle(self, moves: int, stop: Callable[[], bool], heat: float = 1.0) -> None:
        """Anneal once; `stop` is asked every thousand moves or so. `heat` multiplies the first temperature."""
        if not len(self.free):
            return
        hot, done = _HOT * heat, 0
        while done < moves and not stop():
            now = min(_SLICE, moves - done)
            start = hot * (_COLD / hot) ** (done / moves)
            end = hot * (_COLD / hot) ** ((done + now) / moves)
            self._anneal(now, start, end)
            done += now

    def resume_best(self) -> None:
        """Go on from the best set, if there is one."""
        if self.cost_ns is not None:
            self._now[:] = self._best

    def _anneal(self, moves: int, hot: float, cold: float) -> None:
        self._seed = (self._seed * 1103515245 + 12345) % 2**31
        scale = self._mean
        self._cost = int(
            kernel.anneal(
                self._arrays, self.free, self._now, self._best, self._cost, self._weight, hot * scale, cold * scale,
                moves, self._seed,
            )
        )  # fmt: skip

    def _flags(self, again: Collection[int]) -> kernel.Flags:
        flags = np.zeros(self._boundary, np.uint8)
        flags[sorted(again)] = 1
        return flags


def _free(graph: Graph, boundary: int) -> kernel.Integers:
    """Forward ops that may run in the backward pass, and of which something is needed there."""
    pinned = pinned_ops(graph)
    needed = {value for op in range(boundary, graph.ops) for value in graph.op_inputs[op]}
    found = []
    for op in range(boundary - 1, -1, -1):
        if op not in pinned and graph.last_stage[op] >= boundary and any(v in needed for v in graph.op_values[op]):
            found.append(op)
            needed.update(graph.op_inputs[op])
    return np.asarray(found[::-1], np.int64)


def _arrays(graph: Graph, boundary: int, budget_bytes: int) -> Arrays:
    ops, values = graph.ops, graph.values

    def column(numbers: Collection[int]) -> kernel.Integers:
        return np.asarray(tuple(numbers), np.int64)

    def marked(ids: Collection[int]) -> kernel.Flags:
        flags = np.zeros(values, np.uint8)
        flags[list(ids)] = 1
        return flags

    return Arrays(
        numbers=column((ops, boundary, budget_bytes, graph.fixed_bytes)),
        cost=column(graph.op_cost_ns),
        workspace=column(graph.op_workspace_bytes),
        last_stage=column(graph.last_stage),
        in_start=np.cumsum([0, *map(len, graph.op_inputs)], dtype=np.int64),
        in_value=column([value for inputs in graph.op_inputs for value in inputs]),
        out_start=np.cumsum([0, *map(len, graph.op_values)], dtype=np.int64),
        size=column(graph.value_bytes),
        maker=column(graph.value_op),
        optional=marked(graph.optional),
        keep=marked(graph.keep),
        order=np.zeros(2 * ops, np.int64),
        change=np.zeros(2 * ops + 2, np.int64),
        need=np.zeros(2 * ops, np.int64),
        stack=np.zeros(ops + 1, np.int64),
        last=np.zeros(values, np.int64),
        open=np.zeros(max(1, boundary), np.uint8),
    )
