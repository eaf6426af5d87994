"""Where memory stands while a sequence of ops runs: the least-memory plan of it, as arrays, unchecked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .array_view import ArrayView, Ids


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
    return Trace(ops, stages_of(ops), memory, values, born, end)


def stages_of(order: Ids) -> Ids:
    """[p] the op whose first computation ends each computation's stage; n after the last one."""
    reached = np.maximum.accumulate(order)
    before = np.concatenate(([-1], reached[:-1]))
    return np.where(order > before, order, before + 1)
