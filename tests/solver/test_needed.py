"""The least budget, from above by plans and from below; what is said to be too small is certified, at every way out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from benchmarks.graphs.instances import instance
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chains import chains
from drawn import examples, graphs
from remat_ir import (
    Answer,
    Chain,
    Graph,
    InvalidPlan,
    Link,
    Problem,
    Status,
    certified,
    certified_need,
    plain_peak,
    verify,
    verify_answer,
)
from remat_ir.batch import BatchFamily
from remat_ir.graph import working_set
from remat_ir.proof import PairProof, certain_need
from remat_solver import least_budget, max_batch, solve, sweep
from remat_solver.bounds import pair_need
from remat_solver.deadline import Deadline
from remat_solver.incumbent import Incumbent
from solver.brute import optimum
from solver.little import little_graph, problems
from solver.test_transfer_bound import linked
from solver.transfer_brute import least_makespan

METHODS = ("auto", "staged", "search", "milp-tight", "lp-rounding", "greedy")
TIGHT = (25, 42, 56, 77, 99, 118)
"""Seeds of graphs of seven ops of which pairs prove a greater need than any op alone has."""


def need(graph: Graph) -> int:
    """The least budget with a plan, by brute force."""
    budget = working_set(graph).least_bytes
    while optimum(Problem(graph, budget)).plan is None:
        budget += 1
    return budget


def sound(problem: Problem, answer: Answer) -> Answer:
    """An answer that says of budgets what is certified, or names who claims it."""
    verdict = verify_answer(problem, answer)
    assert certified_need(answer, verdict) == answer
    if answer.status is Status.INFEASIBLE:
        assert verdict.infeasible
        assert answer.claimed_by is None
    return answer


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(problems(6), st.sampled_from(METHODS))
def test_every_method_certifies_what_it_says_is_too_small(problem: Problem, method: str) -> None:
    answer = sound(problem, solve(problem, method=method, time_limit_s=20))
    enough = answer.least_budget_bytes
    assert enough is None or optimum(Problem(problem.graph, enough)).plan is not None
    if answer.status is Status.INFEASIBLE:
        assert answer.claimed_by is None
        assert optimum(Problem(problem.graph, (answer.least_budget_bound_bytes or 0) - 1)).plan is None


def test_what_pairs_prove_reaches_every_way_out() -> None:
    """Below the working set, between it and what pairs prove, and of the least budget with a plan."""
    for seed in TIGHT[:3]:
        graph = little_graph(seed, 7)
        alone, least = working_set(graph).least_bytes, pair_need(graph).least_bytes
        budgets = sorted({alone - 1, alone, least - 1})
        for budget, answer in zip(budgets, sweep(graph, budgets, time_limit_s=20), strict=True):
            sound(Problem(graph, budget), answer)
            assert (answer.status, answer.claimed_by) == (Status.INFEASIBLE, None)
        found = least_budget(graph, time_limit_s=1, prover=None)
        sound(Problem(graph, found.budget_bytes), found)
        assert found.least_budget_bound_bytes == least > alone
        assert found.proof is not None


@settings(max_examples=examples(15), deadline=None, derandomize=True)
@given(chains(most_stages=4), st.integers(0, 12))
def test_chains_certify_it_as_graphs(chain: Chain, more: int) -> None:
    problem = Problem(chain, max(0, certain_need(chain) - 1 + more))
    sound(problem, solve(problem, time_limit_s=5))


@settings(max_examples=examples(15), deadline=None, derandomize=True)
@given(linked(3))
def test_with_a_link_what_one_op_needs_is_certain(problem: Problem) -> None:
    least = certain_need(problem.subject)
    assume(least > 0)
    below = Problem(problem.subject, least - 1)
    assert least_makespan(below)[0] is None
    answer = sound(below, solve(below, time_limit_s=5))
    assert answer.status is Status.INFEASIBLE
    assert answer.claimed_by is None


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(problems(6))
def test_the_checker_and_the_solver_agree_on_what_one_op_needs(problem: Problem) -> None:
    graph, with_link = problem.graph, problem.graph.with_link(Link(1, 1))
    least = certain_need(graph)
    assert least == working_set(graph).least_bytes
    assert certain_need(with_link) == working_set(with_link).least_bytes <= least
    assert not least or optimum(Problem(graph, least - 1)).plan is None


def answers_about(seed: int) -> Iterator[tuple[Problem, Answer]]:
    """Answers with a certificate of a least budget: that no plan fits, and of a least budget with a plan."""
    graph = little_graph(seed, 7)
    for budget in (pair_need(graph).least_bytes - 1, working_set(graph).least_bytes):
        yield Problem(graph, budget), solve(Problem(graph, budget), time_limit_s=20)
    found = least_budget(graph, time_limit_s=1, prover=None)
    yield Problem(graph, found.budget_bytes), found


def mutant(answer: Answer, other: Answer, rng: random.Random) -> Answer:
    """An answer with one thing changed, as a liar might."""
    said = answer.least_budget_bound_bytes or 0
    changes = (
        {"least_budget_bound_bytes": said + rng.choice((1, 2, 10**6, -1))},
        {"proof": None},
        {"proof": other.proof},
        {"proof": None if other.proof is None else replace(other.proof, digest=getattr(answer.proof, "digest", ""))},
        {"status": rng.choice((Status.INFEASIBLE, Status.NOTHING_FOUND)), "plan": None},
        {"budget_bytes": answer.budget_bytes + 1},
    )
    if isinstance(answer.proof, PairProof) and answer.proof.pairs:
        pairs = list(answer.proof.pairs)
        del pairs[rng.randrange(len(pairs))]
        changes += ({"proof": replace(answer.proof, pairs=tuple(pairs))},)
        changes += ({"proof": replace(answer.proof, op=rng.randrange(7))},)
    return replace(answer, **rng.choice(changes))


def test_no_mutant_is_believed_to_need_more_than_brute_force_finds() -> None:
    rng, believed, lowered, refused = random.Random(7), 0, 0, 0
    for seed in TIGHT:
        least = need(little_graph(seed, 7))
        found = list(answers_about(seed))
        for problem, answer in found:
            for _ in range(120):
                changed = answer
                for _ in range(rng.randint(1, 3)):
                    changed = mutant(changed, rng.choice(found)[1], rng)
                try:
                    verdict = verify_answer(problem, changed)
                except InvalidPlan:
                    refused += 1
                    continue
                said = certified(problem, changed, verdict)
                assert verdict.least_budget_bytes <= least
                assert verdict.infeasible <= (problem.budget_bytes < least)
                assert verdict.infeasible or said.status is not Status.INFEASIBLE
                assert (said.least_budget_bound_bytes or 0) <= least
                believed += said == changed
                lowered += said != changed
    assert min(believed, lowered, refused) > 100


@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(0, 40), st.sampled_from((1.0, 1.2, 2.0)))
def test_the_batch_above_the_bound_is_certified_to_be_impossible(seed: int, percent: int, share: float) -> None:
    graph = replace(little_graph(seed, 5), backward_from=3, fixed_bytes=0)
    assume(working_set(graph).least_bytes > sum(graph.value_bytes[v] for v in graph.keep))  # something grows
    budget = plain_peak(graph) * (100 + percent) // 50
    most = int(graph.total_cost_ns * share)
    found = max_batch(graph, budget, most_cost_ns=most, time_limit_s=20)
    family = BatchFamily(graph, budget)
    above = found.bound + 1
    assert found.claimed_by is None
    assert family.impossible(above, most, found.proof)
    for size, limit in ((above, most), (found.bound, most), (above, 2 * most)):
        best = optimum(family.at(size)).cost_ns
        if best is not None and best <= limit:
            assert not family.impossible(size, limit, found.proof)
    assert above > found.batch
    least = optimum(family.at(above)).cost_ns
    assert least is None or least > most


@pytest.mark.parametrize("status", [Status.NOTHING_FOUND, Status.INFEASIBLE])
def test_without_a_certificate_a_need_is_claimed_or_not_said(status: Status) -> None:
    graph = little_graph(TIGHT[0], 7)
    problem = Problem(graph, need(graph) - 1)
    answer = Answer(status, "rumour", problem.budget_bytes, least_budget_bound_bytes=10**9)
    said = certified(problem, answer, verify_answer(problem, answer))
    assert said.status is Status.NOTHING_FOUND
    assert said.least_budget_bound_bytes == working_set(graph).least_bytes
    assert said.claims_infeasible == (status is Status.INFEASIBLE)
    if said.claims_infeasible:
        assert said.claimed_by == "rumour"
        assert "rumour claims, without a certificate: no plan fits." in said.message


def test_a_claim_that_no_plan_fits_ends_no_solve(said: list[str]) -> None:
    """A method's word is no status: the others go on, and the answer without a plan names the claim."""
    graph = little_graph(TIGHT[0], 7)
    problem = Problem(graph, need(graph))
    incumbent = Incumbent(problem, Deadline(60), certify=True)
    incumbent.prove_infeasible("No plan fits: the relaxation has no solution.", problem.budget_bytes + 1)
    assert not incumbent.stopped()
    claimed = incumbent.answer("staged")
    answer = certified_need(claimed, verify_answer(problem, claimed))
    assert (answer.status, answer.claims_infeasible, answer.claimed_by) == (Status.NOTHING_FOUND, True, "staged")
    assert "the relaxation has no solution" in answer.message
    best = optimum(problem).plan
    assert best is not None
    assert incumbent.offer(best, "search")
    assert "every plan needs" in said[0]
    answer = incumbent.answer("auto")
    assert (answer.plan is None, answer.claimed_by) == (False, None)


# --- from above by plans, from below by certificates and by what pairs of values need


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
    least = need(graph)
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
