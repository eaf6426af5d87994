"""Memory while ops are recomputed: rows (h).

They are for an op k recomputed in coarse stage c, and hold for any number of recomputations in any order. Let
T_{c,v} = 1 if v is resident throughout c: at least if v was made before c by an op that does not run in c, and is
either resident when c ends or read by τ_c, the op whose first computation ends it. So

        T_{c,v} ≥ S_{c+1,v} − R_{c,p(v)},      T_{c,v} ≥ 1 − R_{c,p(v)}  where τ_c reads v
    (h) need(k) R_{c,k} + Σ_{v that k neither reads nor makes} M_v T_{c,v} ≤ capacity:

if k runs, all of this is resident while it does; if not, the sum is at most what is resident at any moment of c.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..array_view import ArrayView, Ids
from ..program import Builder, Floats, Term
from .interior import held_at_end, values_of
from .relaxation import ONE, ZERO, Columns
from .scale import Scale

_ALMOST = 0.1
"""Charged together with recomputations that break a row are those that would fill all but so much of the capacity."""
_MOST_CHARGED = 150
"""The rows (h) that one round adds to a coarse stage, which have up to as many entries as there are values."""


Reruns = dict[int, set[int]]
"""Rows (h): the recomputations whose memory has a row, for each coarse stage by a stage that it holds."""


def add_to(known: Reruns, more: Reruns) -> bool:
    """Add recomputations to those that have a row, by stage; whether one of them is new."""
    new = False
    for stage, ops in more.items():
        known_ops = known.setdefault(stage, set())
        new |= not ops <= known_ops
        known_ops |= ops
    return new


def add_reruns(
    view: ArrayView, columns: Columns, reruns: Reruns, builder: Builder, scale: Scale, lent: Sequence[Term] = ()
) -> None:
    """Write rows (h); `lent` as in `relax`."""
    charged: Reruns = {}
    for stage, ops in reruns.items():
        charged.setdefault(columns.stage_of(stage), set()).update(ops)
    for c, ops in sorted(charged.items()):
        if c == 0:
            continue
        throughout = _throughout(view, columns, c, builder)
        for op in sorted(ops):
            run = columns.runs[c][op]
            if run < 0:
                continue
            beside = throughout.copy()
            beside[view.inputs(op)] = ZERO
            beside[view.value_start[op] : view.value_start[op + 1]] = ZERO
            free = np.flatnonzero(beside >= 0)
            room = view.capacity - int(view.size[beside == ONE].sum())
            terms = [
                Term(0, run, scale.weights(view.need[op : op + 1])),
                Term(0, beside[free], scale.weights(view.size[free])),
                *lent,
            ]
            builder.add_rows(1, terms, upper=scale.room(room), name=("rerun", c, op))


def _throughout(view: ArrayView, columns: Columns, c: int, builder: Builder) -> Ids:
    """[m] the columns of T_{c,v}, where need be new ones."""
    hold, run = _needed_to_end(view, columns, c), columns.runs[c][view.maker]
    hold[view.value_start[columns.first[c]] :] = ZERO
    column = hold.copy()  # the same where p(v) cannot run in c
    values = np.flatnonzero((hold != ZERO) & (run >= 0))
    column[values] = builder.variables(len(values), name=("through", c, values))
    held, rows = hold[values], np.arange(len(values))
    terms = [
        Term(rows[held >= 0], held[held >= 0]),
        Term(rows, run[values], -1.0),
        Term(rows, column[values], -1.0),
    ]
    builder.add_rows(len(values), terms, upper=np.where(held == ONE, -1.0, 0.0), name=("through", c, values))
    return column


def violated_reruns(view: ArrayView, columns: Columns, x: Floats, *, tolerance: float = 1e-3) -> Reruns:
    """In each coarse stage where a solution breaks a row (h) by more than a fraction of the capacity, what to charge.

    Besides the recomputations that break a row, those that nearly would: the next solution may run them instead.
    """
    found: Reruns = {}
    for c in range(1, columns.stages):
        run = values_of(columns.runs[c], x)
        resident = np.maximum(values_of(_needed_to_end(view, columns, c), x) - run[view.maker], 0.0)
        resident[view.value_start[columns.first[c]] :] = 0.0
        held = resident * view.size
        beside = float(held.sum()) - np.bincount(view.maker, held, minlength=view.ops)
        beside -= np.bincount(view.edge_op, held[view.edge_value], minlength=view.ops)
        if float((beside + view.need * run)[run > 1e-6].max(initial=0.0)) <= (1.0 + tolerance) * view.capacity:
            continue
        able = columns.runs[c] >= 0
        over = np.where(able, beside + view.need - (1.0 - _ALMOST) * view.capacity, 0.0)
        worst = np.argsort(-over, kind="stable")[:_MOST_CHARGED]
        found[columns.cuts[c]] = set(worst[over[worst] > 0].tolist())
    return found


def _needed_to_end(view: ArrayView, columns: Columns, c: int) -> Ids:
    """[m] the column that says that a value is needed until c ends: S_{c+1,v}, or 1 if τ_c reads it."""
    hold = held_at_end(view, columns, c).copy()
    hold[view.inputs(columns.cuts[c])] = ONE
    return hold
