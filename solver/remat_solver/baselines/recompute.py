"""From what is retained to what is computed: the optimal R for a given S (Checkmate, Section 5.1.1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from remat_ir import Graph
from remat_ir.plan import permitted
from remat_ir.working_set import pinned_ops

Retained: TypeAlias = Sequence[Sequence[tuple[int, int]]]
"""[values] the stages (first, last), disjoint and ascending, at whose start the value is resident: S by columns."""


def computed(graph: Graph, retained: Retained) -> list[int]:
    """The ops in the order in which they run: R, row by row, each row the least that S and the new op demand.

    Stage t computes op t for the first time, what its inputs lack, and what stage t + 1 retains that stage t does not
    have. Each row is a traversal from what is missing: O(|V| |E|) in all. Given S the result costs least, since each
    op in a row is demanded by S, by op t, or by another op of the row. Values of pinned ops count as always resident,
    because nothing can make them again; what a consumed value keeps an op from making again stays where it was made.
    """
    pinned = pinned_ops(graph)
    arriving: list[list[int]] = [[] for _ in range(graph.ops + 1)]
    leaving: list[list[int]] = [[] for _ in range(graph.ops + 1)]
    for value, stages in enumerate(retained):
        if graph.value_op[value] in pinned:
            continue
        for first, last in merged(stages):
            if first <= graph.value_op[value]:
                raise ValueError(f"value {value} is retained at stage {first}, before op {graph.value_op[value]}")
            if first < graph.ops:
                arriving[first].append(value)
                leaving[min(last, graph.ops - 1)].append(value)
    resident = {value for value in range(graph.values) if graph.value_op[value] in pinned}
    order: list[int] = []
    for stage in range(graph.ops):
        # values that arrive at the next stage are made in this one, those that leave after it are still here
        order.extend(_row(graph, stage, resident, arriving[stage + 1]))
        resident.difference_update(leaving[stage])
        resident.update(arriving[stage + 1])
    return list(permitted(graph, order))


def _row(graph: Graph, stage: int, resident: set[int], demanded: Iterable[int]) -> list[int]:
    row = {stage}
    missing = [value for value in (*graph.op_inputs[stage], *demanded) if value not in resident]
    while missing:
        op = graph.value_op[missing.pop()]
        if op not in row:
            row.add(op)
            missing.extend(value for value in graph.op_inputs[op] if value not in resident)
    return sorted(row)


def merged(stages: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Stages as disjoint, ascending, not adjacent runs; empty runs are dropped."""
    runs: list[tuple[int, int]] = []
    for first, last in sorted(run for run in stages if run[0] <= run[1]):
        if runs and first <= runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], max(last, runs[-1][1]))
        else:
            runs.append((first, last))
    return runs
