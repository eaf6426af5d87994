"""The program of one round: the relaxation for the present cuts with whatever rows have been found so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..program import Floats, Program
from .interior import Slot, add_slots, again_columns
from .relaxation import ZERO, Columns, relax
from .scale import Scale
from .shape import Ids, Shape
from .single import Rerun, add_reruns, add_single_stage


@dataclass
class Rows:
    """What a proof has found worth telling apart; grows from round to round and never shrinks.

    `cuts` end coarse stages. `slots` and `reruns` are rows (g) and (h). `singles` maps a stage that is told apart to
    the recomputations in it whose memory is charged: while it is empty, bounds hold in the whole space.
    """

    cuts: set[int]
    slots: list[Slot] = field(default_factory=list)
    reruns: list[Rerun] = field(default_factory=list)
    singles: dict[int, set[int]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Round:
    """A program, where its variables are, and whether its bounds hold in the whole space."""

    program: Program
    columns: Columns
    again: Ids
    whole_space: bool


def write(shape: Shape, rows: Rows, scale: Scale, *, again: bool = True) -> Round:
    """The program for the rows found so far; the objective is in units of cost and leaves out each op's first run."""
    builder, columns = relax(shape, tuple(sorted(rows.cuts)), scale)
    twice = again_columns(shape, columns, builder, scale) if again else np.full(shape.ops, ZERO)
    if again:
        add_slots(shape, columns, twice, rows.slots, builder, scale)
    add_reruns(shape, columns, rows.reruns, builder, scale)
    for stage in sorted(rows.singles):
        add_single_stage(shape, columns, stage, rows.singles[stage], builder, scale)
    return Round(builder.program(), columns, twice, not rows.singles)


def start_of(round_: Round, known: Floats) -> Floats:
    """A start for an engine: the point of the named columns, the others left open."""
    start = np.full(round_.program.columns, np.nan)
    start[: len(known)] = known
    return start
