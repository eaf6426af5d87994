"""A mixed integer program as plain arrays: what a formulation makes and an engine solves."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .deadline import look, never

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int32]
Booleans: TypeAlias = NDArray[np.bool_]

INFINITY = float("inf")
MOST_ENTRIES = 2**31 - 1
"""Row starts and column indices are 32-bit: what HiGHS takes without a copy."""


@dataclass(frozen=True, eq=False)
class Program:
    """Minimise cost · x + offset subject to row_lower ≤ A x ≤ row_upper, lower ≤ x ≤ upper, some x integer.

    A is stored by rows (CSR). Infinite bounds are ±inf.

    Attributes:
        cost, lower, upper: [columns] float64.
        integer: [columns] bool.
        row_start: [rows + 1] int32; row r has the entries row_start[r] to row_start[r + 1] − 1.
        row_index, row_value: [entries] int32 and float64, columns ascending within a row, no column twice.
        row_lower, row_upper: [rows] float64.
    """

    cost: Floats
    lower: Floats
    upper: Floats
    integer: Booleans
    row_start: Integers
    row_index: Integers
    row_value: Floats
    row_lower: Floats
    row_upper: Floats
    offset: float = 0.0

    @property
    def columns(self) -> int:
        """The number of variables."""
        return len(self.cost)

    @property
    def rows(self) -> int:
        """The number of constraints."""
        return len(self.row_lower)

    @property
    def entries(self) -> int:
        """The number of coefficients that are not zero."""
        return len(self.row_value)

    def activity(self, x: Floats) -> Floats:
        """[rows] A x."""
        products = self.row_value * x[self.row_index]
        sums = np.concatenate(([0.0], np.cumsum(products)))
        return np.asarray(sums[self.row_start[1:]] - sums[self.row_start[:-1]])

    def objective(self, x: Floats) -> float:
        """cost · x + offset."""
        return float(self.cost @ x) + self.offset

    def violation(self, x: Floats) -> float:
        """By how much x breaks the worst bound or row; integrality is not looked at."""
        activity = self.activity(x)
        excess = (self.row_lower - activity, activity - self.row_upper, self.lower - x, x - self.upper)
        return max([0.0, *(float(part.max()) for part in excess if len(part))])

    def dual_bound(self, row_dual: Floats) -> float:
        """A lower bound on the objective that holds for any dual values whatever, integrality relaxed.

        Weak duality: for every y, cost · x = (cost − Aᵀy) · x + y · (A x), and each term is at least its minimum over
        the bounds of x and of the rows. Duals of the wrong sign for a one-sided row are taken as 0. So an engine's
        tolerances cannot make this bound wrong, only weak. Nor can float64: each reduced cost is an interval that holds
        the exact one, its radius from |cost| + |A|ᵀ|y| (Higham, Accuracy and Stability of Numerical Algorithms, Section
        3.1), the products are rounded down, and their sum is correctly rounded before one more step down.
        """
        y = np.where(np.isfinite(row_dual), row_dual, 0.0)
        y = np.where(np.isinf(self.row_lower), np.minimum(y, 0.0), y)
        y = np.where(np.isinf(self.row_upper), np.maximum(y, 0.0), y)
        each = self.row_value * np.repeat(y, np.diff(self.row_start))
        count = np.bincount(self.row_index, minlength=self.columns)
        with np.errstate(invalid="ignore", over="ignore"):
            # a column's sum is one product and one addition an entry: γ_k of the sum of magnitudes, doubled for its own
            # rounding, and what products below the normal numbers lose
            reduced = self.cost - np.bincount(self.row_index, each, minlength=self.columns)
            reach = np.abs(self.cost) + np.bincount(self.row_index, np.abs(each), minlength=self.columns)
            radius = np.where(count > 0, 2.0 * (count + 3) * (2.0**-53 * reach + 2.0**-1074), 0.0)
            least, most = np.nextafter(reduced - radius, -INFINITY), np.nextafter(reduced + radius, INFINITY)
            least, most = np.where(count > 0, least, reduced), np.where(count > 0, most, reduced)
            self._narrow(y, least, most)
            sides = [_product(end, side) for end in (least, most) for side in (self.lower, self.upper)]
            of_columns = np.minimum(np.minimum(sides[0], sides[1]), np.minimum(sides[2], sides[3]))
            of_rows = _product(y, np.where(y > 0, self.row_lower, self.row_upper))
        terms = np.concatenate((of_rows, of_columns, [self.offset]))
        if not np.isfinite(terms).all():
            return -INFINITY
        try:
            return math.nextafter(math.fsum(terms.tolist()), -INFINITY)
        except OverflowError:
            return -INFINITY

    def _narrow(self, y: Floats, least: Floats, most: Floats) -> None:
        """Make the intervals of reduced costs exact where one holds 0 and an infinite bound would spoil the sum."""
        spoilt = (np.isinf(self.lower) & (most > 0)) | (np.isinf(self.upper) & (least < 0))
        for column in np.flatnonzero(spoilt & np.isfinite(least) & np.isfinite(most)).tolist():
            entries = np.flatnonzero(self.row_index == column)
            rows = np.searchsorted(self.row_start, entries, side="right") - 1
            exact = Fraction(float(self.cost[column]))
            for row, value in zip(rows.tolist(), self.row_value[entries].tolist(), strict=True):
                exact -= Fraction(value) * Fraction(float(y[row]))
            near = float(exact)
            least[column] = near if Fraction(near) <= exact else math.nextafter(near, -INFINITY)
            most[column] = near if Fraction(near) >= exact else math.nextafter(near, INFINITY)


def _product(left: Floats, right: Floats) -> Floats:
    """left · right rounded down, and 0 where a factor is 0."""
    return np.where((left == 0.0) | (right == 0.0), 0.0, np.nextafter(left * right, -INFINITY))


class Term(NamedTuple):
    """Entries of a block of rows: `row` counts from the block's first row; all three broadcast against each other.

    A column below 0 is a variable that is not there and counts as 0: its entry is left out.
    """

    row: ArrayLike
    column: ArrayLike
    value: ArrayLike = 1.0


Name: TypeAlias = tuple[str | ArrayLike, ...]
"""What a block is called in a certificate: a kind, then indices, each one number or one for each row or column."""


Entries: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64], Floats]
"""Rows, columns and values, one of each an entry."""

_PART = 2**18
"""Entries that are sorted at a time."""


class Names(NamedTuple):
    """Blocks of rows, or of columns, by the first of each."""

    blocks: list[tuple[int, Name]]

    def of(self, one: int) -> tuple[str | int, ...]:
        """The name of one row or column; that of one without a name is an empty word."""
        first, (kind, *indices) = self.blocks[bisect_right(self.blocks, one, key=lambda block: block[0]) - 1]
        return (str(kind), *(int(np.ravel(index)[one - first] if np.ndim(index) else index) for index in indices))  # type: ignore[arg-type]


class Builder:
    """Collects columns and blocks of rows as whole arrays, and merges entries that meet in one place by adding them.

    `stop` is asked at each step of a block: once it says so, writing on raises `TimeUp`.

    Attributes:
        columns, rows: how many there are so far. column_names, names: what they are called.
    """

    def __init__(self, stop: Callable[[], bool] = never) -> None:
        self._stop = stop
        self.columns = 0
        self.rows = 0
        self.column_names, self.names = Names([]), Names([])
        self._columns: list[tuple[Floats, Floats, Floats, Booleans]] = []  # cost, lower, upper, integer
        self._entries: list[tuple[Integers, Integers, Floats]] = []  # [rows] how many; [entries] columns and values
        self._sides: list[tuple[Floats, Floats]] = []  # lower, upper

    def variables(
        self,
        count: int,
        *,
        cost: ArrayLike = 0.0,
        lower: ArrayLike = 0.0,
        upper: ArrayLike = 1.0,
        integer: bool = True,
        name: Name = ("",),
    ) -> NDArray[np.int64]:
        """Add `count` variables, binary unless told otherwise; returns their column indices. `name` as of rows."""
        self.look()
        if count:
            self.column_names.blocks.append((self.columns, name))
        numbers = _spread(cost, count), _spread(lower, count), _spread(upper, count)
        self._columns.append((*numbers, np.full(count, integer)))
        first, self.columns = self.columns, self.columns + count
        return np.arange(first, self.columns)

    def variables_at(self, mask: Booleans, **given: Any) -> NDArray[np.int64]:
        """[mask's shape] a variable at each place of a mask, and −1 elsewhere; `given` as of `variables`."""
        return scattered(mask, self.variables(int(mask.sum()), **given))

    def add_rows(
        self,
        count: int,
        terms: Iterable[Term],
        *,
        lower: ArrayLike = -INFINITY,
        upper: ArrayLike = INFINITY,
        name: Name = ("",),
    ) -> None:
        """Add `count` rows: lower ≤ the sum of the terms ≤ upper; `name` says what they are called in a certificate."""
        self.look()
        if count:
            self.names.blocks.append((self.rows, name))
        whole: list[Entries] = []
        for term in terms:
            row, column, value = np.broadcast_arrays(
                np.asarray(term.row, dtype=np.int64),
                np.asarray(term.column, dtype=np.int64),
                np.asarray(term.value, dtype=np.float64),
            )
            there = column >= 0
            whole.append((row[there], column[there], value[there]))
            self.look()
        for rows, entries in _parts(whole, count):
            # sorted part by part, which leaves the clock to be looked at between
            self._entries.append(_by_rows(entries, rows, self.columns, self.look))
        self._sides.append((_spread(lower, count), _spread(upper, count)))
        self.rows += count

    def add_implied(self, column: NDArray[np.int64], *by: NDArray[np.int64], name: Name = ("",)) -> None:
        """Add a row for each of `column`: it is at most the sum of those of `by`, [rows] each; `name` as of rows."""
        each = np.arange(len(column))
        terms = [Term(each, column), *(Term(each, other, -1.0) for other in by)]
        self.add_rows(len(column), terms, upper=0.0, name=name)

    def look(self) -> None:
        """Raise `TimeUp` where the program is not to be written on."""
        look(self._stop)

    def program(self, offset: float = 0.0) -> Program:
        """The program collected so far.

        Raises:
            OverflowError: more entries than 32-bit indices can count.
            TimeUp: `stop` said so.
        """
        self.look()
        length, index, value = _joined(self._entries, np.int64, np.int32, np.float64)
        if len(value) > MOST_ENTRIES:
            raise OverflowError(f"the program has {len(value)} entries, more than {MOST_ENTRIES}")
        start = np.zeros(self.rows + 1, dtype=np.int32)
        np.cumsum(length, out=start[1:])
        cost, lower, upper, integer = _joined(self._columns, np.float64, np.float64, np.float64, np.bool_)
        row_lower, row_upper = _joined(self._sides, np.float64, np.float64)
        return Program(cost, lower, upper, integer, start, index, value, row_lower, row_upper, offset)


def scattered(mask: Booleans, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """[mask's shape] numbers at the places of a mask, in order, and −1 elsewhere."""
    found = np.full(mask.shape, -1, dtype=np.int64)
    found[mask] = numbers
    return found


def _spread(given: ArrayLike, count: int) -> Floats:
    return np.array(np.broadcast_to(np.asarray(given, dtype=np.float64), (count,)))


def _joined(parts: Sequence[tuple[NDArray[Any], ...]], *kinds: Any) -> list[NDArray[Any]]:
    """Arrays of some types, one after the other, each joined from what the parts have of it."""
    empty = tuple(np.zeros(0, kind) for kind in kinds)
    each = zip(*(parts or [empty]), strict=True)
    return [np.concatenate(arrays).astype(kind, copy=False) for arrays, kind in zip(each, kinds, strict=True)]


def _parts(whole: list[Entries], count: int) -> Iterator[tuple[int, list[Entries]]]:
    """A block in parts of consecutive rows, each with how many; one part where a term's rows do not come in order.

    A part has about `_PART` entries: a sort takes longer than in proportion, and nobody looks at the clock meanwhile.
    """
    size = sum(len(row) for row, _, _ in whole)
    if size <= _PART or any(bool(np.any(row[1:] < row[:-1])) for row, _, _ in whole):
        yield count, whole
        return
    ends = np.linspace(0, count, size // _PART + 2).astype(np.int64)
    places = [np.searchsorted(row, ends) for row, _, _ in whole]
    for i, (first, end) in enumerate(itertools.pairwise(ends.tolist())):
        cut = [slice(place[i], place[i + 1]) for place in places]
        part = [(r[c] - first, k[c], v[c]) for (r, k, v), c in zip(whole, cut, strict=True)]
        yield end - first, part


def _by_rows(
    parts: list[Entries], rows: int, columns: int, step: Callable[[], None]
) -> tuple[Integers, Integers, Floats]:
    """Sort entries by (row, column), add up those that meet, and drop the zeros that this makes.

    `step` is called between the steps, each of which is linear in the entries or sorts them.

    Returns:
        [rows] the entries left in each row, and their columns and values.
    """
    row, column, value = _joined(parts, np.int64, np.int64, np.float64)
    # most blocks arrive nearly sorted by row, where a stable sort of one combined key is close to linear
    key = row * max(columns, 1) + column
    step()
    if len(key) > 1 and not bool(np.all(key[1:] > key[:-1])):
        order = np.argsort(key, kind="stable")
        step()
        key, value = key[order], value[order]
        fresh = np.concatenate(([True], key[1:] != key[:-1]))
        if not fresh.all():
            value = np.add.reduceat(value, np.flatnonzero(fresh))
            key = key[fresh]
    step()
    nonzero = value != 0.0
    if not nonzero.all():
        key, value = key[nonzero], value[nonzero]
    row, column = np.divmod(key, max(columns, 1))
    return np.bincount(row, minlength=rows).astype(np.int32), column.astype(np.int32), value
