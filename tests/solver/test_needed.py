"""What is said of budgets and batches that are too small is certified, at every way out; no mutant says too much."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chains import chains
from drawn import examples
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
    verify_answer,
)
from remat_ir.batch import BatchFamily
from remat_ir.proof import PairProof, certain_need
from remat_ir.working_set import working_set
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
