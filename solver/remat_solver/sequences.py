"""Sequences of ops: plans before it is said what they keep."""

from __future__ import annotations

from collections.abc import Sequence

from remat_ir import Graph


def without_unread(graph: Graph, sequence: Sequence[int]) -> tuple[int, ...]:
    """The sequence less the recomputations of which no value is read before the next instance of it is made.

    They can only cost time and memory (Checkmate, Section 4.6, calls them spurious). Linear in inputs and outputs.

    >>> from remat_ir import graph_of
    >>> without_unread(graph_of([1, 1, 1], [1, 1, 1], [[], [0], [0, 1]]), (0, 1, 0, 0, 1, 2))
    (0, 1, 0, 1, 2)
    """
    first = {op: position for position, op in reversed(list(enumerate(sequence)))}
    wanted: set[int] = set()  # values that something later reads and nothing in between makes
    kept: list[int] = []
    for position in range(len(sequence) - 1, -1, -1):
        op = sequence[position]
        if first[op] == position or any(value in wanted for value in graph.op_values[op]):
            kept.append(op)
            wanted.difference_update(graph.op_values[op])
            wanted.update(graph.op_inputs[op])
    return tuple(reversed(kept))
