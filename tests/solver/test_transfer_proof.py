"""Certificates of graphs with a link: rows hold for every plan, bounds for every optimum, and no mutant proves more."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples
from remat_ir import InvalidPlan, Link, Problem, Status, certified, problem_digest, verify, verify_answer
from remat_ir.proof import Branch, InvalidProof, Leaf, PairProof, StageProof, carried, prove, read_proof
from remat_ir.proof.rows import KINDS, Relaxation, Terms
from remat_ir.proof.transfers import LINK_KINDS, LinkRelaxation
from remat_solver import solve
from remat_solver.deadline import Deadline
from remat_solver.incumbent import Incumbent
from remat_solver.transfers.bound import prove as prove_linear
from solver.proof_rows import every_row, proof_of, random_covers, relaxation, with_roundings, written
from solver.proof_transfers import Moved, random_plan
from solver.test_proof_mutants import mutant
from solver.test_transfer_bound import MUST_MOVE, linked
from solver.transfer_brute import least_makespan


def cuts_of(problem: Problem, rng: random.Random) -> tuple[int, ...]:
    """Random ones."""
    ops = range(problem.graph.ops)
    return tuple(sorted({*rng.sample(ops, rng.randint(0, len(ops))), ops[-1]}))


def check_point(problem: Problem, moved: Moved, cost_ns: int, rng: random.Random) -> None:
    """Check all rows at a plan's point, what is certain of it, its limits and its cost."""
    graph = problem.graph
    on = relaxation(problem, cuts_of(problem, rng), ())
    rows = with_roundings(on, every_row(on, random_covers(on, rng)), rng)
    made = written(on, rows)
    point = {column: moved.at(on, column) for one in made for column in one.terms}
    for column, number in point.items():
        assert number >= 0, column
        assert number <= on.upper(column) or cost_ns > on.limit_ns, column
    for row, one in zip(rows, made, strict=True):
        assert sum(a * point[column] for column, a in one.terms.items()) <= one.most, row
    idle = sum(moved.at(on, ("idle", c)) for c in range(on.stages))
    again = [op for c in range(on.stages) for op in range(on.first[c]) if moved.runs(on, c, op)]
    assert graph.total_cost_ns + sum(graph.op_cost_ns[op] for op in again) + idle == cost_ns
    for c in range(on.stages):
        for direction in (0, 1):
            certain = on.running(c, direction)
            assert certain != 0 or moved.at(on, ("running", c, direction)) == 0
        for value in range(graph.values):
            for kind in ("out", "back"):
                assert on.copies(kind, c, value) != 0 or moved.at(on, (kind, c, value)) == 0
            assert on.host(c, value) != 0 or moved.at(on, ("host", c, value)) == 0
            if c and graph.value_op[value] < on.first[c] and isinstance(known := on.hold(c, value), int):
                assert moved.holds(on, c, value) == known
        for op in range(on.first[c]):
            assert on.run(c, c, op) != 0 or not moved.runs(on, c, op)


def check_random(problem: Problem, rng: random.Random, plans: int) -> None:
    """Check points of plans by random steps."""
    for _ in range(plans):
        plan = random_plan(problem, rng)
        if plan is not None:
            check_point(problem, Moved(problem.graph, plan), verify(problem, plan).cost_ns, rng)


@settings(max_examples=examples(60), deadline=None)
@given(linked(6), st.integers(0, 2**32))
def test_one_point_satisfies_all_rows_and_its_cost_is_the_makespan(problem: Problem, seed: int) -> None:
    check_random(problem, random.Random(seed), 2)


@pytest.mark.slow
@settings(max_examples=examples(2000), deadline=None)
@given(linked(7), st.integers(0, 2**32))
def test_one_point_of_many_plans_satisfies_all_rows(problem: Problem, seed: int) -> None:
    check_random(problem, random.Random(seed), 8)


def nowhere_else(on: LinkRelaxation, c: int, value: int) -> Terms:
    return Relaxation._supplied(on, c, c, value)


def less_room(on: LinkRelaxation, c: int) -> tuple[int, list[int]]:
    room, values = Relaxation._beside(on, c)
    return room - 2, values


def after_once(on: LinkRelaxation, c: int, value: int) -> bool:
    useful = min(on.graph.users[value], default=-1) >= on.first[c]
    return useful and value not in on.graph.keep and on.graph.value_bytes[value] > 0


WRONG: dict[str, tuple[str, Callable[..., Any]]] = {
    "no copy runs at a cut": ("running", lambda on, c, direction: 0),
    "what comes back was there": ("_brought", Relaxation._brought),
    "nothing is on the host": ("somewhere", nowhere_else),
    "what cannot be made again stays": ("_stays", Relaxation._stays),
    "no use after the first reader": ("moves", after_once),
    "two bytes less": ("_beside", less_room),
}


def check_best() -> None:
    """Check the points of the best plan of a step in which a value must move, which an op reads before as well."""
    problem = replace(MUST_MOVE, subject=replace(MUST_MOVE.graph, op_inputs=((), (0,), (), (1, 2), (0, 3))))
    best_ns, plan = least_makespan(problem)
    assert best_ns is not None
    moved = Moved(problem.graph, plan)
    assert len(moved.excursions) == 1
    for seed in range(40):
        check_point(problem, moved, best_ns, random.Random(seed))


def test_the_best_plan_satisfies_all_rows() -> None:
    check_best()


@pytest.mark.parametrize("name", WRONG)
def test_a_checker_that_is_wrong_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attribute, wrong = WRONG[name]
    monkeypatch.setattr(LinkRelaxation, attribute, wrong)
    with pytest.raises(AssertionError):
        check_best()


