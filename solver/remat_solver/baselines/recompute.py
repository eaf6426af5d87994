"""From what is retained to what is computed: the optimal R for a given S (Checkmate, Section 5.1.1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from remat_ir import Compute, Free, Graph, Plan
from remat_ir.graph import pinned_ops
from remat_ir.plan import Step, makers, permitted

Retained: TypeAlias = Sequence[Sequence[tuple[int, int]]]
"""[values] the stages (first, last), disjoint and ascending, at whose start the value is resident: S by columns."""


def computed(graph: Graph, retained: Retained) -> list[int]:
    """The ops in the order in which they run: R, row by row, each row the least that S and the new op demand.

    Stage t computes op t for the first time, what its inputs lack, and what stage t + 1 retains that stage t does not
    have. Each row is a traversal from what is missing: O(|V| |E|) in all. Given S the result costs least, since each
    op in a row is demanded by S, by op t, or by another op of the row. Values of pinned ops count as always resident,
    because nothing can make them again; what a consumed value keeps an op from making again stays where it was made.

    Raises:
        ValueError: S retains a value at a stage before its op has run.
    """
    return list(permitted(graph, (op for row in _rows(graph, retained) for op in row)))


def plan_as_given(graph: Graph, retained: Retained) -> Plan:
    """The plan of the same ops that frees as the paper counts: S as given, U by equations 2 to 5 of Checkmate.

    What S retains is there throughout the stage, used or not; what it does not retain into the next stage is freed
    after its last use in the stage, or at its end where it has none. (`plan_of` frees after the last use in the plan.)
    What no plan could make again stays until its last use.

    >>> from remat_ir import graph_of, plan_of
    >>> graph = graph_of([1, 1, 1], [4, 2, 1], [[], [0], [1]])
    >>> retained = [[(1, 2)], [(2, 2)], []]  # value 0 to the end, though its last use is op 1
    >>> plan_as_given(graph, retained).steps[-3:]
    (Compute(op=2, kept=()), Free(value=1), Free(value=0))
    """
    rows = _permitted_rows(graph, retained)
    needed = [0] * graph.values  # of what cannot always be made again: the stage after the last that reads it
    for stage, row in enumerate(rows):
        for value in (value for op in row for value in graph.op_inputs[op]):
            if graph.last_stage[graph.value_op[value]] < graph.ops:
                needed[value] = stage
    keep = frozenset(graph.keep)
    arriving: list[list[int]] = [[] for _ in range(graph.ops + 1)]
    leaving: list[list[int]] = [[] for _ in range(graph.ops + 1)]
    for value, op in enumerate(graph.value_op):
        most = graph.ops if value in keep else graph.ops - 1
        given = [(first, min(last, most)) for first, last in retained[value]]
        for first, last in merged([*given, (op + 1, most if value in keep else needed[value])]):
            arriving[first].append(value)
            leaving[last].append(value)
    steps: list[Step] = []
    resident: set[int] = set()
    after: set[int] = set()  # what is resident when the next stage begins
    for stage, row in enumerate(rows):
        after = after.difference(leaving[stage]).union(arriving[stage + 1])
        last_use = {value: position for position, op in enumerate(row) for value in graph.op_inputs[op]}
        for position, op in enumerate(row):
            again = [value for value in graph.op_values[op] if value in resident]
            kept = tuple(v for v in graph.op_values[op] if v in after or last_use.get(v, -1) > position)
            dying = [v for v in graph.op_inputs[op] if last_use[v] == position and v not in after]
            steps += [*map(Free, again), Compute(op, None if kept == graph.op_always[op] else kept), *map(Free, dying)]
            resident = (resident - {*again, *dying}) | set(kept)
        steps += map(Free, sorted(resident - after))
        resident &= after
    return Plan(tuple(steps))


def _permitted_rows(graph: Graph, retained: Retained) -> list[list[int]]:
    """[stages] the ops of each, less what the graph forbids to run again."""
    rows: list[list[int]] = [[]]
    for op in computed(graph, retained):
        rows[-1].append(op)
        if op == len(rows) - 1:
            rows.append([])
    return rows[:-1]


def _rows(graph: Graph, retained: Retained) -> Iterator[list[int]]:
    """R, a row at a time."""
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
    for stage in range(graph.ops):
        # values that arrive at the next stage are made in this one, those that leave after it are still here
        yield row_of(graph, stage, resident, arriving[stage + 1])
        resident.difference_update(leaving[stage])
        resident.update(arriving[stage + 1])


def row_of(graph: Graph, stage: int, resident: set[int], demanded: Iterable[int] = ()) -> list[int]:
    """The least that a stage runs: its new op, and what makes the op's inputs and what is demanded of it."""
    missing = makers(graph, (*graph.op_inputs[stage], *demanded), lambda value: value not in resident)
    return sorted(missing | {stage})


def merged(stages: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Stages as disjoint, ascending, not adjacent runs; empty runs are dropped."""
    runs: list[tuple[int, int]] = []
    for first, last in sorted(run for run in stages if run[0] <= run[1]):
        if runs and first <= runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], max(last, runs[-1][1]))
        else:
            runs.append((first, last))
    return runs
