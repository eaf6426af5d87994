"""General methods on chains, through the lift: what they find and prove there holds for the chain."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chains import chains, counter_example
from drawn import examples, sequences
from remat_ir import (
    Chain,
    ChainPlan,
    InvalidData,
    Join,
    Problem,
    Status,
    plain_chain_plan,
    plain_peak,
    plan_of,
    verify,
    verify_answer,
)
from remat_solver import solve
from remat_solver.bounds import least_need
from remat_solver.chain.table import Least
from remat_solver.deadline import Deadline
from remat_solver.incumbent import Incumbent
from remat_solver.lift import Lift, LiftedIncumbent
from solver.chain_brute import best_cost

SETTINGS = settings(max_examples=examples(60), deadline=None, derandomize=True)


@pytest.mark.parametrize("n", [4, 6, 8])
def test_beyond_persistence(n: int) -> None:
    """After RR-9302, Figure 2: a general program finds 2n + 2 where no persistent plan is below 3n − 1."""
    chain = counter_example(n)
    answer = solve(Problem(chain, 8), method="milp-tight", max_gap=0, time_limit_s=60)
    assert answer.status is Status.OPTIMAL
    assert answer.cost_ns == 2 * n + 2 == answer.bound_ns
    assert isinstance(answer.plan, ChainPlan)


@pytest.mark.thorough
@pytest.mark.parametrize("n", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 6, 7, 8))])
def test_auto_proves_what_lies_beyond_persistence(n: int) -> None:
    """The same optimum, proved over the whole space, from the persistent incumbent on."""
    seen: list[tuple[str, int | None]] = []
    answer = solve(
        Problem(counter_example(n), 8),
        method="auto",
        max_gap=0,
        time_limit_s=240,
        on_progress=lambda progress: seen.append((progress.source, progress.cost_ns)),
    )
    assert ("rotor", 3 * n - 1) in seen
    assert answer.status is Status.OPTIMAL
    assert answer.cost_ns == 2 * n + 2 == answer.bound_ns
    assert answer.restricted_to == ()


@pytest.mark.thorough
@settings(max_examples=examples(8), deadline=None, derandomize=True)
@given(chains(most_stages=4))
def test_a_general_program_on_the_lift(chain: Chain) -> None:
    budget = (2 * plain_peak(chain) + chain.fixed_bytes) // 3
    answer = solve(Problem(chain, budget), method="milp-tight", max_gap=0, time_limit_s=30)
    persistent, best = best_cost(chain, budget), best_cost(chain, budget, persistent=False)
    if answer.cost_ns is not None:
        assert answer.cost_ns >= best
        assert answer.bound_ns is not None
    if persistent is not None and answer.status is Status.OPTIMAL:
        assert answer.cost_ns == best


@pytest.mark.thorough
@settings(max_examples=examples(6), deadline=None, derandomize=True)
@given(chains(most_stages=4))
def test_auto_on_a_chain_is_never_worse_than_persistent(chain: Chain) -> None:
    budget = (plain_peak(chain) + chain.fixed_bytes) // 2
    problem = Problem(chain, budget)
    answer = solve(problem, method="auto", max_gap=0, time_limit_s=4)
    persistent, best = best_cost(chain, budget), best_cost(chain, budget, persistent=False)
    if persistent is not None:
        assert best <= answer.cost_ns <= persistent
        assert answer.bound_ns <= best
    if answer.plan is not None:
        assert verify(problem, answer.plan).cost_ns == answer.cost_ns
    if answer.status is Status.INFEASIBLE:
        assert best is None


@SETTINGS
@given(chain=chains(most_stages=6), data=st.data())
def test_plans_of_the_lift_are_plans_of_the_chain(chain: Chain, data: st.DataObject) -> None:
    taken, roomy = Lift.apply(chain), 2**50
    graph = taken.graph
    plan = plan_of(graph, data.draw(sequences(graph)))
    there, here = verify(Problem(graph, roomy), plan), verify(Problem(chain, roomy), taken.invert(plan))
    assert here.cost_ns <= there.cost_ns
    assert here.peak_bytes <= there.peak_bytes
    plain = taken.lift(plain_chain_plan(chain))
    assert verify(Problem(graph, roomy), plain) == verify(Problem(chain, roomy), plain_chain_plan(chain))


@SETTINGS
@given(chains(most_stages=4, link=True))
def test_a_bound_of_the_lift_is_none_where_there_is_a_link(chain: Chain) -> None:
    """Plans without transfers may all cost more than one with them: their bound names the restriction."""
    answer = solve(Problem(chain, plain_peak(chain)), method="checkpoint-all", max_gap=0)
    assert answer.status is Status.OPTIMAL
    assert answer.cost_ns == chain.total_cost_ns


def test_graph_methods_take_no_join() -> None:
    with pytest.raises(InvalidData, match="method 'greedy' takes no join; it takes: graph"):
        solve(Problem(Join((2, 2), 1, 1, 1, 9), 9), method="greedy")


def test_a_cancel_reaches_what_works_on_the_lift() -> None:
    """Greedy walks and parts of a solve ask whether it was interrupted; what ends with a spare plan asks by what."""
    lifted = LiftedIncumbent(Incumbent(Problem(counter_example(4), 8), Deadline(None), cancelled=lambda: True))
    assert lifted.interrupted()
    assert lifted.stopped()
    assert lifted.limit == "cancel"


def test_an_answer_says_what_a_method_said_on_the_lift() -> None:
    problem = Problem(counter_example(4), 8)
    answer = solve(problem, method="milp-order", options={"most_ops": 5}, time_limit_s=10)
    assert "milp-order takes graphs of up to 5 ops (option most_ops), not 13." in answer.message
    outer = Incumbent(problem, Deadline(None))
    LiftedIncumbent(outer).note("A sentence.")
    assert outer.answer("milp").message.endswith("A sentence.")
    LiftedIncumbent(outer, plans_only=True).note("Of a part.")
    assert "Of a part." not in outer.answer("milp").message


def small_chain(draw: random.Random, stages: int) -> Chain:
    def column(length: int) -> tuple[int, ...]:
        return tuple(draw.randint(0, 6) for _ in range(length))

    activation = column(stages + 1)
    forward, backward, ahead, behind = (column(stages) for _ in range(4))
    tape = tuple(size + draw.randint(0, 6) for size in activation[1:])
    return Chain(forward, backward, ahead, behind, tape, activation, column(stages + 1))


def below_persistence() -> tuple[Chain, int]:
    """A chain and a budget within which only a schedule that is not persistent fits."""
    for seed in range(1000):
        draw = random.Random(seed)
        chain = small_chain(draw, draw.randint(3, 5))
        budget = Least(chain).budget_bytes - 1
        if least_need(chain)[0] <= budget and best_cost(chain, budget, persistent=False) is not None:
            return chain, budget
    raise AssertionError("no such chain among the first thousand")


@pytest.mark.thorough
def test_auto_below_the_least_persistent_budget() -> None:
    chain, budget = below_persistence()
    persistent = solve(Problem(chain, budget), method="rotor")
    assert persistent.status is Status.NOTHING_FOUND
    assert persistent.least_budget_bytes == Least(chain).budget_bytes
    assert f"the least budget for one is {Least(chain).budget_bytes} B" in persistent.message
    answer = solve(Problem(chain, budget), method="auto", max_gap=0, time_limit_s=30)
    assert answer.cost_ns == best_cost(chain, budget, persistent=False)
    least = budget
    while best_cost(chain, least - 1, persistent=False) is not None:
        least -= 1
    if least_need(chain)[0] < least:
        answer = solve(Problem(chain, least - 1), method="auto", max_gap=0)
        assert answer.status is Status.INFEASIBLE


@pytest.mark.thorough
def test_auto_proves_that_nothing_fits_between_the_working_set_and_the_least_schedule() -> None:
    shown = 0
    for seed in range(200):
        chain = small_chain(random.Random(seed), 4)
        budget = least_need(chain)[0]
        if best_cost(chain, budget, persistent=False) is None:
            answer = solve(Problem(chain, budget), method="auto", max_gap=0)
            assert answer.status is Status.INFEASIBLE
            assert answer.least_budget_bytes <= Least(chain).budget_bytes
            assert budget < answer.least_budget_bound_bytes <= answer.least_budget_bytes
            assert verify_answer(Problem(chain, budget), answer).infeasible
            shown += 1
    assert shown > 3
