"""Coarse stages around coarse stages: what makes the bound of a finer relaxation at least that of a coarser one.

A span gathers coarse stages a … b of the present cuts, as one coarse stage of an earlier round did before it was
cut. Its variables R_{a…b,i} = 1 if op i, first computed before f_a, is computed anywhere in stages a … b. Every plan
gives them values for which these rows hold, by the same argument as for rows (a) to (c) of the relaxation, of which
they are the rows for the coarser cuts:

    R_{a…b,j} ≤ R_{a…b,p(v)} + S_{a,v}      v read by j < f_a
    1 ≤ R_{a…b,p(v)} + S_{a,v}              v made before f_a and read by an op first computed in a … b
    S_{b+1,v} ≤ R_{a…b,p(v)} + S_{a,v}      v made before f_a and resident after b

and, with c running over the stages or spans that a … b was cut into, that R is an "or":

    (e) R_{c,i} ≤ R_{a…b,i} ≤ Σ_c R_{c,i}

Only the stages are charged. In whole numbers the rows say nothing new. In a linear relaxation they do: halves of a
value held at several cuts may each serve a half of one recomputation, and a stage cut in two lets more of that happen;
with the span's rows the Σ_c R_{c,i} can't fall below the R of the stage before it was cut. So with all spans the
linear bound never falls from round to round, which it does without them (of a ResNet-50 at a fifth of its memory from
16.03 % with two cuts to 14.49 % with fourteen; with spans it rises to 16.62 %).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..array_view import ArrayView, Ids
from ..program import Builder, Term
from .relaxation import ONE, ZERO, Columns, read_first_in

Span = tuple[int, int]
"""The cut before the span's first op, and the cut that ends it."""


def add_spans(view: ArrayView, columns: Columns, spans: Sequence[Span], builder: Builder) -> None:
    """Write the rows of all spans; each must begin and end at present cuts, and any two be nested or apart."""
    starts = {columns.cuts[c - 1]: c for c in range(1, columns.stages)}
    runs: dict[Span, Ids] = {(columns.cuts[c - 1], columns.cuts[c]): columns.runs[c] for c in range(1, columns.stages)}
    for span in sorted(set(spans), key=lambda ends: (ends[1] - ends[0], ends)):
        if span in runs:
            continue
        first = starts[span[0]]
        inside = _parts(span, runs)
        run = np.full(view.ops, ZERO)
        free = columns.runs[first] >= 0
        ends = (first, columns.stage_of(span[1]))
        run[free] = builder.variables(int(free.sum()), name=("run", *ends, np.flatnonzero(free)))
        _link(ends, run, {(starts[at], columns.stage_of(end)): runs[at, end] for at, end in inside}, builder)
        _rows(view, columns, ends, span[1], run, builder)
        runs[span] = run


def _parts(span: Span, runs: dict[Span, Ids]) -> list[Span]:
    """The largest stages and spans that lie in a span, which together fill it."""
    parts: list[Span] = []
    at = span[0]
    while at < span[1]:
        end = max(last for begin, last in runs if begin == at and last <= span[1])
        parts.append((at, end))
        at = end
    return parts


def _link(ends: Span, run: Ids, parts: Mapping[Span, Ids], builder: Builder) -> None:
    """(e)"""
    ops = np.flatnonzero(run >= 0)
    rows = np.arange(len(ops))
    terms = [Term(rows, run[ops])]
    for inner, part in parts.items():
        there = part[ops] >= 0
        terms.append(Term(rows[there], part[ops][there], -1.0))
        both = np.arange(int(there.sum()))
        pair = [Term(both, part[ops][there]), Term(both, run[ops][there], -1.0)]
        builder.add_rows(len(both), pair, upper=0.0, name=("part", *ends, *inner, ops[there]))
    builder.add_rows(len(ops), terms, upper=0.0, name=("or", *ends, ops))


def _rows(view: ArrayView, columns: Columns, ends: Span, end: int, run: Ids, builder: Builder) -> None:
    """(a), (b) and (c) of the span of the coarse stages `ends`, the last of which ends with the cut `end`."""
    first, last = ends
    hold = columns.holds[first]

    def supply(values: Ids, rows: Ids, sign: float) -> list[Term]:
        made, held = run[view.maker[values]], hold[values]
        return [Term(rows[made >= 0], made[made >= 0], sign), Term(rows[held >= 0], held[held >= 0], sign)]

    reader = run[view.edge_op]
    edges = np.flatnonzero((reader >= 0) & (hold[view.edge_value] != ONE))
    rows = np.arange(len(edges))
    terms = [Term(rows, reader[edges]), *supply(view.edge_value[edges], rows, -1.0)]
    name = ("read", first, last, view.edge_op[edges], view.edge_value[edges])
    builder.add_rows(len(edges), terms, upper=0.0, name=name)
    values = read_first_in(view, columns, first, columns.first[first], end)
    values = values[hold[values] != ONE]
    rows = np.arange(len(values))
    builder.add_rows(len(values), supply(values, rows, 1.0), lower=1.0, name=("first", first, last, values))
    after = last + 1
    if after < columns.stages:
        later = columns.holds[after]
        values = np.flatnonzero((later >= 0) & (view.maker < columns.first[first]) & (hold != ONE))
        rows = np.arange(len(values))
        terms = [Term(rows, later[values]), *supply(values, rows, -1.0)]
        builder.add_rows(len(values), terms, upper=0.0, name=("stay", first, last, values))
