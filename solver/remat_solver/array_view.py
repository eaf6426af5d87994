"""A problem as arrays: what formulations, proofs and searches over blocks index instead of the graph's tuples.

And where memory stands while a sequence of its ops runs: the least-memory plan of it, as arrays, unchecked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from remat_ir import Graph, Problem

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class ArrayView:
    """A problem as arrays; n ops, m values, e edges (a value and an op that reads it).

    Attributes:
        capacity: budget − fixed, in bytes.
        cost: [n] ns. workspace: [n] bytes. size: [m] bytes.
        maker: [m] the op that makes each value. optional: [m]. kept: [m] stays to the end once made.
        last_stage: [n] the last stage in which an op may run, n of most; its own of one that is never recomputed.
        edge_value, edge_op: [e] sorted by reading op, then value.
        value_reach: [m] the last op whose first computation can depend on holding the value: its readers, and what
            their recomputation can lead to. A value is of no use after that op; n for a kept one. −1 without reader.
        op_reach: [n] the same for recomputing an op: the largest reach of its values, at least the op itself and at
            most its last stage.
    """

    graph: Graph
    capacity: int
    cost: Ids
    workspace: Ids
    size: Ids
    maker: Ids
    optional: Flags
    kept: Flags
    last_stage: Ids
    edge_value: Ids
    edge_op: Ids
    value_reach: Ids
    op_reach: Ids

    @property
    def ops(self) -> int:
        """The number of ops."""
        return len(self.cost)

    @property
    def values(self) -> int:
        """The number of values."""
        return len(self.size)

    def within(self, budget_bytes: int) -> ArrayView:
        """The same graph at another budget, fixed bytes included."""
        return replace(self, capacity=budget_bytes - self.graph.fixed_bytes)

    def without_recomputing(self, never: Flags) -> ArrayView:
        """The same problem where the ops of `never`, [n], are not recomputed either."""
        last_stage = np.where(never, np.arange(self.ops), self.last_stage)
        value_reach, op_reach = _reach(self.graph, last_stage, self.kept)
        return replace(self, last_stage=last_stage, value_reach=value_reach, op_reach=op_reach)

    @cached_property
    def need(self) -> Ids:
        """[n] bytes that a computation of the op holds for certain: inputs, non-optional outputs, workspace."""
        need = self.workspace.copy()
        np.add.at(need, self.edge_op, self.size[self.edge_value])
        np.add.at(need, self.maker[~self.optional], self.size[~self.optional])
        return need

    @cached_property
    def last_reader(self) -> Ids:
        """[m] the last op that reads a value, −1 without one."""
        last = np.full(self.values, -1, dtype=np.int64)
        np.maximum.at(last, self.edge_value, self.edge_op)
        return last

    @cached_property
    def edge_start(self) -> Ids:
        """[n + 1] the edges of op k are edge_start[k] to edge_start[k + 1] − 1."""
        return np.searchsorted(self.edge_op, np.arange(self.ops + 1))

    @cached_property
    def value_start(self) -> Ids:
        """[n + 1] the values of op k are value_start[k] to value_start[k + 1] − 1."""
        return np.searchsorted(self.maker, np.arange(self.ops + 1))

    def inputs(self, op: int) -> Ids:
        """The values that an op reads."""
        return self.edge_value[self.edge_start[op] : self.edge_start[op + 1]]

    @cached_property
    def uses(self) -> Uses:
        """The edges of values that are not kept, value by value."""
        chosen = ~self.kept[self.edge_value]
        value, op = self.edge_value[chosen], self.edge_op[chosen]
        order = np.lexsort((op, value))
        value, op = value[order], op[order]
        every = np.arange(len(value))
        following, first, last = (np.full(size, -1, dtype=np.int64) for size in (len(value), self.values, self.values))
        same = np.flatnonzero(value[1:] == value[:-1])
        following[same] = same + 1
        first[value[::-1]] = every[::-1]
        last[value] = every
        return Uses(value, op, following, first, last)

    @cached_property
    def tight_from(self) -> int:
        """The first op at whose first computation not everything of use can have been kept; n if there is none.

        Up to there every value can be held for as long as it is of use, so no plan needs a recomputation.
        """
        over = np.flatnonzero(self.held_until(self.value_reach) > self.capacity)
        return int(over[0]) if len(over) else self.ops

    def held_until(self, last: Ids) -> NDArray[np.float64]:
        """[n] bytes while each op runs first, every value held from its making to the op `last`, [m]; n: to the end."""
        born = np.bincount(self.maker, self.size, minlength=self.ops)
        gone = np.zeros(self.ops + 1)
        dead = np.maximum(last, self.maker)
        ends = dead < self.ops
        np.add.at(gone, dead[ends] + 1, self.size[ends])
        return np.asarray(np.cumsum(born - gone[: self.ops]) + self.workspace)


@dataclass(frozen=True, eq=False)
class Uses:
    """Each reading of a value by an op, sorted by value, then op; u of them.

    Kept values are left out: they stay to the end once made and their ops run once, so they are a constant of the
    memory and never a choice.

    Attributes:
        value, op: [u].
        next: [u] the same value's next use, or −1.
        first, last: [m] a value's first and last use, or −1.
    """

    value: Ids
    op: Ids
    next: Ids
    first: Ids
    last: Ids

    @property
    def count(self) -> int:
        """The number of uses."""
        return len(self.value)


def view_of(problem: Problem) -> ArrayView:
    """The arrays of a problem. Linear in ops, values and edges.

    >>> from remat_ir import Problem, graph_of
    >>> view = view_of(Problem(graph_of([1, 2, 3], [4, 5, 6], [[], [0], [0, 1]]), 15))
    >>> view.need.tolist(), view.last_reader.tolist(), view.uses.value.tolist(), view.uses.op.tolist()
    ([4, 9, 15], [2, 2, -1], [0, 0, 1], [1, 2, 2])
    """
    graph = problem.graph
    last_stage, kept = np.array(graph.last_stage, dtype=np.int64), _flags(graph.values, graph.keep)
    value_reach, op_reach = _reach(graph, last_stage, kept)
    return ArrayView(
        graph=graph,
        capacity=problem.budget_bytes - graph.fixed_bytes,
        cost=np.array(graph.op_cost_ns, dtype=np.int64),
        workspace=np.array(graph.op_workspace_bytes, dtype=np.int64),
        size=np.array(graph.value_bytes, dtype=np.int64),
        maker=np.array(graph.value_op, dtype=np.int64),
        optional=_flags(graph.values, graph.optional),
        kept=kept,
        last_stage=last_stage,
        edge_value=np.array([value for inputs in graph.op_inputs for value in inputs], dtype=np.int64),
        edge_op=np.repeat(np.arange(graph.ops), [len(inputs) for inputs in graph.op_inputs]),
        value_reach=value_reach,
        op_reach=op_reach,
    )


def _flags(count: int, members: Iterable[int]) -> Flags:
    flags = np.zeros(count, dtype=np.bool_)
    flags[list(members)] = True
    return flags


def _reach(graph: Graph, last_stage: Ids, kept: Flags) -> tuple[Ids, Ids]:
    last, stays = last_stage.tolist(), kept.tolist()
    op_reach = list(range(graph.ops))
    value_reach = [-1] * graph.values
    for op in range(graph.ops - 1, -1, -1):
        for value in graph.op_values[op]:
            if stays[value]:
                value_reach[value] = graph.ops
            elif graph.users[value]:
                value_reach[value] = max(op_reach[user] for user in graph.users[value])
            op_reach[op] = max(op_reach[op], value_reach[value])
        # a reader that may not run any more does not need its inputs
        op_reach[op] = min(op_reach[op], last[op])
    return np.array(value_reach, dtype=np.int64), np.array(op_reach, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Trace:
    """A sequence of p computations, every use reading the latest instance of a value, freed after its last use.

    Attributes:
        order: [p] the ops. stage: [p] the op whose first computation ends the stage of each computation.
        memory: [p] bytes while each computation runs, fixed bytes left out.
        instance_value, made, last: [instances] the value, the position that makes it, its last use or, if it is never
            read, the position that makes it; p for a kept value.
    """

    order: Ids
    stage: Ids
    memory: Ids
    instance_value: Ids
    made: Ids
    last: Ids

    @property
    def peak(self) -> int:
        """The largest memory, in bytes, fixed bytes left out."""
        return int(self.memory.max())

    def resident_after(self, position: int) -> Ids:
        """The values that are resident right after a computation."""
        return self.instance_value[(self.made <= position) & (self.last > position)]


def trace(view: ArrayView, sequence: Sequence[int]) -> Trace:
    """Follow a sequence in which every op's inputs have been computed before it. Linear in its inputs and outputs."""
    graph, order = view.graph, list(sequence)
    current = [-1] * graph.values
    value: list[int] = []
    made: list[int] = []
    last: list[int] = []
    for position, op in enumerate(order):
        for read in graph.op_inputs[op]:
            last[current[read]] = position
        for output in graph.op_values[op]:
            current[output] = len(value)
            value.append(output)
            made.append(position)
            last.append(position)
    values, born, end = np.array(value, dtype=np.int64), np.array(made), np.array(last)
    kept = view.kept[values]
    end[kept] = len(order)
    charged = ~view.optional[values] | (end > born)
    change = np.zeros(len(order) + 2, dtype=np.int64)
    np.add.at(change, born[charged], view.size[values[charged]])
    np.add.at(change, np.minimum(end[charged], len(order)) + 1, -view.size[values[charged]])
    ops = np.array(order, dtype=np.int64)
    memory = np.cumsum(change)[: len(order)] + view.workspace[ops]
    reached = np.maximum.accumulate(ops)
    before = np.concatenate(([-1], reached[:-1]))
    return Trace(ops, np.where(ops > before, ops, before + 1), memory, values, born, end)
