"""Every stage program has exactly the optimum that brute force finds in its space, and holds every plan of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples, layered
from remat_ir import Graph, Problem, graph_of, plain_peak, plan_of, verify
from remat_ir.plan import without_unread
from remat_solver.array_view import ArrayView, view_of
from remat_solver.backends.engine import Engine
from remat_solver.deadline import Deadline, TimeUp
from remat_solver.formulate.checkmate import checkmate
from remat_solver.formulate.formulation import Formulation, matrices_of, stages
from remat_solver.formulate.tight import any_order, collapsed_stages, forward, reordered, tight
from solver.brute import ANY_IN_STAGES, FORWARD_OPS, ONE_PER_STAGE, optimum
from solver.little import little_graph, little_problems, problems
from solver.stops import After
from tiers import first

QUICK = settings(max_examples=examples(40), deadline=None, derandomize=True)


def agrees(engine: Engine, problem: Problem, formulation: Formulation, space: str, sweeps: int = 1) -> bool:
    """Whether there is a plan at all; fails unless program and brute force agree on everything."""
    expected = optimum(problem, space, sweeps)
    outcome = engine.run(formulation.program, deadline=Deadline(60))
    if expected.cost_ns is None:
        assert outcome.status == "infeasible", outcome
        return False
    assert outcome.status == "optimal", outcome
    assert outcome.x is not None
    assert formulation.bound_ns(outcome.bound) == expected.cost_ns
    assert verify(problem, formulation.plan(outcome.x)).cost_ns == expected.cost_ns
    start = formulation.start(expected.plan.computes)
    assert start is not None, "the program cuts off an optimal plan"
    assert formulation.program.objective(start) * formulation.unit_ns == pytest.approx(expected.cost_ns)
    return True


@QUICK
@given(problem=problems(most_ops=6))
def test_checkmate_is_exact(engine: Engine, problem: Problem) -> None:
    agrees(engine, problem, checkmate(view_of(problem)), ONE_PER_STAGE)


@settings(QUICK, max_examples=examples(80))
@given(problem=problems(most_ops=6))
def test_tight_is_exact(engine: Engine, problem: Problem) -> None:
    agrees(engine, problem, tight(view_of(problem)), ONE_PER_STAGE)


@QUICK
@given(problem=problems(most_ops=5), sweeps=st.integers(2, 3), program=st.sampled_from((tight, checkmate)))
def test_several_sweeps_are_exact(
    engine: Engine, problem: Problem, sweeps: int, program: Callable[[ArrayView, int], Formulation]
) -> None:
    agrees(engine, problem, program(view_of(problem), sweeps), ONE_PER_STAGE, sweeps)


@settings(QUICK, max_examples=examples(60))
@given(problem=problems(most_ops=7).filter(lambda problem: problem.graph.backward_from is not None))
def test_forward_is_exact_in_its_space(engine: Engine, problem: Problem) -> None:
    agrees(engine, problem, forward(view_of(problem)), FORWARD_OPS)


@settings(QUICK, max_examples=examples(25))
@given(problem=problems(most_ops=4))
def test_any_order_is_exact(engine: Engine, problem: Problem) -> None:
    formulation = any_order(problem)
    expected = optimum(problem, ANY_IN_STAGES)
    outcome = engine.run(formulation.program, deadline=Deadline(60))
    if expected.cost_ns is None:
        assert outcome.status == "infeasible"
        return
    assert outcome.x is not None
    assert formulation.bound_ns(outcome.bound) == expected.cost_ns
    other, plan, order = reordered(problem, formulation.sequence(outcome.x))
    assert sorted(order) == list(range(problem.graph.ops))
    assert verify(other, plan).cost_ns == expected.cost_ns
    fixed = optimum(problem, ONE_PER_STAGE)
    if fixed.plan is not None:
        assert formulation.start(fixed.plan.computes) is not None


def test_problems_drawn_here_are_not_all_trivial(engine: Engine) -> None:
    paid = 0
    for seed in range(8):
        for problem in little_problems(seed, 7, rich=seed % 2 == 0, budgets=2):
            formulation = tight(view_of(problem))
            paid += agrees(engine, problem, formulation, ONE_PER_STAGE)
    assert paid >= 4, "below the plain peak every plan recomputes something"


@pytest.mark.parametrize("make", [checkmate, tight])
@pytest.mark.parametrize("fraction", first(1, [0.75, 0.6, 0.9]))
def test_five_unit_layers(engine: Engine, make: Callable[..., Formulation], fraction: float) -> None:
    graph = graph_of([1] * 8, [1] * 8, layered(4))
    problem = Problem(graph, int(fraction * plain_peak(graph)))
    agrees(engine, problem, make(view_of(problem)), ONE_PER_STAGE)


def test_rows_of_the_paper_one_for_one() -> None:
    """Counts of a chain of n ops: O(n²) rows and columns as printed, none for what the paper does not have."""
    n = 6
    graph = graph_of([1] * n, [1] * n, [[i - 1] if i else [] for i in range(n)])
    program = checkmate(view_of(Problem(graph, 100))).program
    triangle, below = n * (n + 1) // 2, n * (n - 1) // 2
    free = sum(t for t in range(n))  # FREE[t,i,k] for the edges (k−1,k), k ≤ t
    assert program.columns == triangle + below + free + triangle  # R, S, FREE, U
    assert int(program.integer.sum()) == triangle + below + free
    # (1b) and 7b, 7c per FREE; (1c) per S; (2), (3) per U
    assert program.rows == 3 * free + below + triangle


def test_collapse_keeps_all_that_is_of_use_not_what_is_live() -> None:
    # value 0 is live in no plain plan after op 1, but recomputing value 1 later would need it
    graph = graph_of([1, 1, 1, 1], [4, 2, 1, 1], [[], [0], [1], [1, 2]])
    assert collapsed_stages(view_of(Problem(graph, 6))) == 2
    assert collapsed_stages(view_of(Problem(graph, 7))) == 3
    assert collapsed_stages(view_of(Problem(graph, 5))) == 1


@QUICK
@given(
    seed=st.integers(0, 10**6), ops=st.integers(1, 8), extra=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6)))
)
def test_matrices_hold_any_set_of_recomputations(seed: int, ops: int, extra: list[tuple[int, int]]) -> None:
    graph = little_graph(seed, ops)
    view, stage_of = view_of(Problem(graph, 0)), stages(graph.ops)
    chosen = {(stage, op) for stage, op in extra if op < stage < ops and stage <= view.last_stage[op]}
    sequence = [op for stage in range(ops) for op in range(stage + 1) if op == stage or (stage, op) in chosen]
    lean = without_unread(graph, sequence)
    matrices = matrices_of(view, stage_of, sequence)
    rows, columns = np.nonzero(matrices.computed)
    assert tuple(columns.tolist()) == lean
    assert set(zip(rows.tolist(), columns.tolist(), strict=True)) <= chosen | {(op, op) for op in range(ops)}
    peak = 2**50
    assert verify(Problem(graph, peak), plan_of(graph, lean)).peak_bytes <= (
        verify(Problem(graph, peak), plan_of(graph, sequence)).peak_bytes
    )


def test_sequences_beyond_the_space_have_no_start() -> None:
    graph = graph_of([1, 1, 1], [1, 1, 1], [[], [0], [0, 1]])
    view = view_of(Problem(graph, 0))
    assert matrices_of(view, stages(3, 1), (0, 1, 0, 1, 0, 2)) is not None  # merged: ops 0 and 1 once each
    assert matrices_of(view, stages(3, 2), (0, 1, 0, 1, 0, 2)) is not None
    assert matrices_of(view, stages(3, 1, first=2), (0, 0, 1, 2)) is not None  # dropped: there is room before op 2
    apart = view_of(Problem(graph_of([1] * 4, [1] * 4, [[], [], [], [0, 1, 2]]), 0))
    backwards = (0, 1, 2, 2, 1, 0, 3)  # three ascending runs
    assert matrices_of(apart, stages(4, 1), backwards) is not None  # put into op order
    assert matrices_of(apart, stages(4, 2), backwards) is None
    assert matrices_of(apart, stages(4, 3), backwards) is not None


def test_reordering_is_a_valid_problem_of_the_same_ops() -> None:
    for seed, rich in product(range(20), (True, False)):
        graph: Graph = little_graph(seed, 6, rich=rich)
        problem = Problem(graph, 2**50)
        other, plan, order = reordered(problem, range(6))
        assert order == tuple(range(6))
        assert other.graph.op_inputs == graph.op_inputs
        assert verify(other, plan) == verify(problem, plan_of(graph, range(6)))


@pytest.mark.parametrize("program", ["checkmate", "tight", "forward", "any-order"])
def test_writing_a_program_stops_where_it_is_told_to(program: str) -> None:
    """It looks many times, more often in a larger graph, and nothing is written after the first look that says stop."""

    def polls(ops: int, most: float = float("inf")) -> int:
        graph, stop = replace(little_graph(3, ops), backward_from=ops // 2), After(most)
        problem = Problem(graph, plain_peak(graph))
        make = {"checkmate": checkmate, "tight": tight, "forward": forward}.get(program)
        with pytest.raises(TimeUp) if math.isfinite(most) else nullcontext():
            any_order(problem, stop) if make is None else make(view_of(problem), stop=stop)
        return stop.polls

    ops = 16 if program == "any-order" else 40
    whole = polls(ops)
    assert whole >= 10
    assert all(polls(ops, most) == most + 1 for most in range(whole))
    assert program == "checkmate" or polls(4 * ops) > whole


@pytest.mark.parametrize("make", [checkmate, tight])
def test_writing_a_start_stops_where_it_is_told_to(make: Callable[..., Formulation]) -> None:
    graph = replace(little_graph(3, 40), backward_from=20)
    formulation = make(view_of(Problem(graph, plain_peak(graph))))
    assert formulation.start(range(40), After(3)) is not None
    for most in range(3):
        with pytest.raises(TimeUp):
            formulation.start(range(40), After(most))
