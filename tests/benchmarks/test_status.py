"""What an answer may say: "optimal" for the whole space needs a certificate, of every method and engine."""

from __future__ import annotations

import random

import pytest
from benchmarks.falsify import drawn_chain, drawn_graph, drawn_join, ways_for

from remat_ir import Answer, Problem, Status, Subject, plain_peak, verify_answer
from remat_ir.proof import certifiable
from remat_solver import METHODS, solve
from remat_solver.bounds import least_need
from remat_solver.deadline import Deadline
from remat_solver.incumbent import Incumbent


def check(problem: Problem, answer: Answer) -> None:
    """What an answer says for certain is what its certificate proves; the rest it says as a claim."""
    proved = verify_answer(problem, answer)
    total = problem.subject.total_cost_ns
    if answer.status is Status.INFEASIBLE:
        assert proved.infeasible or answer.claimed_by is not None
        return
    whole = certifiable(problem.subject) and not answer.restricted_to
    if whole:
        assert answer.bound_ns is not None
        assert answer.bound_ns <= proved.bound_ns
        if answer.status is Status.OPTIMAL:
            assert answer.cost_ns == proved.bound_ns
        if answer.claimed_bound_ns is not None and answer.cost_ns is not None:
            assert answer.status is not Status.OPTIMAL
            assert str(answer.claimed_by) in answer.message
    elif answer.bound_ns is not None and answer.bound_ns > total:
        assert (answer.claimed_bound_ns, answer.claimed_by is None) == (answer.bound_ns, False)


def drawn(seed: int) -> list[Problem]:
    """A graph, a chain and a join, each under a budget between what it needs and where nothing is to be done."""
    draw = random.Random(seed)
    subjects: list[Subject] = [make(draw) for make in (drawn_graph, drawn_chain, drawn_join)]
    problems = []
    for subject in subjects:
        least, most = least_need(subject)[0], plain_peak(subject)
        problems.append(Problem(subject, least + int(draw.uniform(-0.05, 0.8) * (most - least))))
    return problems


@pytest.mark.parametrize("seed", range(3))
def test_every_method_and_engine_says_no_more_than_is_proved(seed: int) -> None:
    for problem in drawn(seed):
        for way in ways_for(problem):
            options = dict(way.options)
            check(problem, solve(problem, method=way.method, options=options, time_limit_s=0.7, max_gap=0.001))


def test_without_certificates_the_engines_are_named() -> None:
    """Of the caller's own choice a bound is taken on an engine's word; who gave it is said."""
    graph = drawn_graph(random.Random(5))
    least, most = least_need(graph)[0], plain_peak(graph)
    answer = solve(Problem(graph, (least + most) // 2), certify=False, time_limit_s=20)
    assert answer.bound_ns is not None
    assert answer.bound_ns > graph.total_cost_ns
    assert answer.proof is None
    assert (answer.claimed_bound_ns, answer.claimed_by) == (answer.bound_ns, "staged")


def test_a_claim_alone_is_not_optimal() -> None:
    """An engine's word for the plan's own cost leaves the answer feasible, and its message names both bounds."""
    graph = drawn_graph(random.Random(5))
    problem = Problem(graph, plain_peak(graph))
    incumbent = Incumbent(problem, Deadline(60), certify=True)
    METHODS["greedy"].run(incumbent, METHODS["greedy"].options())
    assert incumbent.answer("greedy").status is Status.OPTIMAL  # each op once: no certificate is needed
    tight = Problem(graph, (least_need(graph)[0] + plain_peak(graph)) // 2)
    incumbent = Incumbent(tight, Deadline(60), certify=True)
    METHODS["greedy"].run(incumbent, METHODS["greedy"].options())
    assert incumbent.cost_ns is not None
    incumbent.raise_bound(incumbent.cost_ns, "an engine")
    answer = incumbent.answer("greedy")
    check(tight, answer)
    assert (answer.status, answer.bound_ns) == (Status.FEASIBLE, graph.total_cost_ns)
    assert (answer.claimed_bound_ns, answer.claimed_by) == (answer.cost_ns, "an engine")
    assert "an engine claims that no plan costs less, without a certificate" in answer.message
