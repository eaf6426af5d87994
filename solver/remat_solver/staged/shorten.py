"""A shorter certificate of the same tree: leaves that differ little from each other, in few digits.

A leaf proves more than it must, and many multipliers prove the same. So a linear program looks for those closest to the
leaf before it, in the sum of absolute differences, which few rows then have: with d the changes from multipliers y of
weight w that prove L, over the columns' box [l, u] as in the checker,

    min Σ |d_r|     Σ_j z_j − Σ_r b_r (y + d)_r ≥ L,     z_j ≤ x (c + Aᵀ(y + d))_j for x = l_j and u_j.

It is solved twice, small changes being charged more the second time. What can still be spared is spent on fewer digits.
What two leaves have in common is written once when a certificate is compressed. All of this is in floating point: what
comes out must be checked like any other certificate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from remat_ir.proof import Branch, Leaf, StageProof
from remat_ir.proof.carry import boxes
from remat_ir.proof.certificate import Column
from remat_ir.proof.check import KIND, inequality
from remat_ir.proof.rows import Inequality, Relaxation
from remat_ir.read import LARGEST_INTEGER

from ..array_view import Ids
from ..deadline import Deadline, TimeUp
from ..program import INFINITY, Builder, Floats, Program, Term

Solve: TypeAlias = Callable[[Program], Floats | None]
"""The point of a linear program in floating point, or None."""

_GRAINS = tuple(3.0 * 10.0**-k for k in range(5, 11))
"""What multipliers that differ are rounded to, as shares of the cost of all ops once; the first that is enough."""
_HALF = 0.5
"""The share of what a leaf can spare that the linear program is given; the rest is for rounding."""
_SMALL = 1e-4
"""Changes of this share of the largest are charged half as much as changes of nothing are, the second time."""
_WITH_ROW = 20.0
"""How much more the first multiplier of a rounded row is charged: the row has to be written for it."""
_FINEST = 12
"""Digits of the denominator at most."""
_SPARED = 0.01
"""The share of what shows a leaf to be empty that is left, and how many ns a bound is above what it must be."""
_ERROR = 1e-9
_LEAST_S, _SHARE = 0.6, 0.2
"""The seconds at least, and the share of the time so far, for making a certificate shorter."""


def shortening(deadline: Deadline) -> Deadline:
    """How long a certificate may be shortened, besides a program that has begun."""
    return deadline.within(min(max(_LEAST_S, _SHARE * deadline.elapsed()), 0.5 * deadline.remaining()))


def shortened(
    on: Relaxation, proof: StageProof, bound_ns: int, total_ns: int, solve: Solve, watch: Deadline
) -> StageProof:
    """The same tree with other multipliers, of which each leaf proves `bound_ns` or is empty.

    `total_ns` is the cost of all ops once. Once `watch` has passed, leaves stay as they are.
    """
    shorter = Shorter(on, proof, solve, float(bound_ns - total_ns - 1), max(1.0, total_ns), watch.passed)
    before = np.zeros(len(proof.rows))
    found: list[Floats | None] = []
    for leaf, box in zip((node for node in proof.nodes if isinstance(node, Leaf)), boxes(proof), strict=True):
        try:
            found.append(None if watch.passed() else shorter.leaf(leaf, box, before))
        except TimeUp:
            found.append(None)
        last = found[-1]
        before = shorter.multipliers(leaf) if last is None else last
    return shorter.written(found)


class Shorter:
    """The rows of a certificate as arrays, and the search for leaves over them."""

    def __init__(
        self, on: Relaxation, proof: StageProof, solve: Solve, need: float, total: float, stop: Callable[[], bool]
    ) -> None:
        self._proof, self._solve, self._need, self._total, self._stop = proof, solve, need, total, stop
        self._made: list[Inequality] = []
        for row in proof.rows:
            self._made.append(inequality(on, self._made, row))
        self._rounded_row = np.array([row[0] == KIND for row in proof.rows], np.bool_)
        branched = (column for box in boxes(proof) for column in box)
        self.place: dict[Column, int] = {}
        for column in (*(column for made in self._made for column in made.terms), *branched):
            self.place.setdefault(column, len(self.place))
        self.index = [np.array([self.place[column] for column in made.terms], np.int64) for made in self._made]
        self.value = [np.array([float(v) for v in made.terms.values()]) for made in self._made]
        self.most = np.array([float(made.most) for made in self._made])
        self._large = np.array([max(1.0, float(np.abs(value).max(initial=0.0))) for value in self.value])
        self.cost = np.array([float(on.cost(column)) for column in self.place])
        self.upper = np.array([float(on.upper(column)) for column in self.place])

    def multipliers(self, leaf: Leaf) -> Floats:
        """[rows] of a leaf."""
        y = np.zeros(len(self._made))
        for r, multiplier in leaf.duals:
            y[r] = multiplier / self._proof.denominator
        return y

    def leaf(self, leaf: Leaf, box: Mapping[Column, int], before: Floats) -> Floats | None:
        """[rows] multipliers for a leaf, close to those of the one before; None where only its own are enough.

        Raises:
            TimeUp: before its program was written.
        """
        y, empty = self.multipliers(leaf), leaf.empty
        point = Point(self, y, box, empty)
        most = point.bound()
        least = _SPARED * most if empty else self._need + _SPARED
        enough = least + _ERROR * point.size()
        if most <= enough:
            return None
        y = self._nearest(y, before, box, empty, enough + _HALF * (most - enough), enough)
        point = Point(self, y, box, empty)
        differ = y != before
        for share in _GRAINS:
            unit = 10.0 ** np.floor(np.log10(share * self._total / self._large))
            rough = Point(self, np.where(differ, np.round(y / unit) * unit, y), box, empty)
            if rough.bound() > enough:
                point = rough
                break
        return point.y

    def _nearest(
        self, y: Floats, before: Floats, box: Mapping[Column, int], empty: bool, wanted: float, enough: float
    ) -> Floats:
        """[rows] what a linear program finds close to `before`, or `y` where that is not enough."""
        rows = np.flatnonzero((y != 0) | (before != 0))
        weight = np.where(self._rounded_row[rows] & (before[rows] == 0), _WITH_ROW, 1.0)
        charge, best, fewest = weight, y, int((y != before).sum())
        for _ in range(2):
            x = self._solve(self._program(rows, charge, before, box, empty, wanted))
            if x is None:
                break
            change = x[: len(rows)] - x[len(rows) : 2 * len(rows)]
            size = np.abs(change)
            change[size <= 1e-9 * size.max(initial=0.0)] = 0.0
            found = before.copy()
            found[rows] = np.maximum(0.0, before[rows] + change * self._unit(rows))
            count = int((found != before).sum())
            if count < fewest and Point(self, found, box, empty).bound() > enough:
                best, fewest = found, count
            charge = weight * _SMALL / (_SMALL + size / max(float(size.max(initial=0.0)), 1e-300))
        return best

    def _unit(self, rows: Ids) -> Floats:
        """[rows] what a program counts multipliers in: its numbers are about 1."""
        return np.asarray(1e-3 * self._total / self._large[rows])

    def _program(
        self, rows: Ids, charge: Floats, before: Floats, box: Mapping[Column, int], empty: bool, wanted: float
    ) -> Program:
        """Changes up, changes down, then z of each column that a row has, in `_unit`s."""
        at, scale, unit = Point(self, before, box, empty), 1e-3 * self._total, self._unit(rows)
        lengths = [len(self.index[r]) for r in rows]
        entry = np.repeat(np.arange(len(rows)), lengths)
        index = np.concatenate([self.index[r] for r in rows]) if len(rows) else np.zeros(0, np.int64)
        value = np.concatenate([self.value[r] for r in rows]) * unit[entry] / scale if len(rows) else np.zeros(0)
        columns, place = np.unique(index, return_inverse=True)
        low, high, weight = at.low[columns], at.high[columns], at.weight[columns] / scale
        builder = Builder(self._stop)
        most = before[rows] / unit
        up = builder.variables(len(rows), cost=charge, upper=INFINITY, integer=False)
        down = builder.variables(len(rows), cost=charge, upper=most, integer=False)
        z = builder.variables(len(columns), lower=-INFINITY, upper=np.where(low > 0, INFINITY, 0.0), integer=False)
        # with l = 0 the limit that is left is that of u; with u = 0 none is
        there = high[place] > 0
        free, of = value[there] * high[place[there]], place[there]
        terms = [
            Term(np.arange(len(columns)), z),
            Term(of, up[entry[there]], -free),
            Term(of, down[entry[there]], free),
        ]
        builder.add_rows(len(columns), terms, upper=weight * high)
        fixed = at.bound() - float(np.minimum(at.weight * at.low, at.weight * at.high)[columns].sum())
        paid = self.most[rows] * unit / scale
        bound = [Term(0, z), Term(0, up, -paid), Term(0, down, paid)]
        builder.add_rows(1, bound, lower=(wanted - fixed) / scale)
        return builder.program()

    def written(self, found: Sequence[Floats | None]) -> StageProof:
        """The certificate, over the least power of ten in which all multipliers are whole."""
        new = [y for y in found if y is not None]
        denominator = self._proof.denominator
        if len(new) == len(found):
            denominator = next((10**k for k in range(_FINEST) if all(_whole(y * 10**k) for y in new)), 10**_FINEST)
        largest = max((float(y.max(initial=0.0)) for y in new), default=0.0)
        while denominator > 1 and largest * denominator > LARGEST_INTEGER:
            denominator //= 10
        nodes: list[Branch | Leaf] = []
        each = iter(found)
        for node in self._proof.nodes:
            if isinstance(node, Leaf):
                y = next(each)
                if y is not None:
                    duals = [(int(r), round(float(y[r]) * denominator)) for r in np.flatnonzero(y)]
                else:
                    duals = [(r, whole * denominator // self._proof.denominator) for r, whole in node.duals]
                node = node._replace(duals=tuple((r, multiplier) for r, multiplier in duals if multiplier > 0))
            nodes.append(node)
        return replace(self._proof, denominator=denominator, nodes=tuple(nodes))


def _whole(numbers: Floats) -> bool:
    nearest = np.round(numbers)
    return bool((np.abs(numbers - nearest) <= 1e-9 * np.maximum(1.0, nearest)).all())


class Point:
    """A leaf's multipliers, and what they prove within its box, in ns."""

    def __init__(self, on: Shorter, y: Floats, box: Mapping[Column, int], empty: bool) -> None:
        self.y = y
        self.low, self.high = np.zeros(len(on.upper)), on.upper.copy()
        for column, fixed in box.items():
            self.low[on.place[column]] = self.high[on.place[column]] = fixed
        self.weight = np.zeros(len(on.cost)) if empty else on.cost.copy()
        for r in np.flatnonzero(y):
            self.weight[on.index[r]] += y[r] * on.value[r]
        self._proved = -float(y @ on.most)

    def bound(self) -> float:
        """What is proved."""
        return self._proved + float(np.minimum(self.weight * self.low, self.weight * self.high).sum())

    def size(self) -> float:
        """Of the numbers that the bound is the sum of."""
        return abs(self._proved) + float(np.abs(self.weight * self.high).sum())
