"""Between a point of the relaxation and a sequence of ops, both ways."""

from __future__ import annotations

import numpy as np

from ..program import Floats
from .relaxation import Columns
from .shape import Ids, Shape
from .trace import Trace


def realize(shape: Shape, columns: Columns, again: Ids, x: Floats) -> list[int]:
    """A sequence of ops that recomputes, in each coarse stage, what a 0/1 solution says.

    The relaxation does not say when inside a coarse stage an op runs. Each is placed in the earliest stage in which a
    first computation or another recomputation there reads it, or in the latest such stage where the solution also
    holds all that is read of it at the coarse stage's begin. The sequence is complete and in order; whether it fits the
    memory is not promised.
    """
    graph = shape.graph
    extra: list[tuple[int, int]] = []
    for c in range(1, columns.stages):
        first, last = columns.first[c], columns.cuts[c]
        run = columns.runs[c]
        chosen = set(np.flatnonzero((run >= 0) & (_at(x, run) > 0.5)).tolist())
        twice = {
            first + i for i in np.flatnonzero((again[first:last] >= 0) & (_at(x, again[first:last]) > 0.5)).tolist()
        }
        held = columns.holds[c]
        placed: dict[int, int] = {}
        for op in sorted(chosen | twice, reverse=True):
            stages: list[int] = []
            begins_held = True
            for value in graph.op_values[op]:
                uses = [
                    reader if first <= reader <= last else placed[reader]
                    for reader in graph.users[value]
                    if first <= reader <= last or reader in placed
                ]
                column = held[value]
                if uses and not (column == -2 or (column >= 0 and x[column] > 0.5)):
                    begins_held = False
                stages += uses
            stage = last
            if stages:
                stage = max(stages) if begins_held or op >= first else min(stages)
            if stage > op:
                placed[op] = stage
                extra.append((stage, op))
    return in_order(shape.ops, extra)


def in_order(ops: int, extra: list[tuple[int, int]]) -> list[int]:
    """The sequence with the given recomputations (stage, op): in each stage ascending, before its first computation."""
    return [op for _, op in sorted({*extra, *((op, op) for op in range(ops))})]


def point(shape: Shape, columns: Columns, again: Ids, count: int, run: Trace) -> Floats:
    """The point of the relaxation that a sequence maps to, [count] columns: a start for an engine."""
    x = np.zeros(count)
    stage_of = np.searchsorted(np.array(columns.cuts), np.minimum(run.stage, shape.ops - 1))
    where_first = np.full(shape.ops, -1)
    repeats: list[tuple[int, int]] = []
    for position, op in enumerate(run.order.tolist()):
        if where_first[op] < 0:
            where_first[op] = position
        else:
            repeats.append((int(stage_of[position]), op))
    for c, op in repeats:
        column = columns.runs[c][op] if op < columns.first[c] else again[op]
        if column >= 0:
            x[column] = 1.0
    for c in range(1, columns.stages):
        held = columns.holds[c][run.resident_after(int(where_first[columns.cuts[c - 1]]))]
        x[held[held >= 0]] = 1.0
    return x


def _at(x: Floats, column: Ids) -> Floats:
    return np.where(column >= 0, x[np.maximum(column, 0)], 0.0)
