"""The coarse-stage relaxation: one pair (R, S) per stretch of stages instead of one per stage.

Stage t of a plan is what runs after the first computation of op t − 1, up to and including that of op t. Cuts τ_0 <
τ_1 < … < τ_{K−1} = n − 1 gather stages into coarse stages: c covers f_c … τ_c, with f_c = τ_{c−1} + 1. For c ≥ 1, ops
i < f_c and values v made by such ops,

    R_{c,i} = 1  if op i is computed anywhere in coarse stage c (a recomputation, since i < f_c)
    S_{c,v} = 1  if value v is resident when coarse stage c begins: right after the first computation of τ_{c−1}

and the program minimises Σ C_i + Σ C_i R_{c,i}. Every plan, with any number of recomputations in any order inside a
stage, maps to a point of this program that costs no more: each R counts once what the plan pays at least once, and
recomputations of op i within the coarse stage in which it is first computed are not charged at all. The rows hold for
that point, so the program's optimum, and any bound on it, is a bound for the whole space:

    (a) R_{c,j} ≤ R_{c,p(v)} + S_{c,v}     v read by j < f_c: when j runs, v is resident, either since the start of c or
                                           because its maker p(v) has run in c
    (b) 1 ≤ R_{c,p(v)} + S_{c,v}           v made before f_c and read by an op first computed in c: the same
    (c) S_{c+1,v} ≤ R_{c,p(v)} + S_{c,v}   v made before f_c and resident after c: the same
    (d) memory while τ = τ_{c−1} is first computed: its inputs, its non-optional outputs, its workspace, kept values
        made before, every other value with S_{c,v} = 1 (made before τ, so resident while τ runs), and each optional
        output of τ with S_{c,v} = 1 (there only because that computation kept it): together at most the capacity

Fixed beforehand, all without loss: R = S = 0 where the op or value leads to no first computation in c or later (such a
computation could be struck out of the plan); R = 0 for ops that may not run in c any more; S = 1 for kept values and
for values of such ops that a first computation in c or later reads, since they cannot be made again. Because the cuts
only choose which stages are told apart, any choice is valid; a finer one is tighter.

Coarse stage 0 has no variables: what it recomputes is not charged and what it holds at its end is free.
The fine program, with one coarse stage per stage, is Checkmate's, equations 1 to 8, without its memory inside stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..array_view import ArrayView, Ids
from ..program import Builder, Term
from .scale import Scale

ZERO = -1
ONE = -2
"""Marks in a table of columns: no variable, the quantity is 0 or 1."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Where the variables of a relaxation are.

    `cuts[c]` is τ_c and `first[c]` is f_c; `runs[c][i]` and `holds[c][v]` give the column of R_{c,i} and S_{c,v}, or
    ZERO or ONE. Coarse stage 0 has no variables. They are the first `count` columns of a program.
    """

    cuts: tuple[int, ...]
    first: tuple[int, ...]
    runs: tuple[Ids, ...]
    holds: tuple[Ids, ...]
    count: int

    @property
    def stages(self) -> int:
        """The number of coarse stages, stage 0 included."""
        return len(self.cuts)

    def stage_of(self, op: int) -> int:
        """The coarse stage in which an op is first computed."""
        return int(np.searchsorted(self.cuts, op))


def relax(view: ArrayView, cuts: tuple[int, ...], scale: Scale, builder: Builder, lent: Sequence[Term] = ()) -> Columns:
    """Write rows (a) to (d) for the given cuts, ascending and ending with n − 1.

    `lent` are terms to put into each memory row: of a column that `builder` has already, which lends it room.
    """
    columns = _columns(view, cuts, builder, scale)
    for c in range(1, columns.stages):
        _reads_of_recomputations(view, columns, c, builder)
        _reads_of_first_computations(view, columns, c, builder)
        _residence(view, columns, c, builder)
        _memory_at_cut(view, columns, c, builder, scale, lent)
    return columns


def _columns(view: ArrayView, cuts: tuple[int, ...], builder: Builder, scale: Scale) -> Columns:
    first = (0, *(cut + 1 for cut in cuts[:-1]))
    runs, holds = [np.full(view.ops, ZERO)], [np.full(view.values, ZERO)]
    ops, cost = np.arange(view.ops), scale.costs(view.cost)
    for start in first[1:]:
        run, hold = np.full(view.ops, ZERO), np.full(view.values, ZERO)
        useful = (ops < start) & (view.op_reach >= start)
        c = len(runs)
        name = ("run", c, c, np.flatnonzero(useful))
        run[useful] = builder.variables(int(useful.sum()), cost=cost[useful], name=name)
        made = view.maker < start
        certain = made & (view.kept | ((view.last_stage[view.maker] < start) & (view.last_reader >= start)))
        free = made & ~certain & (view.value_reach >= start)
        hold[certain] = ONE
        hold[free] = builder.variables(int(free.sum()), name=("hold", c, np.flatnonzero(free)))
        runs.append(run)
        holds.append(hold)
    return Columns(cuts, first, tuple(runs), tuple(holds), builder.columns)


def supply(columns: Columns, c: int, view: ArrayView, values: Ids, rows: Ids, sign: float) -> list[Term]:
    """The terms sign · (R_{c,p(v)} + S_{c,v}) of values whose S is no constant, one row each."""
    run, hold = columns.runs[c][view.maker[values]], columns.holds[c][values]
    return [Term(rows[run >= 0], run[run >= 0], sign), Term(rows[hold >= 0], hold[hold >= 0], sign)]


def _reads_of_recomputations(view: ArrayView, columns: Columns, c: int, builder: Builder) -> None:
    """(a)"""
    reader = columns.runs[c][view.edge_op]
    edges = np.flatnonzero((reader >= 0) & (columns.holds[c][view.edge_value] != ONE))
    rows = np.arange(len(edges))
    terms = supply(columns, c, view, view.edge_value[edges], rows, -1.0)
    name = ("read", c, c, view.edge_op[edges], view.edge_value[edges])
    builder.add_rows(len(edges), [Term(rows, reader[edges]), *terms], upper=0.0, name=name)


def _reads_of_first_computations(view: ArrayView, columns: Columns, c: int, builder: Builder) -> None:
    """(b)"""
    values = read_first_in(view, columns, c, columns.first[c], columns.cuts[c])
    values = values[columns.holds[c][values] != ONE]
    rows = np.arange(len(values))
    terms = supply(columns, c, view, values, rows, 1.0)
    builder.add_rows(len(values), terms, lower=1.0, name=("first", c, c, values))


def read_first_in(view: ArrayView, columns: Columns, c: int, start: int, end: int) -> Ids:
    """Values made before coarse stage c that the first computation of an op from `start` to `end` reads, ascending."""
    read = view.edge_value[view.edge_start[start] : view.edge_start[end + 1]]
    return np.unique(read[view.maker[read] < columns.first[c]])


def _residence(view: ArrayView, columns: Columns, c: int, builder: Builder) -> None:
    """(c), from coarse stage c − 1 to c; nothing is known of what coarse stage 0 recomputes."""
    if c == 1:
        return
    hold = columns.holds[c]
    values = np.flatnonzero((hold >= 0) & (view.maker < columns.first[c - 1]) & (columns.holds[c - 1] != ONE))
    rows = np.arange(len(values))
    terms = supply(columns, c - 1, view, values, rows, -1.0)
    builder.add_rows(len(values), [Term(rows, hold[values]), *terms], upper=0.0, name=("stay", c - 1, c - 1, values))


def _memory_at_cut(
    view: ArrayView, columns: Columns, c: int, builder: Builder, scale: Scale, lent: Sequence[Term]
) -> None:
    """(d)"""
    op = columns.cuts[c - 1]
    hold = columns.holds[c]
    counted = (view.maker < op) | ((view.maker == op) & view.optional)
    counted[view.inputs(op)] = False
    room = view.capacity - int(view.need[op]) - int(view.size[counted & (hold == ONE)].sum())
    values = np.flatnonzero(counted & (hold >= 0))
    terms = [Term(0, hold[values], scale.weights(view.size[values])), *lent]
    builder.add_rows(1, terms, upper=scale.room(room), name=("memory", c))
