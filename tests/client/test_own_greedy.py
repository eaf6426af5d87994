"""The client's own greedy plan: always valid, never above the budget, and never says infeasible of what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.graphs.instances import instance
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples, graphs
from remat.planning.greedy import greedy_answer
from remat_ir import Graph, Problem, Status, budget_at, plain_peak, plain_plan, plan_of, replay, verify
from remat_ir.graph import working_set
from remat_ir.greedy import WEIGHTS, checkpointed, least_memory, walk, without_needless


@given(graphs(most_ops=12), st.integers(0, 100))
@settings(max_examples=examples(120), deadline=None, derandomize=True)
def test_what_is_planned_is_valid_and_within_the_budget(graph: Graph, percent: int) -> None:
    floor, plain = working_set(graph).least_bytes, plain_peak(graph)
    problem = Problem(graph, floor + (plain - floor) * percent // 100)
    answer = greedy_answer(problem)
    assert answer.status is not Status.INFEASIBLE
    assert answer.least_budget_bytes is not None
    if answer.plan is None:
        assert answer.status is Status.NOTHING_FOUND
        assert problem.budget_bytes < answer.least_budget_bytes <= plain
        return
    verdict = verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
    assert (answer.status is Status.OPTIMAL) == (verdict.cost_ns == graph.total_cost_ns)


@given(graphs(most_ops=12), st.integers(0, 12))
@settings(max_examples=examples(120), deadline=None, derandomize=True)
def test_a_forward_pass_can_be_computed_once_more(graph: Graph, turn: int) -> None:
    """A valid plan wherever the backward pass begins."""
    graph = replace(graph, backward_from=turn if turn < graph.ops and graph.backward_from is None else None)
    plan = checkpointed(graph)
    assert list(replay(graph, plan))[-1].cost_ns <= 2 * graph.total_cost_ns
    if graph.backward_from is None:
        assert plan == plain_plan(graph)


@given(graphs(most_ops=12))
@settings(max_examples=examples(80), deadline=None, derandomize=True)
def test_its_floor_is_a_lower_bound(graph: Graph) -> None:
    floor = working_set(graph).least_bytes
    least = greedy_answer(Problem(graph, floor)).least_budget_bytes
    assert least >= floor
    assert max(moment.peak_bytes for moment in replay(graph, least_memory(graph))) >= floor
    if floor > graph.fixed_bytes:
        assert greedy_answer(Problem(graph, floor - 1)).status is Status.INFEASIBLE


@given(graphs(most_ops=10, whole=True), st.sampled_from(WEIGHTS), st.integers(0, 100))
@settings(max_examples=examples(120), deadline=None, derandomize=True)
def test_a_walk_that_comes_through_stays_inside_its_limit(graph: Graph, weight: float, percent: int) -> None:
    floor, plain = working_set(graph).least_bytes, plain_peak(graph)
    limit = floor + (plain - floor) * percent // 100
    sequence = walk(graph, limit, weight)
    if sequence is None:
        return
    walked = verify(Problem(graph, limit), plan_of(graph, sequence))
    pruned = verify(Problem(graph, limit), plan_of(graph, without_needless(graph, sequence, limit)))
    assert pruned.cost_ns <= walked.cost_ns


@pytest.mark.parametrize(
    ("name", "fraction", "most"),
    [("vgg-13", 0.7, 10), ("gpt-12-whole", 0.5, 15), ("unet-4", 0.5, 15), ("resnet-50-whole", 0.5, 12)],
)
def test_on_training_graphs_it_costs_little(name: str, fraction: float, most: float) -> None:
    graph = instance(name)
    # a limit that no machine reaches: which walks were made must not depend on how busy it is
    answer = greedy_answer(Problem(graph, budget_at(graph, fraction)), time_limit_s=250)
    assert 0 < 100 * answer.overhead < most


def test_equal_problems_have_equal_plans() -> None:
    graph = instance("gpt-4-whole")
    problem = Problem(graph, budget_at(graph, 0.6))
    assert greedy_answer(problem).plan == greedy_answer(problem).plan


@pytest.mark.slow
def test_five_thousand_ops_have_a_plan() -> None:
    graph = instance("gpt-170")
    assert graph.ops > 5_000
    assert greedy_answer(Problem(graph, budget_at(graph, 0.5))).plan is not None
