"""Certificates against brute force: rows hold for every plan, bounds for every optimum, and no mutant proves more."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples
from remat_ir import Graph, InvalidData, Problem, problem_digest, verify
from remat_ir.proof import InvalidProof, Leaf, PairProof, StageProof, carried, prove, read_proof
from remat_ir.proof.certificate import Row
from remat_ir.proof.check import Rounding, inequality, rounded
from remat_ir.proof.pairs import PairCheck
from remat_ir.proof.rows import Inequality, Relaxation
from solver.brute import optimum
from solver.little import little_graph
from solver.proof_rows import Struck, cost_of, every_row, proof_of, relaxation, relaxed, written
from solver.proof_transfers import random_plan


@settings(max_examples=examples(400), deadline=None)
@given(relaxed(), st.integers(0, 2**32))
def test_one_point_satisfies_all_rows_and_costs_no_more(
    drawn: tuple[Problem, Relaxation, list[Row]], seed: int
) -> None:
    problem, on, rows = drawn
    rng = random.Random(seed)
    for plan in (*(random_plan(problem, rng) for _ in range(2)), optimum(problem).plan):
        if plan is None:
            continue
        struck = Struck(problem.graph, plan)
        assert cost_of(problem.graph, struck.order) <= verify(problem, plan).cost_ns
        charged = {
            ("run", c, c, op): struck.at(on, ("run", c, c, op))
            for c in range(1, on.stages)
            for op in range(on.first[c])
        }
        paid = sum(problem.graph.op_cost_ns[int(column[3])] for column, there in charged.items() if there)
        assert problem.graph.total_cost_ns + paid <= cost_of(problem.graph, struck.order)
        for c in range(1, on.stages):  # what is taken to be certain is so
            for op in range(on.first[c]):
                if isinstance(on.run(c, c, op), int):
                    assert struck.at(on, ("run", c, c, op)) == 0
            for value in range(problem.graph.values):
                if problem.graph.value_op[value] < on.first[c] and isinstance(certain := on.hold(c, value), int):
                    assert struck.at(on, ("hold", c, value)) == certain
        for row, made in zip(rows, written(on, rows), strict=True):
            if (
                made.extra_ns is not None
                and cost_of(problem.graph, struck.order) >= on.graph.total_cost_ns + made.extra_ns
            ):
                continue
            assert sum(a * struck.at(on, column) for column, a in made.terms.items()) <= made.most, row


@settings(max_examples=examples(150), deadline=None)
@given(relaxed(5), st.integers(0, 6))
def test_no_certificate_is_above_the_optimum(drawn: tuple[Problem, Relaxation, list[Row]], depth: int) -> None:
    problem, on, rows = drawn
    proof = proof_of(problem, on, rows, depth)
    try:
        bound = prove(problem, proof).bound_ns
    except InvalidProof:
        assert any(isinstance(node, Leaf) and node.empty for node in proof.nodes)  # rounding may lose a proof
        return
    least = optimum(problem).cost_ns
    assert least is None or bound <= least
    assert read_proof(proof.to_json()) == proof


THREE = Inequality({("hold", 1, value): 4 for value in range(3)}, 9)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((), "lists divisor"),
        ((2, 1, 9, 7, 0), "lists divisor"),
        ((2, 1, 9, 0, 1, 0), "in turn"),
        ((2, 1, 9, 0, 3, 0, 1), "in turn"),
        ((0, 1, 9, 0, 1, 0, 1), "positive"),
        ((2, -1, 9, 0, 1, 0, 1), "positive"),
        ((2, 1, 9, 0, 1, 1, 1), "not before it"),
        ((2, 1, 9, 0, 1, -1, 1), "not before it"),
        ((2, 1, 9, 0, 1, 0, 0), "positive"),
        ((2, 1, 8, 0, 1, 0, 1), "allows 9"),
        ((2, 1, 9, 1, 3, 1, 0, 1), "not there"),
        ((2, 1, 9, 2, 0, 0, 1, 0, 1), "twice"),
        ((2**50, 1, 9, 0, 1, 0, 2**53), "allows"),
    ],
)
def test_rounded_rows_that_do_not_follow_are_refused(numbers: tuple[int, ...], message: str) -> None:
    on = relaxation(Problem(Graph((1, 1), ((), (0,)), (0, 1), (1, 1)), 9), (1,), ())
    with pytest.raises(InvalidProof, match=message):
        inequality(on, [THREE], ("round", *numbers))


def test_rounding_closes_what_linear_programs_leave() -> None:
    """Two of three values fit: three quarters of all three are cut off by the memory row alone, as by a cover."""
    on = relaxation(Problem(Graph((1, 1), ((), (0,)), (0, 1), (1, 1)), 9), (1,), ())
    made = rounded(on, [THREE], Rounding(4, 3, 9, (), ((0, 1),), ()))
    assert (set(made.terms.values()), made.most) == ({1}, 2)


def test_certificates_reach_the_optimum_of_most_small_problems() -> None:
    reached = total = 0
    for seed in range(60):
        graph = little_graph(seed, 6)
        budget = graph.fixed_bytes + 9 + seed % 8
        problem = Problem(graph, budget)
        on = relaxation(problem, tuple(range(graph.ops)), ())
        proof = proof_of(problem, on, every_row(on), 30)
        least = optimum(problem).cost_ns
        try:
            proved = prove(problem, proof).bound_ns
        except InvalidProof:
            proved = graph.total_cost_ns
        assert least is None or (proved is not None and proved <= least)
        total += 1
        reached += proved == least
    assert reached >= 0.6 * total, f"{reached} of {total}"


@settings(max_examples=examples(100), deadline=None)
@given(relaxed(5), st.integers(0, 4), st.integers(-6, 6), st.integers(0, 2**32))
def test_a_carried_certificate_holds_and_is_no_weaker_at_smaller_budgets(
    drawn: tuple[Problem, Relaxation, list[Row]], depth: int, more: int, seed: int
) -> None:
    problem, on, rows = drawn
    proof = proof_of(problem, on, rows, depth)
    rng = random.Random(seed)
    costs = tuple(rng.randint(0, 2 * cost + 1) for cost in problem.graph.op_cost_ns)
    budget = max(0, problem.budget_bytes + more)
    for graph in (problem.graph, replace(problem.graph, op_cost_ns=costs)):
        target = Problem(graph, budget)
        moved = carried(proof, target)
        try:
            bound = prove(target, moved).bound_ns
        except InvalidProof:
            continue
        least = optimum(target).cost_ns
        assert least is None or bound <= least
        if graph is problem.graph and more <= 0:
            before = prove(problem, proof).bound_ns if not any_empty_fails(problem, proof) else None
            assert bound is None or before is None or bound >= before - 1  # scaling rounds multipliers


def any_empty_fails(problem: Problem, proof: StageProof) -> bool:
    try:
        return prove(problem, proof).bound_ns is None
    except InvalidProof:
        return True


def pair_proof(problem: Problem) -> PairProof | None:
    """By brute force over sets of pairs: the largest consistent one, and an op that it makes impossible."""
    graph = problem.graph
    never = {(u, v) for u in range(graph.values) for v in range(u, graph.values)}
    for _ in range(len(never) + 1):
        good = {pair for pair in never if holds(problem, PairProof("", 0, tuple(sorted(never))), pair)}
        if good == never:
            break
        never = good
    for op in range(graph.ops):
        proof = PairProof(problem_digest(problem), op, tuple(sorted(never)))
        try:
            prove(problem, proof)
        except InvalidProof:
            continue
        return proof
    return None


def holds(problem: Problem, proof: PairProof, pair: tuple[int, int]) -> bool:
    """Whether one pair follows from all of them, told by the checker's own complaint about others."""
    return PairCheck(problem.graph, problem.budget_bytes - problem.graph.fixed_bytes, proof).apart(*pair)


