"""How much memory it takes to hold two values at once: a bound on every budget, whatever the order of recomputations.

Let P(u, v) be the least peak of any plan up to a moment at which u and v are both resident. One of them was made last,
while the other was held, so with o the op that makes u

    P(u, v) ≥ min over which is last, say u, of max(need(o) + M_v, P(i, v) for inputs i of o, P(i, j) for two of them)

where M_v counts if o neither reads nor makes v, and need(o) is inputs, non-optional outputs and workspace. Whenever a
value exists, all ops up to its maker have run for the first time, so kept values made before are resident and count
too. The largest P that satisfies this with equality, reached from above by sweeps over the ops, is at most the true
one, and every op needs the P of all pairs among its inputs. This is the critical-path heuristic h² of planning (Haslum
and Geffner, 2000), with memory in the place of time; h¹ is the working set.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from remat_ir import Graph
from remat_ir.working_set import WorkingSet, working_set

MOST_VALUES = 2500
"""Beyond this the table of pairs takes more than 50 MB."""
_NEVER = 1 << 62
_SWEEPS = 200
_POLL = 64
"""Ops of a sweep between two looks at the clock."""


def pair_need(graph: Graph, table: NDArray[np.int64] | None = None) -> WorkingSet:
    """The op that needs the most bytes when all pairs of its inputs are made with as little memory as pairs can be.

    At least the working set, and a bound on every budget that suffices; the working set alone above `MOST_VALUES`, and
    with a link, over which a value may come back without the memory that it takes to make it.
    `table` is `pair_table`, where it is known already.
    Sweeps of O(edges · values) numpy work: 0.01 to 0.6 s on training graphs of 100 to 1,000 ops.
    """
    least = working_set(graph)
    if graph.values > MOST_VALUES or graph.link is not None:
        return least
    table = pair_table(graph) if table is None else table
    for op, inputs in enumerate(graph.op_inputs):
        if inputs:
            need = graph.fixed_bytes + int(table[np.ix_(inputs, inputs)].max())
            if need > least.least_bytes:
                least = WorkingSet(op, need)
    return least


def pair_table(graph: Graph, stopped: Callable[[], bool] = lambda: False) -> NDArray[np.int64]:
    """[m, m] the bound P, fixed bytes left out; zeros where it was stopped before, since it comes from above."""
    m = graph.values
    size, maker = np.array(graph.value_bytes, np.int64), np.array(graph.value_op, np.int64)
    kept = np.zeros(m, bool)
    kept[list(graph.keep)] = True
    made = np.bincount(maker[kept], size[kept], minlength=graph.ops).astype(np.int64)
    kept_before = np.cumsum(made) - made
    extra = np.where(kept, 0, size)  # of a value that is held; kept ones are in `kept_before`, of their own op apart
    optional = frozenset(graph.optional)
    needs: list[NDArray[np.int64]] = []
    for op, inputs in enumerate(graph.op_inputs):
        need = graph.op_workspace_bytes[op]
        need += sum(graph.value_bytes[v] for v in inputs if not kept[v])
        need += sum(graph.value_bytes[v] for v in graph.op_values[op] if v not in optional)
        beside = extra.copy()
        beside[list(inputs)] = 0
        beside[list(graph.op_values[op])] = 0
        # kept values of ops before the later of the two; what this op makes may be kept, and is in `need`
        needs.append(
            need + beside + np.where(maker > op, kept_before[np.maximum(maker, op)] - made[op], kept_before[op])
        )
    table = np.full((m, m), _NEVER, np.int64)
    for _ in range(_SWEEPS):
        changed = False
        for op, inputs in enumerate(graph.op_inputs):
            if not op % _POLL and stopped():
                return np.zeros((m, m), np.int64)
            outputs = graph.op_values[op]
            if not outputs:
                continue
            before = table[list(inputs)].max(axis=0) if inputs else table.diagonal().copy()
            before[list(outputs)] = 0  # made in the same run
            if inputs:
                np.maximum(before, int(table[np.ix_(inputs, inputs)].max()), out=before)
            for value in outputs:
                now = needs[op] + (graph.value_bytes[value] if value in optional else 0)
                reach = np.maximum(before, now)
                if (reach < table[value]).any():
                    changed = True
                    better = np.minimum(reach, table[value])
                    table[value] = better
                    table[:, value] = better
        if not changed:
            break
    else:
        return np.zeros((m, m), np.int64)
    return table
