"""Branches that meet in a head: a join of equal steps stands for them, and its plans are plans of their graph."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from drawn import examples
from remat.chains.profile import ProfiledJoin, StageCost
from remat.chains.stages import Stage
from remat.chains.training import branches_by, homogenized
from remat_ir import Join, Problem, join_in_bytes, verify
from remat_solver.join.table import JoinTable


def measured(lengths: list[int]) -> ProfiledJoin:
    """Equal stages, whose tapes take no more than what they give."""
    stages: list[Stage] = []
    ends: list[int] = []
    for branch, length in enumerate(lengths):
        cut = branch
        for _ in range(length):
            stages.append(Stage(nn.Identity(), (cut,), len(lengths) + len(stages)))
            cut = stages[-1].makes
        ends.append(cut)
    stages.append(Stage(nn.Identity(), tuple(ends), len(lengths) + len(stages)))
    costs = [StageCost(2, 3, 0, 0, 0, 10, 10, (10,) * len(stage.reads), False) for stage in stages]
    inputs = (10,) * len(lengths)
    return ProfiledJoin(tuple(stages), tuple(costs), tuple(lengths), inputs, (0,) * len(stages))


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.lists(st.integers(2, 5), min_size=2, max_size=3), st.integers(0, 9))
def test_plans_of_the_join_of_equal_steps_are_plans_of_the_graph(lengths: list[int], more: int) -> None:
    profiled = measured(lengths)
    join = homogenized(profiled, 99)
    assert join == Join(tuple(lengths), 2, 5, 5, slots=99, slot_bytes=10)
    slots = 2 * len(lengths) + 1 + more
    steps = JoinTable(join.lengths, slots).plan(slots)
    assert steps is not None
    order, graph, plan = branches_by(profiled, steps)
    assert sorted(order) == [j for j, length in enumerate(lengths) for _ in range(length)]
    in_bytes, of_join = join_in_bytes(join, steps)
    # a forward step that stands right before its backward step anyway runs once
    assert verify(Problem(graph, 10**9), plan).cost_ns <= verify(Problem(in_bytes, 10**9), of_join).cost_ns
