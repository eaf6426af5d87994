"""Graphs whose branches meet: they are seen, and the join plan of the homogenized instance is a plan of the graph."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_ir import Graph, Join, Problem, budget_at, graph_of, join_in_bytes, plain_peak, verify
from remat_ir.branches import branches_of
from remat_solver import solve
from remat_solver.join import Homogenized, JoinTable, homogenized_plan


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(2, 5), min_size=2, max_size=3), st.integers(0, 9))
def test_a_join_in_bytes_is_seen_and_its_plans_cost_the_same(lengths: list[int], more: int) -> None:
    join = Join(tuple(lengths), 2, 3, 5, slots=99, slot_bytes=10)
    found = branches_of(join.to_graph())
    assert found is not None
    assert found.lengths == tuple(lengths)
    assert found.homogeneous
    assert found.homogenized(99) == join
    slots = 2 * len(lengths) + 1 + more
    steps = JoinTable(join.lengths, slots).plan(slots)
    assert steps is not None
    own_order = verify(Problem(*_roomy(join_in_bytes(join, steps)[0])), join_in_bytes(join, steps)[1])
    # the graph's own order of backward steps, not the plan's: the same steps, each once, in another order
    assert verify(Problem(*_roomy(found.graph)), found.plan(steps)).cost_ns == own_order.cost_ns


def _roomy(graph: Graph) -> tuple[Graph, int]:
    return graph, 10**9


def varied(lengths: tuple[int, ...], seed: int) -> Graph:
    """The graph of a join whose steps differ in cost and size."""
    draw = random.Random(seed)
    graph = Join(lengths, 10, 20, 5, slots=1, slot_bytes=1).to_graph()
    return replace(
        graph,
        op_cost_ns=tuple(draw.randrange(5, 40) for _ in graph.op_cost_ns),
        value_bytes=tuple(draw.randrange(50, 120) for _ in graph.value_bytes),
    )


@pytest.mark.parametrize("seed", range(4))
def test_heterogeneous_branches_start_from_the_homogenized_join(seed: int) -> None:
    graph = varied((6, 8), seed)
    problem = Problem(graph, budget_at(graph, 0.7))
    taken = Homogenized.apply(graph)
    assert taken is not None
    assert not taken.branches.homogeneous
    plan = homogenized_plan(taken, problem)
    assert plan is not None
    start = verify(problem, plan).cost_ns
    answer = solve(problem, time_limit_s=3)
    assert answer.cost_ns is not None
    assert answer.cost_ns <= start
    assert (
        "Branches of 6, 8 heterogeneous stages meet here: the join plan of the homogenized instance" in answer.message
    )


def test_what_is_no_join() -> None:
    path = graph_of([1] * 4, [1] * 4, [(), (0,), (0, 1), (0, 2)], backward_from=2)
    assert branches_of(path) is None
    assert not Homogenized.accepts(path)
    assert branches_of(graph_of([1] * 3, [1] * 3, [(), (0,), (1,)])) is None
    skip = graph_of([1] * 8, [1] * 8, [(), (0,), (), (2,), (1, 3), (0, 4), (1, 5), (3, 6)], backward_from=6)
    assert branches_of(skip) is None


def test_where_nothing_fits_there_is_no_plan() -> None:
    graph = varied((3, 4), 1)
    taken = Homogenized.apply(graph)
    assert taken is not None
    assert homogenized_plan(taken, Problem(graph, 1)) is None
    assert homogenized_plan(taken, Problem(graph, 2 * plain_peak(graph))) is not None
