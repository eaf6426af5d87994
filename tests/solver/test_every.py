"""Every plan of tiny graphs: as by brute force, with a link and without; `auto` finds what its search has not."""

from __future__ import annotations

import random

import pytest

from remat_ir import Graph, Link, Plan, Problem, Status, plain_peak, verify
from remat_ir.graph import working_set
from remat_solver import solve
from remat_solver.deadline import Deadline, never
from remat_solver.incumbent import Incumbent
from remat_solver.search.every import cheapest, try_every_plan
from solver.brute import ONE_PER_STAGE, optimum
from solver.little import little_problems
from solver.transfer_brute import least_makespan
from tiers import first

OUT_OF_ORDER = Problem(
    Graph(
        op_cost_ns=(2, 1, 3, 9, 0, 5, 9, 5),
        op_inputs=((), (0,), (0, 1), (1, 2), (1,), (0, 1), (0, 2, 3), (1, 2, 4)),
        value_op=tuple(range(8)),
        value_bytes=(5, 5, 3, 5, 3, 0, 1, 3),
        op_workspace_bytes=(2, 1, 2, 2, 0, 1, 2, 0),
        keep=(4,),
    ),
    20,
)
"""Its best plan, of 46 ns, computes ops again within one stage that are not in the order of their indices."""


@pytest.mark.parametrize("seed", first(3, range(40)))
def test_it_is_the_optimum(seed: int) -> None:
    for problem in little_problems(seed, 6, budgets=4):
        found, best = cheapest(problem, lambda: None, never, 10**6), optimum(problem)
        assert found.complete
        assert found.cost_ns == best.cost_ns
        if found.plan is not None:
            assert verify(problem, found.plan).cost_ns == found.cost_ns


@pytest.mark.parametrize("link", [Link(10**9, 10**9), Link(2 * 10**9, 5 * 10**8, 1, 8), Link(10**10, 10**10)])
@pytest.mark.parametrize("seed", first(1, (0, 6, 13, 25)))
def test_with_a_link_it_is_the_least_makespan(seed: int, link: Link) -> None:
    for alone in little_problems(seed, 5, rich=False, budgets=2):
        problem = Problem(alone.graph.with_link(link), alone.budget_bytes)
        found, (best, _) = cheapest(problem, lambda: None, never, 10**6), least_makespan(problem)
        assert found.complete
        assert found.cost_ns == best
        assert verify(problem, found.plan).cost_ns == best


def test_what_does_not_cost_less_is_not_looked_at() -> None:
    found = cheapest(OUT_OF_ORDER, lambda: 46, never)
    assert found.complete
    assert found.plan is None
    assert cheapest(OUT_OF_ORDER, lambda: 47, never).cost_ns == 46


def test_too_many_states_prove_nothing() -> None:
    incumbent = Incumbent(OUT_OF_ORDER, Deadline(None))
    assert not cheapest(OUT_OF_ORDER, lambda: None, never, most_states=50).complete
    assert not cheapest(OUT_OF_ORDER, lambda: None, lambda: True).complete
    try_every_plan(incumbent)
    assert (incumbent.cost_ns, incumbent.bound_ns) == (46, 46)


@pytest.mark.thorough
def test_auto_finds_a_plan_out_of_the_order_of_a_stage() -> None:
    answer = solve(OUT_OF_ORDER, time_limit_s=20, max_gap=0.0)
    assert answer.status is Status.OPTIMAL
    assert (answer.cost_ns, answer.bound_ns) == (46, 46)
    assert isinstance(answer.plan, Plan)


def irregular(seed: int) -> Problem:
    """Five to nine ops that read any before them, some once, some kept, at a budget that may be too small."""
    draw = random.Random(seed)
    ops = draw.randint(5, 9)
    kept = tuple(value for value in range(ops) if draw.random() < 0.08)
    graph = Graph(
        op_cost_ns=tuple(draw.choice((0, 1, 2, 3, 5, 9)) for _ in range(ops)),
        op_inputs=tuple(
            tuple(sorted(draw.sample(range(op), min(op, draw.choice((0, 1, 1, 2, 2, 3)))))) for op in range(ops)
        ),
        value_op=tuple(range(ops)),
        value_bytes=tuple(draw.choice((0, 1, 1, 2, 3, 5)) for _ in range(ops)),
        op_workspace_bytes=tuple(draw.choice((0, 0, 0, 1, 2)) for _ in range(ops)),
        once=tuple(op for op in range(ops) if draw.random() < 0.08),
        keep=kept,
    )
    least, plain = working_set(graph).least_bytes, plain_peak(graph)
    return Problem(graph, draw.randint(least, max(least, plain - 1)))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 600, 50))
def test_auto_is_exact_on_small_graphs(start: int) -> None:
    for seed in range(start, start + 50):
        problem = irregular(seed)
        best, answer = optimum(problem).cost_ns, solve(problem, time_limit_s=20, max_gap=0.0)
        assert answer.cost_ns == best, seed


@pytest.mark.thorough
def test_auto_claims_the_least_makespan_of_a_tiny_graph_with_a_link() -> None:
    alone = next(little_problems(13, 5, rich=False, budgets=2))
    problem = Problem(alone.graph.with_link(Link(10**10, 10**10)), alone.budget_bytes)
    best, _ = least_makespan(problem)
    answer = solve(problem, time_limit_s=20, max_gap=0.0)
    assert answer.cost_ns == best
    assert max(answer.bound_ns or 0, answer.claimed_bound_ns or 0) == best


def test_auto_finds_a_plan_that_is_no_schedule_of_its_search() -> None:
    """The ways to a first plan that come before end, so that every plan is looked at."""
    problem = next(p for p in little_problems(1049, 7, rich=True, budgets=4) if p.budget_bytes == 13)
    assert optimum(problem, ONE_PER_STAGE).plan is None
    best = optimum(problem).cost_ns
    answer = solve(problem, options={"proof": False}, time_limit_s=20, max_gap=0)
    assert (answer.cost_ns, answer.claimed_bound_ns) == (best, best)