def proof_for(problem: Problem, rng: random.Random) -> StageProof:
    """A tree over every row there is for random cuts."""
    on = relaxation(problem, cuts_of(problem, rng), ())
    return proof_of(problem, on, every_row(on, random_covers(on, rng)), rng.choice((0, 0, 2, 5)))


def agrees(problem: Problem, proof: StageProof, best_ns: int | None) -> int:
    """Check that a certificate proves no more than brute force finds; 1 where it proves anything."""
    try:
        bound = prove(problem, proof).bound_ns
    except InvalidProof:
        return 0
    assert best_ns is None or (bound is not None and bound <= best_ns)
    return 1


def attack(problem: Problem, rng: random.Random, mutants: int, other: StageProof | None = None) -> int:
    """How many mutants of a certificate are certificates; asserts that none proves too much."""
    best_ns, _ = least_makespan(problem)
    proof = proof_for(problem, rng)
    agrees(problem, proof, best_ns)
    assert read_proof(proof.to_json()) == proof
    if proof.rows:
        return sum(agrees(problem, mutant(proof, other or proof, rng), best_ns) for _ in range(mutants))
    return 0


@settings(max_examples=examples(12), deadline=None)
@given(linked(4), st.integers(0, 2**32))
def test_no_certificate_and_no_mutant_is_above_the_optimum(problem: Problem, seed: int) -> None:
    attack(problem, random.Random(seed), 20)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@settings(max_examples=examples(1000), deadline=None)
@given(linked(4), st.integers(0, 2**32))
def test_no_mutant_of_a_hundred_thousand_proves_too_much(problem: Problem, seed: int) -> None:
    attack(problem, random.Random(seed), 100)


@settings(max_examples=examples(8), deadline=None)
@given(linked(3), st.integers(-3, 2), st.integers(0, 2**32))
def test_a_carried_certificate_holds(problem: Problem, more: int, seed: int) -> None:
    """At other budgets and at other costs."""
    rng = random.Random(seed)
    graph, proof = problem.graph, proof_for(problem, rng)
    costs = tuple(rng.randint(0, 2 * cost + 1) for cost in graph.op_cost_ns)
    for other in (graph, replace(graph, op_cost_ns=costs)):
        target = Problem(other, max(0, problem.budget_bytes + more))
        agrees(target, carried(proof, target), least_makespan(target)[0])


def certificate(problem: Problem) -> tuple[StageProof, int]:
    """What the solver certifies, and the bound."""
    incumbent = Incumbent(problem, Deadline(60), certify=True)
    list(prove_linear(incumbent, Deadline(60)))
    assert isinstance(incumbent.known.proof, StageProof)
    return incumbent.known.proof, incumbent.bound_ns


def test_the_solver_certifies_what_the_link_costs() -> None:
    proof, bound_ns = certificate(MUST_MOVE)
    assert prove(MUST_MOVE, proof).bound_ns == bound_ns
    assert MUST_MOVE.graph.total_cost_ns < bound_ns <= 25
    assert {row[0] for row in proof.rows} & (set(LINK_KINDS) - set(KINDS))
    wide = replace(MUST_MOVE, budget_bytes=31)
    assert prove(wide, carried(proof, wide)).bound_ns == wide.graph.total_cost_ns
    slow = replace(MUST_MOVE, subject=MUST_MOVE.graph.with_link(Link(10**8, 10**8)))
    moved = prove(slow, carried(proof, slow)).bound_ns
    assert bound_ns <= moved <= 205


def test_answers_with_a_link_are_verified_whole() -> None:
    """The bound is certified, what is said beyond it is claimed, and an edited answer is refused."""
    answer = solve(MUST_MOVE, time_limit_s=20, max_gap=0.45)
    verdict = verify_answer(MUST_MOVE, answer)
    assert (answer.cost_ns, answer.bound_ns) == (25, verdict.bound_ns)
    assert answer.proof is not None
    assert verdict.bound_ns > MUST_MOVE.graph.total_cost_ns
    greater = replace(answer, bound_ns=25, status=Status.OPTIMAL, gap=0.0, claimed_bound_ns=None, claimed_by=None)
    said = certified(MUST_MOVE, greater, verdict)
    assert (said.status, said.bound_ns, said.claimed_bound_ns) == (Status.FEASIBLE, verdict.bound_ns, 25)
    other = replace(MUST_MOVE, subject=MUST_MOVE.graph.with_link(Link(10**8, 10**9)))
    with pytest.raises(InvalidProof, match="another"):
        verify_answer(other, replace(answer, plan=None, cost_ns=None, peak_bytes=None))
    with pytest.raises(InvalidPlan, match="above the cost"):
        verify_answer(MUST_MOVE, replace(answer, bound_ns=26))


def test_what_holds_without_a_link_alone_is_refused() -> None:
    """Pairs of values, and spans."""
    digest = problem_digest(MUST_MOVE)
    with pytest.raises(InvalidProof, match="come back"):
        prove(MUST_MOVE, PairProof(digest, 4, ((0, 3),)))
    with pytest.raises(InvalidProof, match="spans"):
        prove(MUST_MOVE, StageProof(digest, (1, 2, 4), ((1, 2),), (), 1, (Leaf(()),)))
    with pytest.raises(InvalidProof, match="0 or 1"):
        prove(MUST_MOVE, StageProof(digest, (1, 4), (), (), 1, (Branch(("back", 1, 0)), Leaf(()), Leaf(()))))
