"""What the rows of the relaxation are made from: a problem as arrays, and how far each op and value still matters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from remat_ir import Graph, Problem
from remat_ir.working_set import pinned_ops

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Shape:
    """A problem as arrays; n ops, m values, e edges (value, reading op) sorted by reading op.

    Attributes:
        capacity: budget − fixed, in bytes.
        cost: [n] ns. workspace: [n] bytes. size: [m] bytes.
        maker: [m] the op that makes each value. always: [m] not optional. kept: [m] stays to the end once made.
        pinned: [n] never recomputed.
        edge_value, edge_op: [e].
        last_use: [m] the last op that reads a value, −1 without one.
        value_reach: [m] the last op whose first computation can depend on holding the value: its readers, and what
            their recomputation can lead to. A value is of no use after that op; n for a kept one. −1 without reader.
        op_reach: [n] the same for recomputing an op: the largest reach of its values.
        need: [n] bytes that a computation of the op holds for certain: inputs, non-optional outputs, workspace.
    """

    graph: Graph
    capacity: int
    cost: Ids
    workspace: Ids
    size: Ids
    maker: Ids
    always: Flags
    kept: Flags
    pinned: Flags
    edge_value: Ids
    edge_op: Ids
    last_use: Ids
    value_reach: Ids
    op_reach: Ids
    need: Ids

    @property
    def ops(self) -> int:
        """The number of ops."""
        return len(self.cost)

    @property
    def values(self) -> int:
        """The number of values."""
        return len(self.size)

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
    def roomy(self) -> int:
        """The first op at whose first computation not everything of use can have been kept; n if there is none.

        Up to there every value can be held for as long as it is of use, so no plan needs a recomputation.
        """
        born = np.bincount(self.maker, self.size, minlength=self.ops)
        gone = np.zeros(self.ops + 1)
        dead = np.maximum(self.value_reach, self.maker)
        ends = dead < self.ops
        np.add.at(gone, dead[ends] + 1, self.size[ends])
        held = np.cumsum(born - gone[: self.ops]) + self.workspace
        over = np.flatnonzero(held > self.capacity)
        return int(over[0]) if len(over) else self.ops


def shape_of(problem: Problem) -> Shape:
    """The arrays of a problem. Linear in ops, values and edges."""
    graph = problem.graph
    n, m = graph.ops, graph.values
    pinned_set, keep = pinned_ops(graph), frozenset(graph.keep)
    value_reach, op_reach, last_use = [-1] * m, [-1] * n, [-1] * m
    for op in range(n - 1, -1, -1):
        for value in graph.op_values[op]:
            readers = graph.users[value]
            if readers:
                last_use[value] = readers[-1]
                # a pinned reader is computed once only: its inputs matter for that computation and no later one
                value_reach[value] = max(u if u in pinned_set else max(u, op_reach[u]) for u in readers)
            if value in keep:
                value_reach[value] = n
            op_reach[op] = max(op_reach[op], value_reach[value])
    optional = frozenset(graph.optional)
    size = np.array(graph.value_bytes, dtype=np.int64)
    maker = np.array(graph.value_op, dtype=np.int64)
    always = np.array([value not in optional for value in range(m)], dtype=np.bool_)
    edge_op = np.repeat(np.arange(n), [len(inputs) for inputs in graph.op_inputs])
    edge_value = np.array([value for inputs in graph.op_inputs for value in inputs], dtype=np.int64)
    workspace = np.array(graph.op_workspace_bytes, dtype=np.int64)
    need = workspace.copy()
    np.add.at(need, edge_op, size[edge_value])
    np.add.at(need, maker[always], size[always])
    return Shape(
        graph=graph,
        capacity=problem.budget_bytes - graph.fixed_bytes,
        cost=np.array(graph.op_cost_ns, dtype=np.int64),
        workspace=workspace,
        size=size,
        maker=maker,
        always=always,
        kept=np.array([value in keep for value in range(m)], dtype=np.bool_),
        pinned=np.array([op in pinned_set for op in range(n)], dtype=np.bool_),
        edge_value=edge_value,
        edge_op=edge_op,
        last_use=np.array(last_use, dtype=np.int64),
        value_reach=np.array(value_reach, dtype=np.int64),
        op_reach=np.array(op_reach, dtype=np.int64),
        need=need,
    )
