"""Auto: checkpoint-all where it fits, a verified plan and a true bound elsewhere."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import graphs
from remat_ir import Graph, Problem, Status, plain_peak, verify
from remat_solver import solve
from remat_solver.bounds import working_set


@settings(deadline=None, derandomize=True, max_examples=60)
@given(graphs(most_ops=12))
def test_a_budget_for_everything_is_settled_at_once(graph: Graph) -> None:
    answer = solve(Problem(graph, plain_peak(graph)))
    assert answer.status is Status.OPTIMAL
    assert answer.cost_ns == graph.total_cost_ns


@settings(deadline=None, derandomize=True, max_examples=25)
@given(graphs(most_ops=10), st.integers(0, 10))
def test_answers_are_verified_plans_above_true_bounds(graph: Graph, tenths: int) -> None:
    least, plain = working_set(graph).least_bytes, plain_peak(graph)
    problem = Problem(graph, least + tenths * (plain - least) // 10)
    answer = solve(problem, time_limit_s=3)
    if answer.plan is not None:
        assert answer.bound_ns is not None
        verdict = verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
        assert answer.bound_ns <= verdict.cost_ns
