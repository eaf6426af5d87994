"""The greedy plan is valid in the whole model, and there wherever memory is not tight."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples, graphs, posed
from remat_ir import Graph, Problem, Status, budget_at, graph_of, plain_peak, plain_plan, verify
from remat_ir.graph import working_set
from remat_ir.greedy import greedy_plan, greedy_plans, least_memory, peak_of
from remat_solver import solve
from remat_solver.deadline import Deadline
from remat_solver.incumbent import Incumbent
from remat_solver.methods.heuristics import GreedyOptions, run_greedy
from solver.stops import After


@settings(deadline=None, derandomize=True, max_examples=examples(80))
@given(graphs(most_ops=20), st.integers(0, 20))
def test_every_greedy_plan_passes_the_judge(graph: Graph, twentieths: int) -> None:
    least, plain = working_set(graph).least_bytes, plain_peak(graph)
    budget = least + twentieths * (plain - least) // 20
    plan = greedy_plan(graph, budget)
    if plan is not None:
        assert verify(Problem(graph, budget), plan).cost_ns >= graph.total_cost_ns


@settings(deadline=None, derandomize=True, max_examples=examples(40))
@given(graphs(most_ops=14))
def test_the_least_memory_plan_lies_between_its_bound_and_the_plain_peak(graph: Graph) -> None:
    peak = peak_of(graph, least_memory(graph))
    assert working_set(graph).least_bytes <= peak <= plain_peak(graph)


def test_a_budget_that_holds_everything_gets_the_plain_plan() -> None:
    graph = graph_of([1, 2, 3], [4, 5, 6], [[], [0], [0, 1]])
    assert greedy_plan(graph, plain_peak(graph)) == plain_plan(graph)


def test_a_chain_is_trained_in_half_its_memory() -> None:
    """Forward 0 … 19, backward 20 … 39: op 20+k reads the activation 19−k and the gradient before it."""
    answer = solve(posed(_chain(20), 0.5), method="greedy")
    assert answer.status is Status.FEASIBLE
    assert answer.overhead < 0.3  # one further forward pass would be 0.5


def test_a_value_of_a_pinned_op_is_never_made_again() -> None:
    """The loss reads a `once` value late: the only relief is the unpinned value next to it."""
    graph = graph_of([1, 1, 1, 1, 1], [4, 4, 8, 1, 1], [[], [], [], [1], [0, 3]], once=(0,))
    plan = greedy_plan(graph, 12)
    assert plan.computes.count(0) == 1
    assert verify(Problem(graph, 12), plan).peak_bytes <= 12


def test_at_the_working_set_of_a_chain_there_is_a_plan() -> None:
    inputs = [[]] + [[i - 1] for i in range(1, 8)] + [[7]] + [[7 + k, 7 - k] for k in range(1, 8)]
    graph = graph_of([1] * 16, [10] * 16, inputs)
    plan = least_memory(graph)
    assert peak_of(graph, plan) <= working_set(graph).least_bytes + 10


def _chain(half: int) -> Graph:
    inputs = (
        [[]] + [[i - 1] for i in range(1, half)] + [[half - 1]] + [[half - 1 + k, half - 1 - k] for k in range(1, half)]
    )
    return graph_of([10] * 2 * half, [100] * 2 * half, inputs, backward_from=half)


def test_the_first_walk_stops_where_it_is_told_to() -> None:
    """It looks in every walk and while it prunes; after the first look that says stop, the rest is a few looks."""
    graph = _chain(1_000)
    budget = budget_at(graph, 0.2)
    whole = After()
    assert list(greedy_plans(graph, budget, stop=whole))
    assert whole.polls > 3 * graph.ops // 64
    for most in (0, 1, 5, 20, whole.polls - 1):
        stop = After(most)
        plans = list(greedy_plans(graph, budget, stop=stop))
        assert stop.polls <= most + 3
        assert bool(plans) == (most > graph.ops // 64)
        assert all(verify(Problem(graph, budget), plan).peak_bytes <= budget for plan in plans)
    assert list(greedy_plans(graph, budget, stop=After(0), patient=True))


def test_a_cancelled_solve_leaves_the_first_walk() -> None:
    graph = _chain(1_000)
    cancelled = After(3)
    incumbent = Incumbent(Problem(graph, budget_at(graph, 0.2)), Deadline(None), cancelled=cancelled)
    run_greedy(incumbent, GreedyOptions())
    assert incumbent.plan is None
    assert cancelled.polls <= 3 + 4
    assert incumbent.stopped()
    assert incumbent.answer("greedy").limit == "cancel"


def test_the_plain_peak_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solve asks several times; with other fixed bytes it follows them."""
    graph = _chain(10)
    peak = plain_peak(graph)
    monkeypatch.setattr("remat_ir.problem.replay_any", None)
    assert plain_peak(graph) == peak
    assert plain_peak(graph.with_fixed(7)) == peak + 7 - graph.fixed_bytes
