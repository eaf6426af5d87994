"""Blocks of rows as they are written into a program: sorted, merged, in one part or in several."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples
from remat_solver import program
from remat_solver.deadline import TimeUp
from remat_solver.program import Builder, Term
from solver.stops import After

SETTINGS = settings(max_examples=examples(100), deadline=None, derandomize=True)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[int, int, list[Term]]:
    """Rows, columns and up to four terms, in the order of rows or not, that meet and cancel."""
    rows, columns = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    terms = []
    for _ in range(draw(st.integers(0, 4))):
        chance = np.random.default_rng(draw(st.integers(0, 2**32)))
        size = draw(st.integers(0, 30))
        row = chance.integers(0, rows, size)
        value = chance.integers(-2, 3, size).astype(np.float64)
        terms.append(Term(np.sort(row) if draw(st.booleans()) else row, chance.integers(0, columns, size), value))
    return rows, columns, terms


@SETTINGS
@given(blocks(), st.sampled_from([1, 3, 10, 1000]))
def test_a_block_is_the_sum_of_its_terms(block: tuple[int, int, list[Term]], part: int) -> None:
    """Whatever part of it is sorted at a time: no column twice in a row, columns ascending, no zeros."""
    rows, columns, terms = block
    dense = np.zeros((rows, columns))
    for term in terms:
        np.add.at(dense, (np.asarray(term.row), np.asarray(term.column)), np.asarray(term.value))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(program, "_PART", part)
        builder = Builder()
        builder.variables(columns)
        builder.add_rows(1, [Term(0, 0)])
        builder.add_rows(rows, terms, upper=np.arange(rows))
        made = builder.program()
    assert made.rows == 1 + rows
    found = np.zeros((1 + rows, columns))
    for row in range(1 + rows):
        entries = slice(made.row_start[row], made.row_start[row + 1])
        assert np.all(np.diff(made.row_index[entries]) > 0)
        assert np.all(made.row_value[entries] != 0)
        found[row, made.row_index[entries]] = made.row_value[entries]
    assert np.array_equal(found[1:], dense)
    assert np.array_equal(made.row_upper[1:], np.arange(rows))
    sums = dense.sum(axis=1)
    assert made.activity(np.ones(columns)).tolist() == [1.0, *sums]
    assert made.violation(np.ones(columns)) == max(0.0, *(sums - np.arange(rows)))


def test_a_large_block_is_left_between_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is looked at in each of them."""
    monkeypatch.setattr(program, "_PART", 10)
    each = np.arange(1000)
    terms = [Term(each, 0), Term(each, 1)]

    def looks_until(most: float) -> int:
        stop = After(most)
        builder = Builder(stop)
        builder.variables(2)
        builder.add_rows(len(each), terms)
        return stop.polls

    all_of_them = looks_until(float("inf"))
    assert all_of_them > 2 * len(each) / 10
    with pytest.raises(TimeUp):
        looks_until(all_of_them // 2)


def test_a_variable_that_is_not_there_counts_as_0() -> None:
    """Where a mask says so there is none: its entries are left out."""
    builder = Builder()
    x = builder.variables_at(np.array([True, False, True]))
    assert x.tolist() == [0, -1, 1]
    builder.add_implied(x[[0, 2]], x[[1, 0]], x[[2, 1]])
    program = builder.program()
    assert (program.row_start.tolist(), program.row_index.tolist()) == ([0, 2, 4], [0, 1, 0, 1])
    assert (program.row_value.tolist(), program.row_upper.tolist()) == ([1, -1, -1, 1], [0, 0])
