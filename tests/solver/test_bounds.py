"""Bounds that were none: each with an instance, and the check that refutes a bound by a plan of its space."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples, graphs, posed, problems
from remat_ir import Graph, Problem, Status, graph_of, verify
from remat_ir.graph import working_set
from remat_ir.greedy import greedy_plan
from remat_ir.restrictions import (
    FORWARD_OPS,
    ONE_PER_STAGE,
    PERSISTENT,
    described,
    gap_sentence,
    optimal_sentence,
    recomputations_per_stage,
)
from remat_solver import solve
from remat_solver.backends.engine import Engine
from remat_solver.backends.outcome import Best
from remat_solver.backends.wire import Message
from remat_solver.deadline import Deadline
from remat_solver.program import INFINITY, Builder, Floats, Program, Term
from remat_solver.sweep import Curve
from solver.brute import agrees, optimum
from solver.little import little_graph
from tiers import first

SETTINGS = settings(max_examples=examples(60), deadline=None, derandomize=True)


# --- engines


def covering(seed: int, columns: int = 40, rows: int = 30) -> Program:
    """Every row needs one of a few columns."""
    draw = np.random.default_rng(seed)
    builder = Builder()
    x = builder.variables(columns, cost=draw.integers(5, 30, columns))
    for _ in range(rows):
        some = draw.choice(columns, size=4, replace=False)
        builder.add_rows(1, [Term(np.zeros(4, dtype=int), x[some])], lower=1.0)
    return builder.program()


@pytest.mark.parametrize("seed", first(2, range(4)))
def test_a_partial_start_gives_no_bound(seed: int) -> None:
    """A start of which every second column is known, at 1: no streamed bound is above the optimum of the program."""
    program = covering(seed)
    start = np.where(np.arange(program.columns) % 2 == 0, 1.0, np.nan)
    said: list[tuple[Floats | None, float]] = []
    with Engine("highs") as engine:
        without = engine.run(program, deadline=Deadline(20))
        outcome = engine.run(
            program, deadline=Deadline(20), start=start, on_improvement=lambda x, bound: said.append((x, bound))
        )
    assert without.status == outcome.status == "optimal"
    assert outcome.objective == pytest.approx(without.objective)
    assert said[0][0] is not None
    assert all(bound <= without.objective + 1e-6 for _, bound in said)


def mirrored(seed: int, ops: int) -> Graph:
    """A forward pass with skips, each backward op with two of its inputs; costs and sizes from 1 to 1000."""
    draw = random.Random(seed)
    skips = [{draw.randrange(op)} if draw.random() < 0.4 else set() for op in range(1, ops // 2)]
    inputs = [[], *(sorted({op, *skip}) for op, skip in enumerate(skips))]
    inputs += [sorted({op - 1, ops - 1 - op, max(0, ops - 2 - op)}) for op in range(ops // 2, ops)]
    costs, sizes = ([draw.randint(1, 1000) for _ in range(ops)] for _ in range(2))
    return graph_of(costs, sizes, inputs, backward_from=ops // 2)


@pytest.mark.parametrize(
    ("seed", "ops", "part", "best"), first(1, [(13, 24, 0.4, 22178), (9, 24, 0.6, 12047), (10, 30, 0.5, 18014)])
)
def test_staged_claims_no_more_than_a_plan_costs(seed: int, ops: int, part: float, best: int) -> None:
    """From a greedy plan, whose point in the program is a partial start: its own cost was taken for the bound."""
    problem = posed(mirrored(seed, ops), part)
    start = greedy_plan(problem.graph, problem.budget_bytes)
    assert verify(problem, start).cost_ns > best
    options = {"polish": False}
    answer = solve(problem, method="staged", max_gap=0, time_limit_s=3, start=start, options=options)
    assert answer.restricted_to == ()
    assert answer.bound_ns <= best


def test_a_run_that_contradicts_itself_proves_nothing() -> None:
    """A bound above the objective of the engine's own solution takes all bounds of the run with it."""
    program = covering(0)
    best = Best(program)
    best.take(Message("improvement", {"bound": 40.0}, {}))
    assert best.bound == 40.0
    best.take(Message("improvement", {"bound": 10_000.0}, {"x": np.ones(program.columns)}))
    best.take(Message("improvement", {"bound": 50.0}, {}))
    assert best.bound == -INFINITY


# --- dual bounds in floating point


@st.composite
def wild(draw: st.DrawFn) -> tuple[Program, np.ndarray]:
    """A program whose numbers differ by many orders of magnitude, and duals for which the sums cancel."""
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    columns, rows = draw(st.integers(1, 6)), draw(st.integers(1, 6))

    def numbers(*shape: int) -> np.ndarray:
        return np.asarray(
            chance.choice([-1.0, 1.0], shape) * chance.random(shape) * 2.0 ** chance.integers(-30, 40, shape)
        )

    builder = Builder()
    sides = np.sort(numbers(2, columns), axis=0)
    x = builder.variables(columns, cost=0.0, lower=sides[0], upper=sides[1], integer=False)
    matrix = numbers(rows, columns) * (chance.random((rows, columns)) < 0.8)
    for row in range(rows):
        low, high = np.sort(numbers(2))
        kind = chance.integers(0, 3)
        builder.add_rows(
            1,
            [Term(np.zeros(columns, dtype=int), x, matrix[row])],
            lower=-INFINITY if kind == 1 else low,
            upper=INFINITY if kind == 2 else high,
        )
    y = numbers(rows)
    program = builder.program(offset=float(numbers(1)[0]))
    if draw(st.booleans()):  # reduced costs that vanish but for rounding
        cost = np.asarray(y @ matrix)
        program = Program(**{**{name: getattr(program, name) for name in program.__dataclass_fields__}, "cost": cost})
    return program, y


