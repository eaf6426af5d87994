"""Trees of linear programs for what a proof has found so far, and the certificates written of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..array_view import ArrayView
from ..backends import Engine
from ..deadline import Deadline
from ..incumbent import Incumbent
from ..program import Floats, Program
from .certificate import LOSS, Certified, Certifier, wanted_ns
from .refinement import Refinement
from .rows import Round, write
from .scale import Scale, balance_of, balanced, row_factors
from .shorten import Solve, shortening

_WORTH = 0.1
"""The share of the gap that a tree which did not get to its end must close to be certified."""
_WRITING_S, _WRITING_SHARE, _ENDS_EARLY = 1.0, 0.1, 0.15
"""The seconds at most, and the share of the time left, for writing a certificate; and what of it ends a tree."""


class Grown(NamedTuple):
    """What a tree came to: a certificate worth having, and a point that nothing above can be proved without.

    `closed`: what was to be proved is. `out_of_time`: it ended early enough for its certificate to be written.
    """

    round: Round
    certified: Certified | None
    x: Floats | None
    closed: bool
    out_of_time: bool


def solving(engine: Engine, incumbent: Incumbent, *, ending: bool = False) -> tuple[Solve, Deadline]:
    """What solves the linear programs that make a certificate shorter, and for how long it may.

    `ending`: also once the incumbent is stopped.
    """
    watch = shortening(incumbent.deadline)

    def point(program: Program) -> Floats | None:
        outcome = engine.lp(program, deadline=watch, stopped=None if ending else incumbent.stopped)
        return outcome.x if outcome.status == "optimal" else None

    return point, watch


class Trees:
    """The trees of a proof, of one incumbent; what is told apart is read from `refinement`."""

    def __init__(self, incumbent: Incumbent, view: ArrayView, refinement: Refinement, certifier: Certifier) -> None:
        self._incumbent, self._view, self._refinement, self._certifier = incumbent, view, refinement, certifier
        self._sought = (-1, 0)

    def grow(self, engine: Engine, turn: float | None = None) -> Grown:
        """Grow the tree for the rows found so far, by turns of so many CPU seconds for each entry of its program.

        Raises:
            TimeUp: before its program was written.
        """
        incumbent = self._incumbent
        # in whole bytes and ns, from which cutting planes are derived exactly
        scale, total = Scale(1, 1), int(self._view.cost.sum())
        wanted = math.inf
        if incumbent.cost_ns is not None:
            wanted = incumbent.cost_ns - max(0.5, incumbent.max_gap * incumbent.cost_ns - 2 * LOSS * total)
        extra, nested = self._extra(wanted - total), self._refinement.options.nested
        rows, stop = self._refinement.rows, incumbent.stopped
        round_ = write(self._view, rows, scale, nested=nested, cutoff_ns=extra, stop=stop)
        factor = balance_of(round_.program)
        branching = np.arange(round_.program.columns) < round_.columns.count
        program = replace(balanced(round_.program), integer=branching)
        until = incumbent.deadline.within(incumbent.deadline.remaining() - self._writing_s())
        outcome = engine.tree(
            program,
            cutoff=factor * (wanted - total),
            deadline=until,
            stopped=incumbent.stopped,
            factor=row_factors(round_.program),
            turn_s=None if turn is None else turn * program.entries,
            cutoff_row=None if extra is None else (program.rows - 1, factor * extra),
        )
        out_of_time = until.remaining() < _ENDS_EARLY * incumbent.deadline.elapsed()
        closed, certified = outcome.bound >= factor * (wanted - total), None
        if outcome.tree is not None:
            # a whole number of ns: what is well above one proves the next
            bound = total + max(0, math.ceil(outcome.bound / factor - 0.25)) if np.isfinite(outcome.bound) else total
            if turn is None or closed or bound - incumbent.bound_ns > _WORTH * (wanted - incumbent.bound_ns):
                needed, shorter = wanted_ns(incumbent, bound), solving(engine, incumbent)
                certified = self._certifier.of_tree(round_, scale, outcome.tree, bound, needed, shorter)
        return Grown(round_, certified, outcome.x, closed, out_of_time)

    def _extra(self, extra: float) -> int | None:
        """How many ns more than all ops once are to be proved, the same as long as the rows are: a tree is held."""
        if not math.isfinite(extra) or extra < 1:
            return None
        count, known = self._sought
        if count != self._refinement.rows.count or known < extra:
            self._sought = self._refinement.rows.count, math.ceil(extra)
        return self._sought[1]

    def _writing_s(self) -> float:
        """Seconds that are left for writing the certificate of a tree."""
        remaining = self._incumbent.deadline.remaining()
        return 0.0 if math.isinf(remaining) else min(_WRITING_S, _WRITING_SHARE * remaining)
