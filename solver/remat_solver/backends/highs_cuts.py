"""Cutting planes for programs in whole numbers: mixed-integer rounding of a row of the simplex tableau, or of one row.

Besides them there are lifted covers. Every cut is kept as what a checker needs to derive it again: for rounding, whole
multipliers of earlier rows, the divisor, the columns that were complemented. Rows are read as A_r x + s_r = b_r with
slacks s_r ≥ 0. Of their sum with multipliers m,

    Σ a_j x_j + Σ m_r s_r = b,     divided by d, with b = q d + f, 0 ≤ f < d, a_j = q_j d + f_j,

    Σ ((d − f) q_j + max(0, f_j − f)) x_j + Σ_{m_r < 0} m_r s_r ≤ (d − f) q

holds for whole x ≥ 0 (Nemhauser and Wolsey, 1990); columns that are near 1 are taken as 1 − x before (Marchand and
Wolsey, 2001). The slacks are then substituted, and the cut is divided and rounded down so that its numbers stay small.
Of a row of the tableau of a fractional column, with d the scale of its multipliers, it is Gomory's mixed integer cut.

A lifted cover says that of values that do not fit together not all are resident, and others count for what they
displace. Of Σ a_j x_j ≤ b with whole a_j > 0 over columns that are 0 or 1, a cover is a set C with Σ_C a_j > b. At most
|C| − 1 of its columns are 1. Each other column in turn gets the largest weight with which the row still holds: |C| − 1
less the most that the columns weighted before it can have within b − a_j, found by dynamic programming over weights
(Balas and Zemel, 1978). Which cover, and in what order, the point that is to be cut off says.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray

from ..deadline import never
from ..program import Booleans, Floats, Program

_THERE = 1e-9


def lifted_cover(weight: Sequence[int], room: int, x: Sequence[float]) -> tuple[dict[int, int], int] | None:
    """The weights α > 0 of positions, and what they add up to at most; None where all that the point holds fits.

    >>> lifted_cover([5, 5, 5, 9], 14, [1.0, 1.0, 0.8, 0.0])
    ({0: 1, 1: 1, 2: 1, 3: 1}, 2)
    """
    cover = _cover(weight, room, x)
    if not cover:
        return None
    most = len(cover) - 1
    # [t] the least room that columns weighted so far take whose weights add up to t or more
    least = [0]
    for i in sorted(cover, key=lambda i: weight[i])[:most]:
        least.append(least[-1] + weight[i])
    alpha = dict.fromkeys(sorted(cover), 1)
    others = (i for i in range(len(weight)) if i not in alpha)
    for i in sorted(others, key=lambda i: (-x[i], -weight[i])):
        left = room - weight[i]
        displaced = most - (bisect_right(least, left) - 1) if left >= 0 else most
        if displaced > 0:
            alpha[i] = displaced
            for t in range(most, 0, -1):
                least[t] = min(least[t], least[max(0, t - displaced)] + weight[i])
    return alpha, most


def _cover(weight: Sequence[int], room: int, x: Sequence[float]) -> list[int]:
    """Positions that do not fit together, none of them to spare, by a greedy knapsack; empty if there are none."""
    order = sorted((i for i in range(len(weight)) if x[i] > _THERE), key=lambda i: (1.0 - x[i]) / weight[i])
    cover: list[int] = []
    total = 0
    for i in order:
        cover.append(i)
        total += weight[i]
        if total > room:
            break
    if total <= room:
        return []
    for i in sorted(cover, key=lambda i: (x[i], weight[i])):
        if total - weight[i] > room:
            cover.remove(i)
            total -= weight[i]
    return cover


_SCALES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 30, 36, 48, 60, 72, 120)
"""What is tried first to make multipliers whole: where rows have small numbers, this makes them small."""
_FINE = 2.0**12
"""Else the smallest multiplier becomes about this."""
_LARGEST = 2.0**46
_COEFFICIENT = 2**20
"""Cuts are rounded to coefficients of this size, so that cuts from cuts keep to whole numbers of some fifty bits."""
_LEAST_FRACTION = 1e-4
_EFFICACY = 1e-3
"""By how much, in Euclidean distance, a point must break a cut."""
_PARALLEL = 0.9
_TABLEAU_ROWS, _DIVISORS, _MOST_CUTS = 100, 6, 80
_FRACTIONAL = 1e-3
_HIGH = 0.5
"""Columns above this are taken as 1 − x."""


@dataclass(frozen=True)
class Cut:
    """Σ index/value ≤ most, and how it follows: a kind, and what a `CoverRow` or a `DerivedRow` has but the scale."""

    origin: tuple[Any, ...]
    index: NDArray[np.int64]
    value: Floats
    most: int

    @property
    def key(self) -> tuple[int, bytes, bytes]:
        """What tells it from other cuts."""
        return self.most, self.index.tobytes(), self.value.tobytes()

    def wire(self) -> list[Any]:
        """What is sent of it: its kind, and all that a `CoverRow` or a `DerivedRow` has."""
        return [*self.origin, self.scale]

    @property
    def scale(self) -> float:
        """What its linear program's row is multiplied by: its largest coefficient becomes 1."""
        return 1.0 / float(np.abs(self.value).max())

    def depth(self, x: Floats) -> float:
        """How far a point is beyond it."""
        return (float(self.value @ x[self.index]) - self.most) / float(np.linalg.norm(self.value))


