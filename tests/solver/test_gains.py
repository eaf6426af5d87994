"""Where the next cut goes: what is tried, and that the best of it is taken."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from remat_solver.deadline import never
from remat_solver.staged.refinement import Gains

tables = st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=300)


class Tried:
    """A table of gains that notes what is asked of it."""

    def __init__(self, gains: list[float]) -> None:
        self.gains = gains
        self.ops: list[int] = []

    def __call__(self, op: int) -> float:
        self.ops.append(op)
        return self.gains[op]


@settings(deadline=None)
@given(tables, st.data())
def test_the_best_of_what_was_tried_is_found_and_nothing_twice(table: list[float], data: st.DataObject) -> None:
    cuts = data.draw(st.sets(st.integers(0, len(table) - 1), max_size=10))
    gains, tried = Gains(0, len(table) - 1), Tried(table)
    found = gains.best(cuts, tried, never)
    assert len(set(tried.ops)) == len(tried.ops)
    assert not cuts.intersection(tried.ops)
    assert (found is None) == (not tried.ops)
    if found is not None:
        assert found.op in tried.ops
        assert found.raised == max(table[op] for op in tried.ops)


@settings(deadline=None)
@given(tables, st.data())
def test_gains_that_only_fall_are_chosen_as_if_all_known_ones_were_tried_again(
    table: list[float], data: st.DataObject
) -> None:
    gains, tried, cuts = Gains(0, len(table) - 1), Tried(table), set[int]()
    for _ in range(data.draw(st.integers(1, 6))):
        found = gains.best(cuts, tried, never)
        if found is None:
            return
        seen = {op for op in tried.ops if op not in cuts}
        assert found.raised == max(tried.gains[op] for op in seen)
        cuts.add(found.op)
        share = data.draw(st.floats(0.1, 1.0))
        # all fall alike: then the order stays, and one renewed gain is enough
        tried.gains = [gain * share for gain in tried.gains]


def test_a_slope_is_followed_to_its_top_from_the_grid() -> None:
    for top in range(0, 1000, 37):
        tried = Tried([1000.0 - abs(op - top) for op in range(1001)])
        found = Gains(0, 1000).best([], tried, never)
        assert found.op == top
        assert len(tried.ops) < 80


def test_nothing_is_tried_once_it_is_over() -> None:
    tried = Tried([1.0] * 50)
    assert Gains(0, 49).best([], tried, lambda: True) is None
    assert not tried.ops
