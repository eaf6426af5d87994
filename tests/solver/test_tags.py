"""Plans that torch carries out by tags: their evaluation against the verifier, their optimum against brute force."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from drawn import examples
from remat_ir import Graph, InvalidData, InvalidPlan, Problem, Status, graph_of, plain_peak, plan_of, verify
from remat_ir.restrictions import TAGS, contains
from remat_ir.tags import is_tagged, tagged_order, tagged_plan, tags_of
from remat_solver import solve
from remat_solver.backends.engine import Engine
from remat_solver.tags import TagProgram, TagSearch
from solver.brute import optimum
from solver.little import little_graph, problems


def _subsets(ops: range) -> list[tuple[int, ...]]:
    return list(chain.from_iterable(combinations(ops, k) for k in range(len(ops) + 1)))


def _verdict(graph: Graph, again: tuple[int, ...]) -> tuple[int, int] | None:
    try:
        return verify(Problem(graph, 2**52), tagged_plan(graph, again))
    except InvalidPlan:
        return None


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 9), st.booleans())
def test_an_evaluation_is_what_the_verifier_replays(seed: int, ops: int, rich: bool) -> None:
    graph = little_graph(seed, ops, rich=rich)
    assume(graph.backward_from is not None)
    assert graph.backward_from is not None
    search = TagSearch(graph, plain_peak(graph))
    for again in _subsets(range(graph.backward_from)):
        assert search.evaluate(again) == _verdict(graph, again), again


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 9), st.booleans())
def test_tags_are_read_off_a_plan_again(seed: int, ops: int, rich: bool) -> None:
    graph = little_graph(seed, ops, rich=rich)
    assume(graph.backward_from is not None)
    assert graph.backward_from is not None
    for again in _subsets(range(graph.backward_from)):
        if _verdict(graph, again) is None:
            continue
        plan = tagged_plan(graph, again)
        assert is_tagged(graph, plan)
        assert tagged_order(graph, tags_of(graph, plan)) == plan.computes


def test_a_plan_that_computes_an_op_twice_again_is_not_of_the_space() -> None:
    graph = graph_of([1] * 5, [1] * 5, [[], [0], [1], [2, 0], [3, 0]], backward_from=3)
    twice = plan_of(graph, (0, 1, 2, 0, 3, 0, 4))
    verify(Problem(graph, 99), twice)
    assert not contains(graph, twice, (TAGS,))
    assert contains(graph, plan_of(graph, (0, 1, 2, 0, 3, 4)), (TAGS,))
    assert not contains(graph, plan_of(graph, (0, 1, 0, 2, 3, 4)), (TAGS,))


def test_tags_are_of_forward_ops() -> None:
    graph = graph_of([1] * 3, [1] * 3, [[], [0], [1]], backward_from=1)
    with pytest.raises(InvalidData, match="op 2 is tagged, and the forward pass has ops 0 to 0"):
        tagged_order(graph, (0, 2))
    with pytest.raises(InvalidData, match="no backward pass"):
        tagged_order(graph_of([1], [1], [[]]), ())


@settings(deadline=None)
@given(problems(8))
def test_the_optimum_of_few_ops_is_brute_force(problem: Problem) -> None:
    graph = problem.graph
    assume(graph.backward_from is not None)
    assert graph.backward_from is not None
    found = [v for again in _subsets(range(graph.backward_from)) if (v := _verdict(graph, again)) is not None]
    costs = [cost for cost, peak in found if peak <= problem.budget_bytes]
    answer = solve(problem, method="tags", time_limit_s=10, max_gap=0.0)
    if costs:
        assert answer.cost_ns == min(costs)
        assert answer.status is Status.OPTIMAL
        # where the free problem was solved in its share of the time, the bound may be of the whole space
        assert answer.restricted_to == (TAGS,) or optimum(problem).cost_ns == answer.cost_ns
    else:
        assert answer.plan is None
        assert answer.status is Status.INFEASIBLE or answer.restricted_to == (TAGS,)


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_the_search_reaches_the_optimum_of_more_ops(share: float) -> None:
    """Where all sets can be tried, annealing from nothing finds one as cheap."""
    for seed in range(4):
        graph = little_graph(seed, 24, rich=False)
        budget = int(share * plain_peak(graph))
        exact, search = TagSearch(graph, budget), TagSearch(graph, budget, seed)
        assert exact.try_all()
        search.adopt(())
        for heat in (2.0, 0.5, 0.1):
            search.cycle(20_000, lambda: False, heat)
            search.resume_best()
        assert search.cost_ns == exact.cost_ns


@settings(deadline=None, max_examples=examples(40))
@given(problems(9))
def test_the_staged_programs_bound_is_of_all_tags_and_reaches_the_optimum(problem: Problem) -> None:
    """Round by round no bound is above the cheapest set of tags, and the last one is that."""
    graph = problem.graph
    assume(graph.backward_from is not None)
    search = TagSearch(graph, problem.budget_bytes)
    assume(len(search.free) > 0)
    assert search.try_all()
    program = TagProgram(graph, problem.budget_bytes, search.free.tolist())
    with Engine("highs") as engine:
        for _ in range(60):
            outcome = engine.run(program.write(), relative_gap=1e-9)
            if search.cost_ns is not None:
                assert program.bound_ns(outcome.bound) <= search.cost_ns
            if outcome.x is None:
                assert search.cost_ns is None
                return
            tags = program.tags(outcome.x)
            if search.fits(tags):
                assert search.evaluate(tags)[0] == search.cost_ns
                assert program.bound_ns(outcome.bound) >= (1 - 1e-5) * search.cost_ns
                return
            program.refine(tags)
    raise AssertionError("the program does not end")


def test_an_answer_says_what_a_free_plan_would_save() -> None:
    graph = little_graph(3, 60, rich=False)
    budget = int(0.75 * plain_peak(graph))
    answer = solve(Problem(graph, budget), method="tags", time_limit_s=6)
    assert answer.plan is not None
    assert contains(graph, answer.plan, (TAGS,))
    assert "As torch runs it: " in answer.message
    assert "no plan of any kind costs less than" in answer.message


def test_a_graph_without_a_backward_pass_is_refused_by_a_sentence() -> None:
    answer = solve(Problem(graph_of([1, 1], [1, 1], [[], [0]]), 2), method="tags")
    assert answer.plan is None
    assert "the graph marks none" in answer.message