class Cuts:
    """The rows of a program in whole numbers, all read as A x ≤ b, and the cuts derived from them so far.

    `factor` are the powers of two that made the program's rows of whole ones.
    """

    def __init__(self, program: Program, factor: Floats) -> None:
        self.columns = program.columns
        self.sign = np.where(np.isfinite(program.row_upper), 1.0, -1.0)
        self.index: list[NDArray[np.int64]] = []
        self.value: list[Floats] = []
        self.most: list[int] = []
        self.scale: list[float] = (factor * self.sign).tolist()
        side = np.where(self.sign > 0, program.row_upper, program.row_lower) / factor * self.sign
        for r, (start, end) in enumerate(zip(program.row_start[:-1], program.row_start[1:], strict=True)):
            self.index.append(program.row_index[start:end].astype(np.int64))
            self.value.append(program.row_value[start:end] / factor[r] * self.sign[r])
            self.most.append(int(side[r]))
        self.base = program.rows
        self.cuts: list[Cut] = []
        self.weighty = [r for r in range(self.base) if len(self.value[r]) and np.abs(self.value[r]).max() > 1]
        self.memory = [r for r in self.weighty if self._of_choices(program, r)]
        self._numbers: dict[tuple[Any, ...], int] = {}

    def _of_choices(self, program: Program, r: int) -> bool:
        """Whether a row has weights > 0 on columns that are 0 or 1 and cost nothing: what is resident at a cut."""
        index = self.index[r]
        free = program.integer[index] & (program.upper[index] == 1) & (program.cost[index] == 0)
        return bool(free.all()) and float(self.value[r].min()) > 0

    def separate(
        self, solver: Any, x: Floats, in_program: Sequence[int], stopped: Callable[[], bool] = never
    ) -> list[Cut]:
        """Cuts that a point breaks, the deepest first, no two nearly parallel; `in_program` are the program's rows.

        Once `stopped` returns True it looks no further.
        """
        now, there = _Entries(self, x, in_program), set(in_program)
        found = []
        for multipliers, divisors in chain(self._single(now), self._tableau(solver, now)):
            if stopped():
                break
            found += _deepest(now, multipliers, divisors)
        found.sort(key=lambda each: -each.depth)
        chosen: list[Cut] = []
        normals = np.zeros((_MOST_CUTS, self.columns))
        covers = ((self._dense(cut), cut) for cut in self._covers(x))
        planes: Iterator[tuple[Floats, Cut | _Rough]] = chain(covers, ((rough.normal, rough) for rough in found))
        for vector, made in planes:
            normal = vector / np.linalg.norm(vector)
            if len(chosen) and float((normals[: len(chosen)] @ normal).max()) > _PARALLEL:
                continue
            cut = made if isinstance(made, Cut) else self._derive(made)
            if cut is None or cut.depth(x) < _EFFICACY:
                continue
            if self._numbers.get(cut.key) in there:
                continue
            normals[len(chosen)] = normal
            chosen.append(cut)
            if len(chosen) == _MOST_CUTS:
                break
        return chosen

    def _dense(self, cut: Cut) -> Floats:
        vector = np.zeros(self.columns)
        vector[cut.index] = cut.value
        return vector

    def _covers(self, x: Floats) -> Iterator[Cut]:
        """Lifted covers of what is resident at a cut."""
        for r in self.memory:
            index = self.index[r]
            made = lifted_cover([int(a) for a in self.value[r].tolist()], self.most[r], x[index].tolist())
            if made is None:
                continue
            alpha, most = made
            pairs = sorted((int(index[i]), a) for i, a in alpha.items())
            columns, weights = (list(each) for each in zip(*pairs, strict=True))
            yield Cut(("cover", r, pairs, most), np.array(columns), np.array(weights, dtype=np.float64), most)

    def add(self, cut: Cut) -> int:
        """Take a cut among the rows; its number, which it has already if it was found before."""
        if cut.key in self._numbers:
            return self._numbers[cut.key]
        self._numbers[cut.key] = len(self.index)
        self.cuts.append(cut)
        self.index.append(cut.index)
        self.value.append(cut.value)
        self.most.append(cut.most)
        self.scale.append(cut.scale)
        return len(self.index) - 1

    def _tableau(self, solver: Any, now: _Entries) -> Iterator[tuple[NDArray[np.int64], list[int]]]:
        """Whole multipliers of rows of the tableau whose basic column is fractional."""
        basic = np.asarray(solver.getBasicVariables()[1])
        rows = np.flatnonzero(basic >= 0)
        away = np.abs(now.x[basic[rows]] - np.round(now.x[basic[rows]]))
        order = rows[np.argsort(-away, kind="stable")][: min(_TABLEAU_ROWS, int((away > _FRACTIONAL).sum()))]
        scale = np.array([self.scale[r] for r in now.number.tolist()])
        for i in order.tolist():
            y = np.asarray(solver.getBasisInverseRow(i)[1])[: len(scale)]
            made = _whole(np.where(np.abs(y) < 1e-9, 0.0, y) * scale)
            if made is not None:
                whole, unit = made
                yield whole, [unit]

    def _single(self, now: _Entries) -> Iterator[tuple[NDArray[np.int64], list[int]]]:
        """Rows with weights alone, divided by the weights of fractional columns."""
        for r in self.weighty:
            # the program's own rows come first, as they do here
            if now.slack[r] > 1e-6 * max(1.0, abs(self.most[r])):
                continue
            index, value = self.index[r], self.value[r]
            part = np.abs(now.x[index] - np.round(now.x[index]))
            order = np.argsort(-part, kind="stable")[:_DIVISORS]
            divisors = {int(abs(value[i])) for i in order.tolist() if part[i] > 1e-6} | {int(np.abs(value).max()) + 1}
            alone = np.zeros(len(now.number), np.int64)
            alone[r] = 1
            yield alone, sorted(divisors)

    def _derive(self, rough: _Rough) -> Cut | None:
        """The cut in exact whole numbers."""
        # the same cut in smaller numbers
        common = math.gcd(rough.divisor, *rough.multipliers.values())
        multipliers, divisor = {r: m // common for r, m in rough.multipliers.items()}, rough.divisor // common
        sums: dict[int, int] = {}
        b = 0
        back: dict[int, int] = {}
        more = 0
        for r, m in multipliers.items():
            b += m * self.most[r]
            if m < 0:
                more -= m * self.most[r]
            for j, a in zip(self.index[r].tolist(), self.value[r].tolist(), strict=True):
                sums[j] = sums.get(j, 0) + m * int(a)
                if m < 0:
                    back[j] = back.get(j, 0) - m * int(a)
        complemented = tuple(j for j in sorted(sums) if rough.high[j] and sums[j])
        flipped = set(complemented)
        b -= sum(sums[j] for j in complemented)
        q, f = divmod(b, divisor)
        most = (divisor - f) * q + more
        row = dict(back)
        for j, a in sums.items():
            whole, part = divmod(-a if j in flipped else a, divisor)
            g = (divisor - f) * whole + max(0, part - f)
            if j in flipped:
                most, g = most - g, -g
            row[j] = row.get(j, 0) + g
        row = {j: g for j, g in sorted(row.items()) if g}
        if not row:
            return None
        coarser = max(1, max(abs(g) for g in row.values()) // _COEFFICIENT)
        row = {j: g // coarser for j, g in row.items() if g // coarser}
        if not row:
            return None
        index, value = np.array(list(row), np.int64), np.array(list(row.values()), np.float64)
        origin = ("round", sorted(multipliers.items()), divisor, coarser, complemented)
        return Cut(origin, index, value, most // coarser)


def _whole(m: Floats) -> tuple[NDArray[np.int64], int] | None:
    """Multipliers times the smallest scale that makes them whole, or nearly; with that scale."""
    size = np.abs(m)
    there = size > 0
    if not there.any():
        return None
    for small in _SCALES:
        if np.abs(m * small - np.round(m * small)).max() < 1e-7:
            return np.round(m * small).astype(np.int64), small
    scale = _FINE / float(size[there].min())
    if float(size.max()) * scale > _LARGEST or scale > _LARGEST:
        scale = min(_LARGEST / max(float(size.max()), 1.0), _LARGEST)
    whole = round(scale)
    return np.round(m * whole).astype(np.int64), whole


class _Entries:
    """The rows of a program in one list of entries, and a point: what many sums of rows are made from.

    `number` counts the rows as `Cuts` does; `slack` is what each leaves at the point; `high` are the columns that are
    taken as 1 − x.
    """

    def __init__(self, cuts: Cuts, x: Floats, in_program: Sequence[int]) -> None:
        self.x, self.high = x, x > _HIGH
        self.number = np.array(in_program, dtype=np.int64)
        self.row = np.repeat(np.arange(len(self.number)), [len(cuts.index[r]) for r in in_program])
        self.index = np.concatenate([cuts.index[r] for r in in_program])
        self.value = np.concatenate([cuts.value[r] for r in in_program])
        self.most = np.array([float(cuts.most[r]) for r in in_program])
        at = np.bincount(self.row, weights=self.value * x[self.index], minlength=len(self.number))
        self.slack = np.maximum(0.0, self.most - at)

    def sum(self, multipliers: Floats) -> Floats:
        """[columns] of the rows with these multipliers."""
        there = np.flatnonzero(multipliers[self.row])
        weights = multipliers[self.row[there]] * self.value[there]
        return np.bincount(self.index[there], weights=weights, minlength=len(self.x)).astype(np.float64)


def _deepest(now: _Entries, whole: NDArray[np.int64], divisors: Sequence[int]) -> list[_Rough]:
    """Of a sum of rows and of its negative, the deepest cut over some divisors, in floating point.

    A single row is not negated. Besides the divisors some fractions of the best of them are tried.
    """
    multipliers = whole.astype(np.float64)
    positive, negative = now.sum(np.maximum(multipliers, 0.0)), now.sum(np.maximum(-multipliers, 0.0))
    there = np.flatnonzero((positive != 0) | (negative != 0))
    a, b = positive - negative, float(multipliers @ now.most)
    found = []
    for sign, back in ((1, negative), (-1, positive)):
        if sign < 0 and np.count_nonzero(whole) == 1 and whole.max() == 1:
            break
        slack = float(np.maximum(-sign * multipliers, 0.0) @ now.slack)
        sums = _Sum(sign * a[there], sign * b, slack, now.high[there], now.x[there])
        depth, best = max((sums.depth(float(divisor)), divisor) for divisor in divisors)
        if depth <= _EFFICACY:
            continue
        parts = [best // part for part in (2, 3, 4, 8) if best // part > 1]
        depth, best = max([(depth, best), *((sums.depth(float(part)), part) for part in parts)])
        normal = back / (best - sums.fraction(float(best)))
        normal[there] += sums.rounded(float(best)) * np.where(sums.high, -1.0, 1.0)
        if np.linalg.norm(normal) > 0:
            rows = np.flatnonzero(whole)
            pairs = zip(now.number[rows].tolist(), (sign * whole[rows]).tolist(), strict=True)
            found.append(_Rough(depth, dict(pairs), best, now.high, normal))
    return found


class _Sum:
    """A sum of rows in floating point: a x − slack ≤ b; columns that are `high` are taken as 1 − x."""

    def __init__(self, a: Floats, b: float, slack: float, high: Booleans, x: Floats) -> None:
        self.high, self._slack = high, slack
        self._a, self._x = np.where(high, -a, a), np.where(high, 1.0 - x, x)
        self._b = b - float(a[high].sum())

    def fraction(self, d: float) -> float:
        """f of the right side."""
        return self._b - math.floor(self._b / d) * d

    def rounded(self, d: float) -> Floats:
        """The rounded coefficients of columns, complemented where high, over d − f."""
        f = self.fraction(d)
        whole = np.floor(self._a / d)
        g = whole + np.maximum(0.0, self._a - whole * d - f) / (d - f)
        g[np.abs(self._a) < 1e-9 * d] = 0.0
        return g

    def depth(self, d: float) -> float:
        """How far the point is beyond the rounded row; 0 where its right side has hardly a fraction."""
        f = self.fraction(d)
        if not _LEAST_FRACTION < f / d < 1 - _LEAST_FRACTION:
            return 0.0
        g = self.rounded(d)
        beyond = float(g @ self._x) - math.floor(self._b / d) - self._slack / (d - f)
        return beyond / math.sqrt(float(g @ g)) if beyond > 0 else 0.0


@dataclass(frozen=True, eq=False)
class _Rough:
    """A cut in floating point: how deep it is, and what it comes from."""

    depth: float
    multipliers: dict[int, int]
    divisor: int
    high: Booleans
    normal: Floats


_DROP_EVERY = 3
"""Rounds after which cuts that bind nothing are taken out again."""

OPTIONS: dict[str, str | float] = {
    "presolve": "off",
    "solver": "simplex",
    "simplex_strategy": 1,
    "dual_feasibility_tolerance": 1e-10,
    # steepest edge would weigh all rows anew at each node
    "simplex_dual_edge_weight_strategy": 1,
}
"""What HiGHS is told for programs that are solved again and again with other limits and more rows."""


class CutRows:
    """The rows of the program that a solver has: `number` says which they are, as `Cuts` counts them."""

    def __init__(self, solver: Any, rows: int, cuts: Cuts | None, idle: int = 0) -> None:
        self.solver, self.cuts, self._idle = solver, cuts, idle
        self.number = list(range(rows))
        self._base = rows
        self.rounds = 0

    def tighten(self, x: Floats, over: Callable[[], bool]) -> bool:
        """Add cutting planes that a point breaks; whether there are any."""
        found = [] if self.cuts is None else self.cuts.separate(self.solver, x, self.number, over)
        if not found:
            return False
        self.rounds += 1
        if self.rounds % _DROP_EVERY == 0 and len(self.number) > self._base + self._idle:
            self._drop_idle()
        for cut in found:
            assert self.cuts is not None
            self.number.append(self.cuts.add(cut))
            index = cut.index.astype(np.int32)
            self.solver.addRow(-np.inf, cut.most * cut.scale, len(index), index, cut.value * cut.scale)
        return True

    def _drop_idle(self) -> None:
        """Take cuts out of the program that do not bind at the last point."""
        assert self.cuts is not None
        status = self.solver.getBasis().row_status
        basic = highspy.HighsBasisStatus.kBasic
        idle = [i for i, r in enumerate(self.number) if r >= self.cuts.base and status[i] == basic]
        if idle:
            self.solver.deleteRows(len(idle), np.array(idle, dtype=np.int32))
            gone = set(idle)
            self.number = [r for i, r in enumerate(self.number) if i not in gone]

    def named(self, duals: Floats) -> tuple[NDArray[np.int64], Floats]:
        """The rows whose duals are not 0, by their numbers, and these duals."""
        there = np.flatnonzero(np.abs(duals) > 1e-12)
        return np.array(self.number, dtype=np.int64)[there], duals[there]
