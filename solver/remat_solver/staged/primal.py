"""Between a point of the relaxation and a sequence of ops, both ways."""

from __future__ import annotations

import numpy as np

from ..array_view import ArrayView
from ..program import Floats
from ..trace import Trace
from .interior import values_of
from .relaxation import ONE, Columns


def primal_heuristic(view: ArrayView, columns: Columns, x: Floats) -> list[int]:
    """A sequence of ops that recomputes, in each coarse stage, what a 0/1 solution says.

    The relaxation does not say when inside a coarse stage an op runs. Each is placed in the earliest stage in which a
    first computation or another recomputation there reads it, or in the latest such stage where the solution also
    holds all that is read of it at the coarse stage's begin, but no later than it may. The sequence is complete and in
    order; whether it fits the memory is not promised.
    """
    graph = view.graph
    extra: list[tuple[int, int]] = []
    for c in range(1, columns.stages):
        first, last = columns.first[c], columns.cuts[c]
        held = (columns.holds[c] == ONE) | (values_of(columns.holds[c], x) > 0.5)
        placed: dict[int, int] = {}
        for op in np.flatnonzero(values_of(columns.runs[c], x) > 0.5)[::-1].tolist():
            stages: list[int] = []
            all_held = True
            for value in graph.op_values[op]:
                uses = [
                    reader if first <= reader <= last else placed[reader]
                    for reader in graph.users[value]
                    if first <= reader <= last or reader in placed
                ]
                all_held &= not uses or bool(held[value])
                stages += uses
            wanted = last if not stages else max(stages) if all_held else min(stages)
            placed[op] = min(wanted, graph.last_stage[op])
            extra.append((placed[op], op))
    return in_order(view.ops, extra)


def in_order(ops: int, extra: list[tuple[int, int]]) -> list[int]:
    """The sequence with the given recomputations (stage, op): in each stage ascending, before its first computation."""
    return [op for _, op in sorted({*extra, *((op, op) for op in range(ops))})]


def point(view: ArrayView, columns: Columns, run: Trace) -> Floats:
    """The point of the relaxation that a sequence maps to, [columns.count]: a start for an engine."""
    x = np.zeros(columns.count)
    stage_of = np.searchsorted(np.array(columns.cuts), np.minimum(run.stage, view.ops - 1))
    where_first = np.full(view.ops, -1)
    for position, op in enumerate(run.order.tolist()):
        if where_first[op] < 0:
            where_first[op] = position
            continue
        column = columns.runs[int(stage_of[position])][op]
        if column >= 0:
            x[column] = 1.0
    for c in range(1, columns.stages):
        held = columns.holds[c][run.resident_after(int(where_first[columns.cuts[c - 1]]))]
        x[held[held >= 0]] = 1.0
    return x