def exact_dual_bound(program: Program, row_dual: np.ndarray) -> Fraction | None:
    """The bound of weak duality in rational numbers; None for −∞."""
    total = Fraction(program.offset)
    reduced = [Fraction(float(c)) for c in program.cost]
    for row in range(program.rows):
        y = Fraction(float(row_dual[row]))
        low, high = float(program.row_lower[row]), float(program.row_upper[row])
        if (y > 0 and np.isinf(low)) or (y < 0 and np.isinf(high)):
            continue
        for entry in range(program.row_start[row], program.row_start[row + 1]):
            reduced[program.row_index[entry]] -= y * Fraction(float(program.row_value[entry]))
        total += y * Fraction(low if y > 0 else high) if y else 0
    for cost, low, high in zip(reduced, program.lower.tolist(), program.upper.tolist(), strict=True):
        side = low if cost > 0 else high
        if cost and np.isinf(side):
            return None
        total += cost * Fraction(side) if cost else 0
    return total


@settings(max_examples=examples(400), deadline=None, derandomize=True)
@given(case=wild())
def test_dual_bound_is_below_the_exact_one(case: tuple[Program, np.ndarray]) -> None:
    program, y = case
    exact = exact_dual_bound(program, y)
    bound = program.dual_bound(y)
    assert Fraction(bound) <= exact


def test_dual_bound_with_columns_that_have_no_upper_bound() -> None:
    """The reduced cost of an unbounded column is exactly 0: the bound is finite; a little less, and it is −∞."""
    builder = Builder()
    x = builder.variables(3, cost=[0.3, 0.7, 5.0], upper=INFINITY, integer=False)
    builder.add_rows(2, [Term([0, 0, 1], x, [0.1, 0.7, 1.0])], lower=[1.0, 2.0])
    program = builder.program()
    assert program.dual_bound(np.array([1.0, 5.0])) == pytest.approx(11.0)
    assert program.dual_bound(np.array([np.nextafter(1.0, 2.0), 5.0])) == -INFINITY


# --- bounds and their spaces


@pytest.mark.parametrize(("seed", "budget", "best"), [(230, 22, 16), (271, 15, 33)])
def test_lp_rounding_names_the_space_of_its_bound(seed: int, budget: int, best: int) -> None:
    """Instances without a rounding that fits, on which the bound is above the optimum of the whole space."""
    problem = Problem(little_graph(seed, 6, consumes=False), budget)
    assert optimum(problem).cost_ns == best
    answer = solve(problem, method="lp-rounding", max_gap=0)
    assert answer.bound_ns <= best or answer.restricted_to == (ONE_PER_STAGE,)
    curve = Curve(problem.subject)
    curve.add(answer)
    assert curve.bound(budget) <= best


@pytest.mark.thorough
@SETTINGS
@given(problem=problems(graphs(most_ops=5, most_values=2)))
def test_no_answer_without_a_plan_stretches_a_bound(problem: Problem) -> None:
    """Where an answer says no restriction, its bound is below the optimum of the whole space."""
    whole, single = optimum(problem).cost_ns, optimum(problem, "one-per-stage").cost_ns
    for method, options in (
        ("lp-rounding", {"tries": 2}),
        ("lp-rounding", {"tries": 2, "program": "checkmate"}),
        ("milp-tight", {}),
    ):
        answer = solve(problem, method=method, max_gap=0, options=options)
        agrees(problem, answer, whole)
        least = single if answer.restricted_to else whole
        if least is not None and answer.bound_ns is not None:
            assert answer.bound_ns <= least
        if answer.status is Status.OPTIMAL:
            assert answer.cost_ns is not None
            assert least is None or answer.cost_ns <= least


@pytest.mark.parametrize("method", ["milp", "milp-tight", "milp-order"])
def test_what_floats_call_infeasible_is_no_proof(method: str) -> None:
    """A budget that the pairs of values refute, not the working set: the engine's word stays the engine's."""
    graph, budget = _without_plan()
    answer = solve(Problem(graph, budget), method=method, time_limit_s=20)
    assert answer.status is Status.NOTHING_FOUND
    assert answer.restricted_to == (ONE_PER_STAGE,)
    assert "proves nothing" in answer.message


def _without_plan() -> tuple[Graph, int]:
    """A small graph and its working set, in which it has no plan all the same."""
    for seed in range(200):
        graph = little_graph(seed, 5)
        budget = working_set(graph).least_bytes
        if optimum(Problem(graph, budget)).plan is None:
            return graph, budget
    raise AssertionError("no such graph")


def test_sentences_name_their_space() -> None:
    assert optimal_sentence(()) == "No plan costs less."
    assert optimal_sentence((PERSISTENT,)) == "No persistent schedule costs less; another plan may."
    assert described((FORWARD_OPS, recomputations_per_stage(3))).endswith("at most 3 recomputations per op and stage")
    assert gap_sentence(0.02, (), "the time is up") == "A plan within 2 % of the best possible; the time is up."
    assert "of the cheapest persistent schedule;" in gap_sentence(0.02, (PERSISTENT,), "the time is up")
