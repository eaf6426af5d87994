"""Certificates made shorter: what they prove is what was asked for, and no more than brute force finds."""

from __future__ import annotations

import json
import random
import zlib
from fractions import Fraction

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from drawn import examples
from remat_ir import Problem, plain_peak
from remat_ir.graph import working_set
from remat_ir.proof import InvalidProof, StageProof, prove
from remat_ir.proof.certificate import Row
from remat_ir.proof.rows import Relaxation
from remat_solver.backends.engine import Engine
from remat_solver.deadline import Deadline
from remat_solver.program import Floats, Program
from remat_solver.staged.shorten import shortened
from solver.brute import optimum
from solver.little import little_graph
from solver.proof_rows import every_row, proof_of, random_covers, relaxation, relaxed


def less(
    engine: Engine, problem: Problem, on: Relaxation, proof: StageProof, bound_ns: int, seconds: float | None
) -> StageProof:
    def solve(program: Program) -> Floats | None:
        return engine.lp(program).x

    return shortened(on, proof, bound_ns, problem.graph.total_cost_ns, solve, Deadline(seconds))


@settings(max_examples=examples(25), deadline=None)
@given(relaxed(4), st.integers(0, 3), st.fractions(0, 1))
def test_a_shorter_certificate_proves_what_is_asked_for(
    engine: Engine, drawn: tuple[Problem, Relaxation, list[Row]], depth: int, share: Fraction
) -> None:
    problem, on, rows = drawn
    proof = proof_of(problem, on, rows, depth)
    try:
        bound = prove(problem, proof).bound_ns
    except InvalidProof:
        assume(False)
    assume(bound is not None)
    total = problem.graph.total_cost_ns
    wanted = total + int(share * (bound - total))
    shorter = less(engine, problem, on, proof, wanted, None)
    proved = prove(problem, shorter).bound_ns
    assert proved >= wanted
    least = optimum(problem).cost_ns
    assert least is None or proved <= least


def length(proof: StageProof) -> int:
    return len(zlib.compress(json.dumps(proof.to_json()["nodes"]).encode()))


def test_trees_whose_leaves_prove_a_little_more_than_they_must_become_shorter(engine: Engine) -> None:
    before = after = 0
    for seed in range(12):
        graph = little_graph(seed, 9)
        problem = Problem(graph, (working_set(graph).least_bytes + plain_peak(graph)) // 2)
        on = relaxation(problem, (3, 5, 8), ())
        rows = every_row(on, random_covers(on, random.Random(seed)))
        proof = proof_of(problem, on, rows, 4)
        bound = prove(problem, proof).bound_ns
        if bound is not None and bound > graph.total_cost_ns:
            wanted = bound - (bound - graph.total_cost_ns) // 10
            shorter = less(engine, problem, on, proof, wanted, None)
            proved = prove(problem, shorter).bound_ns
            assert proved >= wanted
            before, after = before + length(proof), after + length(shorter)
    assert 0 < 10 * after < 9 * before


def test_leaves_stay_as_they_are_once_the_time_is_up(engine: Engine) -> None:
    graph = little_graph(3, 8)
    problem = Problem(graph, plain_peak(graph) - 1)
    on = relaxation(problem, (3, 7), ())
    proof = proof_of(problem, on, every_row(on, []), 3)
    assert less(engine, problem, on, proof, graph.total_cost_ns + 1, 0.0) == proof
