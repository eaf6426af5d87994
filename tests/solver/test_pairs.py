"""The bound by pairs of values holds in the whole space, and settles budgets that single ops do not."""

from __future__ import annotations

import pytest
from benchmarks.graphs.instances import instance
from hypothesis import given, settings

from drawn import examples, graphs
from remat_ir import Graph, Problem, Status, plain_peak
from remat_ir.working_set import working_set
from remat_solver import solve
from remat_solver.bounds import pair_need
from remat_solver.methods.least import least_budget
from solver.brute import optimum
from solver.little import little_graph


@settings(deadline=None, derandomize=True, max_examples=examples(100))
@given(graphs(most_ops=6))
def test_below_it_brute_force_finds_no_plan(graph: Graph) -> None:
    _holds(graph)


def _holds(graph: Graph) -> tuple[bool, bool]:
    """Whether the bound is above the working set, and whether it is the least budget."""
    least = pair_need(graph).least_bytes
    assert working_set(graph).least_bytes <= least <= plain_peak(graph)
    if least == working_set(graph).least_bytes:
        return False, False
    assert optimum(Problem(graph, least - 1)).plan is None
    return True, optimum(Problem(graph, least)).plan is not None


def test_on_little_training_steps_it_is_mostly_the_least_budget() -> None:
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
        assert answer.least_budget_bound_bytes is not None
        assert answer.least_budget_bytes is not None
        assert budget < answer.least_budget_bound_bytes <= answer.least_budget_bytes


@pytest.mark.slow
def test_both_sides_meet_on_a_residual_network() -> None:
    answer = least_budget(instance("resnet-4-whole"), time_limit_s=20)
    assert answer.least_budget_bytes == answer.least_budget_bound_bytes
    assert answer.limit is None
