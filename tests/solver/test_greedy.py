"""The greedy plan is valid in the whole model, and there wherever memory is not tight."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import graphs
from remat_ir import Graph, Problem, Status, budget_at, graph_of, plain_peak, plain_plan, verify
from remat_ir.greedy import greedy_plan, least_memory, peak_of
from remat_ir.working_set import working_set
from remat_solver import solve


@settings(deadline=None, derandomize=True, max_examples=80)
@given(graphs(most_ops=20), st.integers(0, 20))
def test_every_greedy_plan_passes_the_judge(graph: Graph, twentieths: int) -> None:
    least, plain = working_set(graph).least_bytes, plain_peak(graph)
    budget = least + twentieths * (plain - least) // 20
    plan = greedy_plan(graph, budget)
    if plan is not None:
        assert verify(Problem(graph, budget), plan).cost_ns >= graph.total_cost_ns


@settings(deadline=None, derandomize=True, max_examples=40)
@given(graphs(most_ops=14))
def test_the_least_memory_plan_lies_between_its_bound_and_the_plain_peak(graph: Graph) -> None:
    peak = peak_of(graph, least_memory(graph))
    assert working_set(graph).least_bytes <= peak <= plain_peak(graph)


def test_a_budget_that_holds_everything_gets_the_plain_plan() -> None:
    graph = graph_of([1, 2, 3], [4, 5, 6], [[], [0], [0, 1]])
    assert greedy_plan(graph, plain_peak(graph)) == plain_plan(graph)


def test_a_chain_is_trained_in_half_its_memory() -> None:
    """Forward 0 … 19, backward 20 … 39: op 20+k reads the activation 19−k and the gradient before it."""
    inputs = [[]] + [[i - 1] for i in range(1, 20)] + [[19]] + [[19 + k, 19 - k] for k in range(1, 20)]
    graph = graph_of([10] * 40, [100] * 40, inputs, backward_from=20)
    problem = Problem(graph, budget_at(graph, 0.5))
    answer = solve(problem, method="greedy")
    assert answer.status is Status.FEASIBLE
    assert answer.overhead is not None
    assert answer.overhead < 0.3  # one further forward pass would be 0.5


def test_a_value_of_a_pinned_op_is_never_made_again() -> None:
    """The loss reads a `once` value late: the only relief is the unpinned value next to it."""
    graph = graph_of([1, 1, 1, 1, 1], [4, 4, 8, 1, 1], [[], [], [], [1], [0, 3]], once=(0,))
    plan = greedy_plan(graph, 12)
    assert plan is not None
    assert plan.computes.count(0) == 1
    assert verify(Problem(graph, 12), plan).peak_bytes <= 12


def test_at_the_working_set_of_a_chain_there_is_a_plan() -> None:
    inputs = [[]] + [[i - 1] for i in range(1, 8)] + [[7]] + [[7 + k, 7 - k] for k in range(1, 8)]
    graph = graph_of([1] * 16, [10] * 16, inputs)
    plan = least_memory(graph)
    assert peak_of(graph, plan) <= working_set(graph).least_bytes + 10
