"""Cutting planes and their certificates: until no point is left that is cheap enough, and lifted covers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from benchmarks.graphs.instances import instance
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples, posed
from remat_ir import Problem, budget_at, verify_answer
from remat_ir.greedy import greedy_plan
from remat_ir.proof import InvalidProof, Leaf, StageProof, carried, prove
from remat_ir.proof.check import KIND
from remat_ir.proof.rows import CHEAPER
from remat_solver import solve
from remat_solver.array_view import view_of
from remat_solver.backends.engine import Engine
from remat_solver.backends.highs_cuts import lifted_cover
from remat_solver.backends.outcome import Outcome
from remat_solver.deadline import Deadline
from remat_solver.incumbent import Incumbent
from remat_solver.staged.certificate import Certifier
from remat_solver.staged.prove import Proof
from remat_solver.staged.rows import Round, Rows, write
from remat_solver.staged.scale import Scale, balance_of, balanced, row_factors

EXACT = Scale(1, 1)


def grown(engine: Engine, problem: Problem, cuts: set[int], extra: int) -> tuple[Round, Outcome]:
    """The tree that is to prove `extra` ns more than all ops once."""
    round_ = write(view_of(problem), Rows({*cuts, problem.graph.ops - 1}), EXACT, cutoff_ns=extra)
    program, factor = balanced(round_.program), balance_of(round_.program)
    outcome = engine.tree(
        program,
        cutoff=factor * extra,
        deadline=Deadline(60),
        stopped=None,
        turn_s=0.5,
        factor=row_factors(round_.program),
        cutoff_row=(program.rows - 1, factor * extra),
    )
    return round_, outcome


@pytest.mark.thorough
def test_no_more_is_proved_than_a_plan_costs(engine: Engine) -> None:
    """Asked for a little less than a plan costs, and for more: that is never certified."""
    emptied = limited = 0
    for name, budget in product(("gpt-3", "gpt-4", "gpt-4-whole"), (0.75, 0.6)):
        graph = instance(name)
        problem = posed(graph, budget)
        answer = solve(problem, time_limit_s=60)
        over = answer.cost_ns - graph.total_cost_ns
        for extra in (over * 990 // 1000, over + 1, over * 11 // 10):
            round_, outcome = grown(engine, problem, set(answer.proof.cuts), extra)
            bound = graph.total_cost_ns + extra
            shorter = (lambda _: None), Deadline(0.0)
            found = Certifier(problem).of_tree(round_, EXACT, outcome.tree, bound, bound, shorter)
            assert found.bound_ns is None or found.bound_ns <= answer.cost_ns
            emptied += outcome.tree.plain_row is not None
            limited += any(row[0] == CHEAPER for row in found.proof.rows)
            assert extra <= over or outcome.tree.plain_row is None, "there is a point that cheap"
    assert emptied >= 2
    assert limited >= 1


@pytest.mark.thorough
def test_equal_layers_take_one_vector_where_a_tree_has_thousands_of_leaves() -> None:
    problem = posed(instance("gpt-4-whole"), 0.75)
    answer = solve(problem, time_limit_s=60)
    assert answer.gap <= 1e-3
    assert verify_answer(problem, answer).bound_ns == answer.bound_ns
    assert [type(node) for node in answer.proof.nodes] == [Leaf]
    assert any(row[0] == KIND for row in answer.proof.rows)


@pytest.mark.thorough
def test_what_is_kept_for_other_costs_holds_there() -> None:
    graph = instance("gpt-4-whole")
    answer = solve(Problem(graph, budget_at(graph, 0.75)), time_limit_s=60)
    assert isinstance(answer.proof, StageProof)
    assert answer.bound_ns is not None
    rng = np.random.default_rng(3)
    costs = tuple((np.array(graph.op_cost_ns) * rng.uniform(0.9, 1.1, graph.ops)).astype(int).tolist())
    other = Problem(replace(graph, op_cost_ns=costs), budget_at(graph, 0.75))
    bound = prove(other, carried(answer.proof, other)).bound_ns
    again = solve(other, time_limit_s=60)
    assert bound <= again.cost_ns
    assert bound - other.graph.total_cost_ns > 0.6 * (again.cost_ns - other.graph.total_cost_ns)


# --- lifted covers


def most_of(weight: list[int], room: int, alpha: dict[int, int]) -> int:
    """The most that the weights of what fits add up to, by all subsets."""
    return max(
        sum(alpha.get(i, 0) for i, chosen in enumerate(subset) if chosen)
        for subset in product((0, 1), repeat=len(weight))
        if sum(a for a, chosen in zip(weight, subset, strict=True) if chosen) <= room
    )


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_what_fits_is_within_a_lifted_cover_and_no_weight_could_be_greater(data: st.DataObject) -> None:
    weight = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    room = data.draw(st.integers(0, 40))
    x = data.draw(st.lists(st.sampled_from((0.0, 0.3, 0.7, 1.0)), min_size=len(weight), max_size=len(weight)))
    made = lifted_cover(weight, room, x)
    if made is None:
        assert sum(a for a, there in zip(weight, x, strict=True) if there) <= room
        return
    alpha, most = made
    assert most_of(weight, room, alpha) <= most
    for i, a in enumerate(weight):
        if a <= room:
            assert most_of(weight, room, {**alpha, i: alpha.get(i, 0) + 1}) > most


def test_a_certificate_of_lifted_covers_is_checked_weight_by_weight() -> None:
    problem = posed(instance("unet-2-whole"), 0.5)
    incumbent = Incumbent(problem, Deadline(120), 0.0, certify=True)
    plan = greedy_plan(problem.graph, problem.budget_bytes)
    assert plan is not None
    incumbent.offer(plan, "greedy")
    proof = Proof(incumbent)
    with Engine("highs") as engine:
        proof._linear(engine)
        proof._grow(engine, 1e-3)
    certificate = incumbent.known.proof
    covers = [r for r, row in enumerate(certificate.rows) if row[0] == "cover"]
    assert covers
    assert prove(problem, certificate).bound_ns == incumbent.bound_ns
    row = certificate.rows[covers[0]]
    tighter = (*row[:2], int(row[2]) - 1, *row[3:])
    rows = (*certificate.rows[: covers[0]], tighter, *certificate.rows[covers[0] + 1 :])
    with pytest.raises(InvalidProof):
        prove(problem, replace(certificate, rows=rows))