def test_pairs_prove_only_what_brute_force_confirms() -> None:
    proved = 0
    for seed in range(150):
        graph = little_graph(seed, 3 + seed % 4)
        for budget in range(graph.fixed_bytes + 1, graph.fixed_bytes + 16, 3):
            problem = Problem(graph, budget)
            proof = pair_proof(problem)
            if proof is not None:
                proved += 1
                assert optimum(problem).cost_ns is None
    assert proved > 100


def test_pairs_with_one_too_many_are_refused() -> None:
    refused = 0
    for seed in range(40):
        graph = little_graph(seed, 5)
        problem = Problem(graph, graph.fixed_bytes + 14)
        if optimum(problem).cost_ns is None:
            continue
        every = [(u, v) for u in range(graph.values) for v in range(u, graph.values)]
        for count in (1, 2, 3):
            for pairs in list(combinations(every, count))[:60]:
                for op in range(graph.ops):
                    with pytest.raises(InvalidProof):
                        prove(problem, PairProof(problem_digest(problem), op, pairs))
                    refused += 1
    assert refused > 1000


def test_a_certificate_is_for_its_problem_alone() -> None:
    problem = Problem(Graph((1, 2), ((), (0,)), (0, 1), (3, 4)), 9)
    proof = StageProof(problem_digest(problem), (1,), (), (), 1, (Leaf(()),))
    assert prove(problem, proof).bound_ns == 3
    with pytest.raises(InvalidProof, match="another problem"):
        prove(Problem(problem.graph, 8), proof)


@pytest.mark.parametrize("multiplier", [-1, 0])
def test_multipliers_are_positive(multiplier: int) -> None:
    graph = Graph((1, 2), ((), (0,)), (0, 1), (3, 4))
    proof = StageProof(problem_digest(Problem(graph, 90)), (0, 1), (), (("memory", 1),), 1, (Leaf(((0, multiplier),)),))
    with pytest.raises(InvalidProof, match="positive"):
        prove(Problem(graph, 90), proof)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", "remat-proof/2"),
        ("by", "magic"),
        ("problem", "x"),
        ("cuts", [0.5]),
        ("spans", [[1]]),
        ("rows", [[1, 2]]),
        ("rows", [["read", -(2**54)]]),
        ("rows", [["read", True]]),
        ("denominator", 0),
        ("nodes", [["bound", [1]]]),
        ("nodes", [["leaf", []]]),
        ("extra", 1),
    ],
)
def test_malformed_certificates_are_refused(path: str, value: object) -> None:
    data = StageProof("0" * 64, (1,), (), (("memory", 1),), 1, (Leaf(((0, 1),)),)).to_json()
    assert read_proof(data)
    with pytest.raises(InvalidData):
        read_proof({**data, path: value})
