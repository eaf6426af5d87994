"""The program of one round: the relaxation for the present cuts with whatever rows have been found so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ..array_view import ArrayView, Ids
from ..deadline import never
from ..program import Builder, Floats, Names, Program, Term
from .nested import Span, add_spans
from .relaxation import ONE, Columns, relax
from .reruns import Reruns, add_reruns
from .scale import Scale


@dataclass(frozen=True, eq=False)
class Cover:
    """More than fits next to the first computation of a cut op: at most `most` of these values can be resident then."""

    op: int
    values: Ids
    most: int


@dataclass
class Rows:
    """What a proof has found worth telling apart; grows from round to round and never shrinks.

    `cuts` end coarse stages; `spans` are the coarse stages that were cut, those with variables. `reruns` are rows (h).
    `covers` repair what rounded weights let through.
    """

    cuts: set[int]
    spans: list[Span] = field(default_factory=list)
    reruns: Reruns = field(default_factory=dict)
    covers: list[Cover] = field(default_factory=list)

    def cut(self, op: int) -> None:
        """Tell the stages up to that of an op apart from those after it; the op is no cut yet."""
        before = max((cut for cut in self.cuts if cut < op), default=None)
        if before is not None:
            self.spans.append((before, min(cut for cut in self.cuts if cut > op)))
        self.cuts.add(op)

    @property
    def count(self) -> int:
        """How much has been found: more whenever a program becomes another one."""
        runs = sum(map(len, self.reruns.values()))
        return len(self.cuts) + len(self.spans) + len(self.covers) + runs

    def with_cut(self, op: int) -> Rows:
        """These rows with one more cut; they stay as they are."""
        more = replace(self, cuts=set(self.cuts), spans=list(self.spans))
        more.cut(op)
        return more


@dataclass(frozen=True, eq=False)
class Round:
    """A program, where its variables are, and what all is called."""

    program: Program
    columns: Columns
    names: Names
    column_names: Names
    spans: tuple[Span, ...]

    @property
    def cuts(self) -> tuple[int, ...]:
        """The ops that end coarse stages."""
        return self.columns.cuts

    @property
    def wide(self) -> tuple[tuple[int, int], ...]:
        """The spans as the first and the last of the coarse stages that they consist of, where those are several."""
        starts = {cut: c + 1 for c, cut in enumerate(self.cuts)}
        spans = ((starts[begin], self.columns.stage_of(end)) for begin, end in self.spans)
        return tuple(sorted({(a, b) for a, b in spans if a < b}))


def write(
    view: ArrayView,
    rows: Rows,
    scale: Scale,
    *,
    nested: bool = True,
    cutoff_ns: int | None = None,
    stop: Callable[[], bool] = never,
) -> Round:
    """The program for the rows found so far; the objective is in units of cost and leaves out each op's first run.

    Without `nested` it has no spans. With `cutoff_ns` its last row is of points whose objective is less; for a scale
    of 1 ns alone. Where `stop` says so, `TimeUp` is raised.
    """
    builder = Builder(stop)
    columns = relax(view, tuple(sorted(rows.cuts)), scale, builder)
    if nested:
        add_spans(view, columns, rows.spans, builder)
    add_reruns(view, columns, rows.reruns, builder, scale)
    for cover in rows.covers:
        _add_cover(columns, cover, builder)
    if cutoff_ns is not None:
        _add_cheaper(view, columns, cutoff_ns, builder)
    spans = tuple(sorted(set(rows.spans))) if nested else ()
    return Round(builder.program(), columns, builder.names(), builder.column_names(), spans)


def cover_of(view: ArrayView, columns: Columns, op: int, x: Floats) -> Cover | None:
    """A row that a 0/1 solution breaks because too much is resident while a cut op runs; None if all of it fits.

    The largest of the resident values until they exceed the room, in whole bytes: not all of them fit. So many of
    these and of any larger values do not either.
    """
    hold = columns.holds[columns.stage_of(op) + 1]
    room, free = _beside(view, hold, op)
    held = free[x[hold[free]] > 0.5]
    held = held[np.argsort(-view.size[held], kind="stable")]
    over = np.flatnonzero(np.cumsum(view.size[held]) > room)
    if not len(over):
        return None
    chosen = held[: over[0] + 1]
    larger = free[view.size[free] >= view.size[chosen[0]]]
    return Cover(op, np.union1d(chosen, larger), len(chosen) - 1)


def _beside(view: ArrayView, hold: Ids, op: int) -> tuple[int, Ids]:
    """The bytes free besides what certainly is resident while a cut op runs, and the values that compete for them."""
    counted = (view.maker < op) | ((view.maker == op) & view.optional)
    counted[view.inputs(op)] = False
    room = view.capacity - int(view.need[op]) - int(view.size[counted & (hold == ONE)].sum())
    return room, np.flatnonzero(counted & (hold >= 0))


def _add_cheaper(view: ArrayView, columns: Columns, cutoff_ns: int, builder: Builder) -> None:
    ops = [np.flatnonzero(run >= 0) for run in columns.runs]
    terms = [Term(0, run[each], view.cost[each]) for run, each in zip(columns.runs, ops, strict=True)]
    builder.add_rows(1, terms, upper=float(cutoff_ns - 1), name=("cheaper", cutoff_ns))


def _add_cover(columns: Columns, cover: Cover, builder: Builder) -> None:
    column = columns.holds[columns.stage_of(cover.op) + 1][cover.values]
    free, most = column >= 0, cover.most - int((column == ONE).sum())
    weighted = (number for value in cover.values[free].tolist() for number in (value, 1))
    name = ("cover", columns.stage_of(cover.op) + 1, most, *weighted)
    builder.add_rows(1, [Term(0, column[free])], upper=float(most), name=name)
