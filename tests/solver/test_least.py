"""The least budget, from above by plans and from below by certificates, and by what pairs of values need."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from benchmarks.graphs.instances import instance
from hypothesis import given, settings

from drawn import examples, graphs
from remat_ir import Answer, Graph, Problem, Status, plain_peak, verify, verify_answer
from remat_ir.working_set import working_set
from remat_solver import solve
from remat_solver.bounds import pair_need
from remat_solver.methods.least import least_budget
from solver.brute import optimum
from solver.little import little_graph


def _brute(problem: Problem, seconds: float, cancelled: Callable[[], bool]) -> Answer:
    """A prover that knows: Dijkstra over sets of resident values."""
    best = optimum(problem)
    status = Status.INFEASIBLE if best.plan is None else Status.FEASIBLE
    return Answer(status, "brute", problem.budget_bytes, plan=best.plan)


@settings(deadline=None, derandomize=True, max_examples=examples(12))
@given(graphs(most_ops=6))
def test_with_an_exact_prover_both_sides_meet_at_the_least_budget(graph: Graph) -> None:
    answer = least_budget(graph, time_limit_s=60, prover=_brute)
    assert answer.least_budget_bytes == answer.least_budget_bound_bytes == answer.budget_bytes == answer.peak_bytes
    verify(Problem(graph, answer.budget_bytes), answer.plan)
    if answer.budget_bytes > 0:
        assert optimum(Problem(graph, answer.budget_bytes - 1)).plan is None


def test_without_a_prover_the_working_set_bounds_it() -> None:
    graph = instance("gpt-4-whole")
    answer = least_budget(graph, time_limit_s=20, prover=None)
    assert answer.least_budget_bound_bytes == working_set(graph).least_bytes
    assert answer.least_budget_bytes < 0.7 * plain_peak(graph)
    assert answer.least_budget_bytes <= 1.05 * working_set(graph).least_bytes


@pytest.mark.slow
def test_with_the_staged_prover_bounds_hold() -> None:
    graph = instance("dag-100")
    answer = least_budget(graph, time_limit_s=10)
    low, high = answer.least_budget_bound_bytes, answer.least_budget_bytes
    assert working_set(graph).least_bytes <= low <= high
    assert solve(Problem(graph, high), method="search", start=answer.plan, time_limit_s=1).plan is not None


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [25, 42, 56])
def test_as_a_method_it_finds_the_least_budget_of_brute_force(seed: int) -> None:
    """Of whatever budget the problem has: too small, just enough, plenty. The two sides of seed 42 never meet, so that
    each of its solves takes all of its time.
    """
    graph = little_graph(seed, 7)
    least = working_set(graph).least_bytes
    while optimum(Problem(graph, least)).plan is None:
        least += 1
    for budget in (0, least - 1, least, 10 * plain_peak(graph)):
        problem = Problem(graph, budget)
        answer = solve(problem, method="least-budget", time_limit_s=5)
        verdict = verify_answer(problem, answer)
        assert (answer.plan is not None) == (budget >= least)
        assert answer.least_budget_bytes == least
        assert answer.least_budget_bound_bytes == verdict.least_budget_bytes <= least


# --- pairs of values


@settings(deadline=None, derandomize=True, max_examples=examples(100))
@given(graphs(most_ops=6))
def test_below_what_pairs_need_brute_force_finds_no_plan(graph: Graph) -> None:
    _holds(graph)


def _holds(graph: Graph) -> tuple[bool, bool]:
    """Whether the bound by pairs is above the working set, and whether it is the least budget."""
    least = pair_need(graph).least_bytes
    assert working_set(graph).least_bytes <= least <= plain_peak(graph)
    if least == working_set(graph).least_bytes:
        return False, False
    assert optimum(Problem(graph, least - 1)).plan is None
    return True, optimum(Problem(graph, least)).plan is not None


def test_on_little_training_steps_what_pairs_need_is_mostly_the_least_budget() -> None:
    found = [_holds(little_graph(seed, 6)) for seed in range(80)]
    assert sum(higher for higher, _ in found) >= 10
    assert sum(least for _, least in found) >= 0.8 * sum(higher for higher, _ in found)


def test_a_budget_above_every_working_set_is_proved_too_small() -> None:
    graph = instance("resnet-4-whole")
    budget = working_set(graph).least_bytes * 6 // 5
    for method in ("auto", "staged"):
        answer = solve(Problem(graph, budget), method=method, time_limit_s=20)
        assert answer.status is Status.INFEASIBLE
        assert not answer.restricted_to
        assert budget < answer.least_budget_bound_bytes <= answer.least_budget_bytes


@pytest.mark.slow
def test_both_sides_meet_on_a_residual_network() -> None:
    answer = least_budget(instance("resnet-4-whole"), time_limit_s=20)
    assert answer.least_budget_bytes == answer.least_budget_bound_bytes
    assert answer.limit is None
