"""An answer made from a plan: verified, and what it says follows from the plan and the bound."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples, problems, sequences
from remat_ir import (
    Answer,
    Compute,
    InvalidData,
    InvalidPlan,
    Plan,
    Problem,
    Status,
    graph_of,
    plain_peak,
    plain_plan,
    plan_of,
    problem_digest,
    readable,
    verify,
)

GRAPH = graph_of([1, 2, 3], [4, 5, 6], [[], [0], [0, 1]])
AGAIN = plan_of(GRAPH, [0, 1, 0, 2])


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.data())
def test_what_it_says_follows_from_the_plan_and_the_bound(data: st.DataObject) -> None:
    graph = data.draw(problems()).graph
    plan = plan_of(graph, data.draw(sequences(graph)))
    problem = Problem(graph, verify(Problem(graph, 2**40), plan).peak_bytes)
    cost, peak = verify(problem, plan)
    bound = data.draw(st.one_of(st.none(), st.integers(0, cost)))
    made = Answer.of_plan(problem, plan, method="auto", bound_ns=bound)
    total = sum(graph.op_cost_ns)
    known = total if bound is None else bound
    assert (made.plan, made.cost_ns, made.peak_bytes, made.bound_ns) == (plan, cost, peak, known)
    assert (made.budget_bytes, made.digest) == (problem.budget_bytes, problem_digest(problem))
    assert made.status is (Status.OPTIMAL if known == cost else Status.FEASIBLE)
    assert made.gap == (pytest.approx(float(Fraction(cost - known, cost))) if cost else 0)
    assert made.overhead == (pytest.approx(float(Fraction(cost, total) - 1)) if total else 0)
    assert Answer.from_json(made.to_json()) == made


def test_a_wrong_plan_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="op 1 is first computed before op 0"):
        Answer.of_plan(Problem(GRAPH, 15), Plan((Compute(1), Compute(0), Compute(2))), method="auto")


def test_a_plan_over_the_budget_is_refused() -> None:
    budget = plain_peak(GRAPH) - 1
    with pytest.raises(InvalidPlan, match=f"over the budget of {readable(budget)}"):
        Answer.of_plan(Problem(GRAPH, budget), plain_plan(GRAPH), method="auto")


def test_a_bound_above_the_cost_is_refused() -> None:
    with pytest.raises(InvalidData, match="the bound of 8 ns is above the cost of the plan, 7 ns"):
        Answer.of_plan(Problem(GRAPH, 15), AGAIN, method="auto", bound_ns=8)


def test_a_bound_keeps_the_name_of_its_space() -> None:
    made = Answer.of_plan(Problem(GRAPH, 15), AGAIN, method="auto", bound_ns=6, restricted_to=("stages",), seconds=1.5)
    assert (made.status, made.restricted_to, made.seconds) == (Status.FEASIBLE, ("stages",), 1.5)


def test_without_a_cost_there_is_no_overhead_and_no_gap() -> None:
    nothing = Answer(Status.NOTHING_FOUND, "auto", 15).priced(6, None, 6, None)
    assert (nothing.cost_ns, nothing.bound_ns, nothing.overhead, nothing.gap) == (None, 6, None, None)
