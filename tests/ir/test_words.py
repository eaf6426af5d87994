"""Sizes and times in sentences: three digits, the unit that fits, and what is enough rounded up."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import example, given
from hypothesis import strategies as st

from remat_ir import duration, readable

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def bytes_in(text: str) -> Fraction:
    number, unit = text.split()
    return Fraction(number) * UNITS[unit]


@given(st.integers(0, 2**50))
@example(1023)
@example(1024)
@example(2**20 - 1)
def test_what_is_written_is_near_and_rounded_up_is_enough(size: int) -> None:
    assert abs(bytes_in(readable(size)) - size) <= size / 200
    assert size <= bytes_in(readable(size, up=True)) <= size * Fraction(101, 100)
    assert len(readable(size).split()[0].replace(".", "")) <= 4


def test_times_of_a_kernel_and_of_a_day() -> None:
    assert [duration(ns) for ns in (5, 5_300, 28_000_000, 3_210_999_200, 90_000_000_000)] == [
        *("5 ns", "5.3 µs", "28 ms", "3.211 s", "90 s")
    ]
    assert duration(86_400_000_000_000) == "24 h 0 min"
