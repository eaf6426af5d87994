"""What contradicts what: bounds and plans of one subject under several budgets, from several sources."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from drawn import examples, graphs, problems
from remat_ir import InvalidPlan, Plan, Problem, plain_plan, plan_of, verify
from remat_ir.restrictions import ONE_PER_STAGE
from remat_solver import solve
from remat_solver.contradiction import Evidence
from solver.brute import optimum
from solver.little import little_graph

GRAPH = little_graph(3, 6, rich=False)
PLAIN = plain_plan(GRAPH)
COST, PEAK = verify(Problem(GRAPH, 2**53), PLAIN)


def evidence() -> Evidence:
    """A plan of known cost and peak."""
    found = Evidence(GRAPH)
    found.plan(PLAIN, "plain")
    return found


def test_what_agrees_is_not_refuted() -> None:
    """A bound at the cost, one above it under a budget below the peak, and a restricted one that cannot be compared."""
    found = evidence()
    found.bound(PEAK, COST, (), "a")
    found.bound(PEAK - 1, COST + 1, (), "b")
    found.infeasible(PEAK - 1, (), "c")
    found.needs(PEAK, "d")
    found.bound(PEAK, COST + 1, ("a-space-of-tomorrow",), "e")
    found.known(PEAK, COST, "f")
    assert found.refutations() == ()


def test_a_budget_that_is_enough_and_not_enough() -> None:
    """Two claims without a plan contradict each other."""
    found = Evidence(GRAPH)
    found.known(PEAK - 1, None, "a")
    found.needs(PEAK, "b")
    (refutation,) = found.refutations()
    assert str(refutation) == f"b: no plan within {PEAK - 1} bytes exists; a: a plan needs {PEAK - 1} bytes"


@pytest.mark.parametrize(
    "claim",
    [
        lambda e: e.bound(PEAK, COST + 1, (), "x"),
        lambda e: e.bound(PEAK + 100, COST + 1, (), "x"),
        lambda e: e.bound(PEAK, COST + 1, (ONE_PER_STAGE,), "x"),
        lambda e: e.infeasible(PEAK, (), "x"),
        lambda e: e.infeasible(PEAK, (ONE_PER_STAGE,), "x"),
        lambda e: e.needs(PEAK + 1, "x"),
    ],
)
def test_each_kind_of_claim_is_refuted(claim: object) -> None:
    found = evidence()
    claim(found)
    (refutation,) = found.refutations()
    assert refutation.bound.source == "x"
    instance = refutation.to_json()
    problem = Problem.from_json(instance["problem"])
    assert verify(problem, Plan.from_json(instance["plan"])).cost_ns == COST
    assert instance["bound_ns"] is None or instance["bound_ns"] > COST


def test_a_noted_cost_without_its_plan_refutes_too() -> None:
    found = Evidence(GRAPH)
    found.known(PEAK, COST, "noted")
    found.bound(PEAK, COST + 1, (), "x")
    found.bound(PEAK, COST + 1, (ONE_PER_STAGE,), "its space is not known")
    assert [each.bound.source for each in found.refutations()] == ["x"]


def test_a_wrong_plan_is_refused() -> None:
    with pytest.raises(InvalidPlan):
        Evidence(GRAPH).plan(plan_of(GRAPH, [0, 1]), "wrong")


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(problem=problems(graphs(most_ops=5, most_values=2)))
def test_brute_force_contradicts_no_method(problem: Problem) -> None:
    """The optimum of the whole space, as a plan, next to what three methods say; a bound raised by one is found."""
    best = optimum(problem)
    found = Evidence(problem.subject)
    if best.plan is not None:
        found.plan(best.plan, "brute force")
    for method in ("auto", "lp-rounding", "greedy"):
        found.answer(solve(problem, method=method, max_gap=0, time_limit_s=5), method)
    assert not found.refutations()
    if best.cost_ns is not None:
        found.bound(problem.budget_bytes, best.cost_ns + 1, (), "mutant")
        assert [each.bound.source for each in found.refutations()] == ["mutant"]
