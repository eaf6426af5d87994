"""Plans that torch carries out by tags: their evaluation against the verifier, their optimum against brute force."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import chain, combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from drawn import examples
from remat_ir import (
    Answer,
    Graph,
    InvalidData,
    InvalidPlan,
    Problem,
    Status,
    certified,
    graph_of,
    plain_peak,
    plan_of,
    verify,
    verify_answer,
)
from remat_ir.graph import working_set
from remat_ir.proof import InvalidProof, StageProof, prove
from remat_ir.restrictions import TAGS, contains
from remat_ir.tags import confined, is_tagged, tagged_order, tagged_plan, tags_of
from remat_solver import solve
from remat_solver.backends.engine import Engine
from remat_solver.deadline import Deadline
from remat_solver.incumbent import Incumbent
from remat_solver.tags.program import TagProgram
from remat_solver.tags.program import prove as prove_by_stages
from remat_solver.tags.search import TagSearch
from solver.brute import optimum
from solver.little import little_graph, problems
from solver.test_proof_mutants import mutant


def _subsets(ops: range) -> list[tuple[int, ...]]:
    return list(chain.from_iterable(combinations(ops, k) for k in range(len(ops) + 1)))


def _verdict(graph: Graph, again: tuple[int, ...]) -> tuple[int, int] | None:
    try:
        return verify(Problem(graph, 2**52), tagged_plan(graph, again))
    except InvalidPlan:
        return None


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 9), st.booleans())
def test_tags_are_evaluated_read_off_and_confined_as_the_verifier_replays_them(seed: int, ops: int, rich: bool) -> None:
    """All sets: what the search says, the tags of the plan, and the same ops in the confined graph, after its new one,
    at the same cost and peak.
    """
    graph = little_graph(seed, ops, rich=rich)
    assume(graph.backward_from is not None)
    search, inside = TagSearch(graph, plain_peak(graph)), confined(graph)
    for again in _subsets(range(graph.backward_from)):
        verdict = _verdict(graph, again)
        assert search.evaluate(again) == verdict, again
        if verdict is None:
            continue
        plan = tagged_plan(graph, again)
        assert is_tagged(graph, plan)
        assert tagged_order(graph, tags_of(graph, plan)) == plan.computes
        order = (0, *(op + 1 for op in tagged_order(graph, again)))
        assert verify(Problem(inside, 2**52), plan_of(inside, order)) == verdict, again


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


def test_the_staged_program_says_where_no_tags_fit() -> None:
    """Where a budget is what a single op needs, graphs may have plans and no tags."""
    empty = 0
    for seed in range(10):
        graph = little_graph(seed, 18, rich=False)
        problem = Problem(graph, plain_peak(graph) * 9 // 10 if seed % 2 else working_set(graph).least_bytes)
        search = TagSearch(graph, problem.budget_bytes)
        assert search.try_all()
        incumbent = Incumbent(problem, Deadline(60))
        assert prove_by_stages(incumbent, search, incumbent.stopped) == (search.cost_ns is None)
        empty += search.cost_ns is None
    assert 0 < empty < 10


def test_an_answer_says_what_a_free_plan_would_save() -> None:
    graph = little_graph(3, 60, rich=False)
    budget = int(0.75 * plain_peak(graph))
    answer = solve(Problem(graph, budget), method="tags", time_limit_s=6)
    assert contains(graph, answer.plan, (TAGS,))
    assert "As torch runs it: " in answer.message
    assert "no plan of any kind costs less than" in answer.message


def test_a_graph_without_a_backward_pass_is_refused_by_a_sentence() -> None:
    answer = solve(Problem(graph_of([1, 1], [1, 1], [[], [0]]), 2), method="tags")
    assert answer.plan is None
    assert "the graph marks none" in answer.message


def test_tags_confine_a_plan_to_less_than_a_free_one_may_do() -> None:
    """A value that a free plan computes again twice stays there by tags: that bound is the greater one."""
    apart = 0
    for seed in range(40):
        graph = little_graph(seed, 8, rich=False)
        budget = (working_set(graph).least_bytes + plain_peak(graph)) // 2
        free = optimum(Problem(graph, budget)).cost_ns
        within = optimum(Problem(confined(graph), budget)).cost_ns
        assert within is None or (free is not None and within >= free)
        apart += within != free
    assert apart


def _certified(seed: int, ops: int) -> tuple[Problem, Answer, int] | None:
    """A problem whose answer has a certificate of the space, and the least cost of tags; None where it has none."""
    graph = little_graph(seed, ops, rich=False)
    problem = Problem(graph, int(0.6 * plain_peak(graph)))
    search = TagSearch(graph, problem.budget_bytes)
    if not search.try_all() or search.cost_ns is None:
        return None
    inside = Problem(confined(graph), problem.budget_bytes)
    proved = solve(inside, method="staged", time_limit_s=10, max_gap=0.0)
    if proved.proof is None or proved.bound_ns is None:
        return None
    answer = Answer.of_plan(problem, search.plan(), method="tags", bound_ns=proved.bound_ns)
    return problem, replace(answer, restricted_to=(TAGS,), proof=proved.proof), search.cost_ns


@pytest.mark.thorough
def test_the_checker_confirms_a_bound_of_the_space_from_the_certificate_alone() -> None:
    """On another machine there is the answer's text alone; of the whole space it proves nothing."""
    checked = reached = 0
    for seed in range(8):
        found = _certified(seed, 20)
        if found is None:
            continue
        problem, answer, least = found
        verdict = verify_answer(problem, Answer.from_json(json.loads(json.dumps(answer.to_json()))))
        assert verdict.restricted_ns == answer.bound_ns
        assert verdict.bound_ns == problem.graph.total_cost_ns
        assert verdict.restricted_ns <= least
        assert certified(problem, answer, verdict).claimed_by is None
        reached += verdict.restricted_ns == least
        checked += 1
        with pytest.raises(InvalidProof, match="another problem"):
            prove(problem, answer.proof)
        with pytest.raises(InvalidProof):
            verify_answer(problem, replace(answer, restricted_to=()))
        with pytest.raises(InvalidProof):  # of more memory it would prove too much
            verify_answer(replace(problem, budget_bytes=problem.budget_bytes + 1), answer)
    assert checked > 2
    assert reached


@pytest.mark.thorough
def test_no_mutant_of_a_certificate_of_the_space_proves_too_much() -> None:
    accepted, previous = 0, None
    for seed in range(8):
        found = _certified(seed, 16)
        if found is None or not isinstance(found[1].proof, StageProof):
            continue
        problem, answer, least = found
        inside, rng = Problem(confined(problem.graph), problem.budget_bytes), random.Random(seed)
        for _ in range(40):
            changed = mutant(answer.proof, previous or answer.proof, rng)
            try:
                bound = prove(inside, changed).bound_ns
            except InvalidProof:
                continue
            accepted += 1
            assert bound <= least
        previous = answer.proof
    assert accepted > 20


def test_an_answer_by_tags_brings_the_certificate_of_its_space() -> None:
    """Where the bound of the space is above the free one: the answer says the space, and the checker agrees."""
    graph = little_graph(3, 60, rich=False)
    problem = Problem(graph, int(0.75 * plain_peak(graph)))
    answer = solve(problem, method="tags", options={"free": False}, time_limit_s=6, max_gap=0.0)
    assert answer.restricted_to == (TAGS,)
    assert answer.proof is not None
    verdict = verify_answer(problem, answer)
    assert problem.graph.total_cost_ns < verdict.restricted_ns <= (answer.cost_ns or 0)
