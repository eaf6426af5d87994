"""Cutting planes until no point is left that is cheap enough, and the certificates of it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.graphs.instances import instance

from remat_ir import Problem, budget_at, verify_answer
from remat_ir.proof import Leaf, StageProof, carried, prove
from remat_ir.proof.check import KIND
from remat_ir.proof.rows import CHEAPER
from remat_solver import solve
from remat_solver.array_view import view_of
from remat_solver.backends.engine import Engine
from remat_solver.backends.outcome import Outcome
from remat_solver.deadline import Deadline
from remat_solver.staged.certificate import Certifier
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
    for name, budget in itertools.product(("gpt-3", "gpt-4", "gpt-4-whole"), (0.75, 0.6)):
        graph = instance(name)
        problem = Problem(graph, budget_at(graph, budget))
        answer = solve(problem, time_limit_s=60)
        assert isinstance(answer.proof, StageProof)
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
    graph = instance("gpt-4-whole")
    problem = Problem(graph, budget_at(graph, 0.75))
    answer = solve(problem, time_limit_s=60)
    assert answer.gap <= 1e-3
    assert verify_answer(problem, answer).bound_ns == answer.bound_ns
    assert isinstance(answer.proof, StageProof)
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
