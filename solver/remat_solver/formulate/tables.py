"""A graph as numpy tables, the way formulations index it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from remat_ir import Graph
from remat_ir.working_set import pinned_ops

from ..program import Booleans, Floats

Index = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Tables:
    """Costs, sizes and uses of one graph.

    Kept values are left out of `uses`: they stay to the end once made and their ops run once, so they are a constant
    of the memory and never a choice.

    Attributes:
        cost, workspace: [ops], in ns and bytes.
        maker: [values] the op that makes each value.
        size: [values] in bytes.
        optional, kept: [values] whether the value is optional, or stays to the end.
        pinned: [ops] whether the op is never recomputed.
        use_value, use_op: [uses] each reading of a value by an op, sorted by value, then op.
        next_use: [uses] the same value's next use, or −1.
        first_use, last_use: [values] its first and last use, or −1.
        reach: [values] the largest index of an op whose first computation the value can serve: a reader, or what
            depends on a reader that can be recomputed; −1 if nothing reads it.
        op_reach: [ops] the same for a recomputation of the op, through any value that it makes; at least the op itself.
    """

    graph: Graph
    cost: Floats
    workspace: Floats
    maker: Index
    size: Floats
    optional: Booleans
    kept: Booleans
    pinned: Booleans
    use_value: Index
    use_op: Index
    next_use: Index
    first_use: Index
    last_use: Index
    reach: Index
    op_reach: Index

    @property
    def ops(self) -> int:
        """The number of ops."""
        return len(self.cost)

    @property
    def values(self) -> int:
        """The number of values."""
        return len(self.size)

    @property
    def uses(self) -> int:
        """The number of readings, of kept values not counted."""
        return len(self.use_value)


def tables(graph: Graph) -> Tables:
    """The tables of a graph."""
    kept = _flags(graph.values, graph.keep)
    pairs = [(value, op) for op, inputs in enumerate(graph.op_inputs) for value in inputs if not kept[value]]
    both = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)
    use_value, use_op = both[:, 0], both[:, 1]
    next_use = np.full(len(use_value), -1, dtype=np.int64)
    same = np.flatnonzero(use_value[1:] == use_value[:-1])
    next_use[same] = same + 1
    first_use = np.full(graph.values, -1, dtype=np.int64)
    last_use = np.full(graph.values, -1, dtype=np.int64)
    every = np.arange(len(use_value))
    first_use[use_value[::-1]] = every[::-1]
    last_use[use_value] = every
    pinned = _flags(graph.ops, tuple(sorted(pinned_ops(graph))))
    reach, op_reach = _reach(graph, pinned)
    return Tables(
        graph=graph,
        cost=np.array(graph.op_cost_ns, dtype=np.float64),
        workspace=np.array(graph.op_workspace_bytes, dtype=np.float64),
        maker=np.array(graph.value_op, dtype=np.int64),
        size=np.array(graph.value_bytes, dtype=np.float64),
        optional=_flags(graph.values, graph.optional),
        kept=kept,
        pinned=pinned,
        use_value=use_value,
        use_op=use_op,
        next_use=next_use,
        first_use=first_use,
        last_use=last_use,
        reach=reach,
        op_reach=op_reach,
    )


def _flags(count: int, members: tuple[int, ...]) -> Booleans:
    flags = np.zeros(count, dtype=np.bool_)
    flags[list(members)] = True
    return flags


def without_recomputing(table: Tables, never: Booleans) -> Tables:
    """The same tables where the ops of `never` are not recomputed either."""
    pinned = table.pinned | never
    reach, op_reach = _reach(table.graph, pinned)
    return replace(table, pinned=pinned, reach=reach, op_reach=op_reach)


def _reach(graph: Graph, pinned: Booleans) -> tuple[Index, Index]:
    op_reach = list(range(graph.ops))
    reach = [-1] * graph.values
    for op in range(graph.ops - 1, -1, -1):
        for value in graph.op_values[op]:
            if graph.users[value]:
                reach[value] = max(user if pinned[user] else op_reach[user] for user in graph.users[value])
                op_reach[op] = max(op_reach[op], reach[value])
    return np.array(reach, dtype=np.int64), np.array(op_reach, dtype=np.int64)
