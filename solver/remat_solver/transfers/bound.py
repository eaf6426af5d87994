"""A lower bound on the makespan of every plan of a graph with a link, and what its relaxation would move."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from remat_ir import Graph

from ..array_view import ArrayView, view_of
from ..backends.engine import Engine
from ..deadline import Deadline, TimeUp, never
from ..incumbent import Incumbent
from ..program import Floats, Program
from ..staged.certificate import Certifier, wanted_ns
from ..staged.rows import Recomputations, add_to
from ..staged.scale import WHOLE, balance_of, balanced
from .relaxation import Columns, Written, ample_ns, relax, violations

_CUTS = (1, 2, 3)
_ROUNDS = 4
"""Linear programs at most for one set of cuts: each adds the rows (h) that the one before broke."""
_MOST_COLUMNS = 60_000
SOURCE = "transfer-bound"


@dataclass(frozen=True, eq=False)
class Relaxed:
    """A solved relaxation.

    Attributes:
        bound_ns: what `row_dual`, of the balanced program, proves.
        moved: [values] the most of a value that is on the host when a coarse stage begins, 0 to 1.
    """

    written: Written
    bound_ns: int
    row_dual: Floats
    moved: Floats


def cuts_of(view: ArrayView, count: int) -> tuple[int, ...]:
    """Ops that end coarse stages: where keeping everything takes most memory, and others spread over what is too full.

    Ends with the last op; without any op at which memory is short, it is alone.
    """
    held = view.held_until(np.where(view.kept, view.ops, view.last_reader))
    over = np.flatnonzero(held > view.capacity)
    if not len(over):
        return (view.ops - 1,)
    chosen = {int(np.argmax(held))}
    chosen |= {int(over[(2 * i + 1) * len(over) // (2 * count)]) for i in range(count - 1)}
    return tuple(sorted(chosen | {view.ops - 1}))


def solved(
    engine: Engine,
    view: ArrayView,
    cuts: tuple[int, ...],
    deadline: Deadline,
    *,
    stopped: Callable[[], bool] = never,
) -> Relaxed | None:
    """The linear relaxation for some cuts, with the rows (h) that its solutions break; None if time is up before."""
    graph: Graph = view.graph
    assert graph.link is not None
    charged: Recomputations = {}
    best: Relaxed | None = None
    for _ in range(_ROUNDS):
        try:
            written = relax(view, graph.link, cuts, charged, lambda: deadline.passed() or stopped())
        except TimeUp:
            break
        program, columns = written.program, written.columns
        if program.columns > _MOST_COLUMNS:
            break
        found = engine.lp(balanced(program), deadline=deadline, stopped=stopped)
        if found.x is None or found.row_dual is None:
            break
        bound = proved_ns(view, program, found.row_dual)
        if best is None or bound >= best.bound_ns:
            best = Relaxed(written, bound, found.row_dual, _moved(view, columns, found.x))
        if not add_to(charged, violations(view, columns, found.x)) or deadline.passed():
            break
    return best


def proved_ns(view: ArrayView, program: Program, row_dual: Floats) -> int:
    """What the duals of the balanced program prove in ns, by weak duality whatever they are; at most `ample_ns`."""
    assert view.graph.link is not None
    total, added_ns = int(view.cost.sum()), balanced(program).dual_bound(row_dual) / balance_of(program)
    if not math.isfinite(added_ns):
        return total
    bound = total + max(0, math.ceil(added_ns - 1e-9 * (1.0 + abs(added_ns))))
    return min(bound, ample_ns(view, view.graph.link))


def _moved(view: ArrayView, columns: Columns, x: Floats) -> Floats:
    moved = np.zeros(view.values)
    for table in (*columns.hosts, *columns.back):
        there = table >= 0
        moved[there] = np.maximum(moved[there], np.minimum(1.0, x[table[there]]))
    return moved


def prove(incumbent: Incumbent, deadline: Deadline) -> Iterator[Relaxed]:
    """Raise the incumbent's bound by linear relaxations with ever more cuts; yields each."""
    view = view_of(incumbent.problem)
    certifier = Certifier(incumbent.problem) if incumbent.certifies else None
    with Engine("highs") as engine:
        for cuts in dict.fromkeys(cuts_of(view, count) for count in _CUTS):
            if deadline.passed() or incumbent.stopped():
                continue
            relaxed = solved(engine, view, cuts, deadline, stopped=incumbent.stopped)
            if relaxed is None:
                break
            bound = relaxed.bound_ns
            if certifier is None:
                incumbent.raise_bound(bound, SOURCE)
            elif bound > incumbent.bound_ns:
                wanted = wanted_ns(incumbent, bound)
                found = certifier.of_linear(relaxed.written, WHOLE, relaxed.row_dual, bound, wanted)
                if found is not None and found.bound_ns is not None:
                    incumbent.raise_bound(found.bound_ns, SOURCE, proof=found.proof)
            yield relaxed
