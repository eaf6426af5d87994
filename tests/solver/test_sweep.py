"""Sweeps over budgets and the largest batch: what neighbours know of each other, against exact optima."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import pytest
from benchmarks.graphs.architectures import ARCHITECTURES, training_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples, graphs, layered, linear_graphs
from remat_ir import Answer, Graph, InvalidData, Link, Problem, Status, graph_of, plain_peak, verify, verify_answer
from remat_ir.batch import BatchFamily, one_forward_pass_more
from remat_solver import solve
from remat_solver.batch import max_batch
from remat_solver.bounds import least_need
from remat_solver.deadline import Deadline
from remat_solver.sweep import Curve, sweep
from solver.brute import agrees, optimum

SETTINGS = settings(max_examples=examples(40), deadline=None, derandomize=True)
LAYERS = 8
CHAIN = graph_of(
    [3, 4, 5, 2, 6, 6, 8, 10, *[5] * LAYERS],
    [4, 6, 5, 3, 4, 3, 5, 4, *[3] * LAYERS],
    layered(LAYERS),
    backward_from=LAYERS,
    fixed_bytes=10,
)


def consistent(graph: Graph, answers: tuple[Answer, ...]) -> None:
    """Plans hold, costs and bounds never rise with the budget, and infeasible ends before feasible begins.

    What is said of the whole space, its certificate proves.
    """
    for answer in answers:
        proved = verify_answer(Problem(graph, answer.budget_bytes), answer)
        if answer.status is Status.INFEASIBLE:
            assert proved.infeasible or answer.claimed_by is not None
        elif answer.bound_ns is not None and not answer.restricted_to:
            assert answer.bound_ns <= proved.bound_ns
    for low, high in pairwise(answers):
        assert low.budget_bytes < high.budget_bytes
        assert high.status is not Status.INFEASIBLE or low.status is Status.INFEASIBLE
        if low.cost_ns is not None:
            assert high.cost_ns <= low.cost_ns
        if low.bound_ns is not None and high.bound_ns is not None:
            assert low.bound_ns >= high.bound_ns or low.restricted_to or high.restricted_to


@SETTINGS
@given(graph=graphs(most_ops=5, most_values=2), parts=st.lists(st.integers(0, 20), min_size=1, max_size=4))
def test_sweeps_enclose_the_optimum(graph: Graph, parts: list[int]) -> None:
    budgets = [plain_peak(graph) * part // 20 for part in parts]
    answers = sweep(graph, budgets, max_gap=0, time_limit_s=2)
    assert [answer.budget_bytes for answer in answers] == sorted(set(budgets))
    consistent(graph, answers)
    for answer in answers:
        problem = Problem(graph, answer.budget_bytes)
        agrees(problem, answer, optimum(problem).cost_ns)


@pytest.mark.thorough
@SETTINGS
@given(graph=linear_graphs(most_layers=5))
def test_curves(graph: Graph) -> None:
    answers = sweep(graph, points=6, max_gap=0, time_limit_s=1, method="chen-greedy")
    consistent(graph, answers)
    assert 1 <= len(answers) <= 6
    assert answers[-1].budget_bytes == plain_peak(graph)
    assert answers[-1].status is Status.OPTIMAL


@pytest.mark.thorough
def test_curve_spreads_over_the_steps() -> None:
    """On a long chain the points of the curve find different costs."""
    graph = training_graph(ARCHITECTURES["vgg16"](), 1)
    answers = sweep(graph, points=8, method="linearized-greedy")
    consistent(graph, answers)
    assert len({answer.cost_ns for answer in answers if answer.cost_ns is not None}) >= 4


def test_a_neighbour_settles_without_a_solve() -> None:
    """Once the plain plan is known at its peak, every larger budget is answered by it."""
    told: list[Answer] = []
    peak = plain_peak(CHAIN)
    answers = sweep(CHAIN, [peak, peak + 5, peak + 9], method="checkpoint-all", on_answer=told.append)
    assert [answer.status for answer in answers] == [Status.OPTIMAL] * 3
    assert len(told) == 3


def test_what_a_sweep_refuses() -> None:
    with pytest.raises(InvalidData, match="at least one budget"):
        sweep(CHAIN, [])
    with pytest.raises(InvalidData, match="at least 2 points, not 1"):
        sweep(CHAIN, points=1)
    with pytest.raises(InvalidData, match="unknown method"):
        sweep(CHAIN, [50], method="none")
    for seconds in (0, -1.0):
        with pytest.raises(InvalidData, match="time_limit_s must be a positive number"):
            sweep(CHAIN, [50], method="greedy", time_limit_s=seconds)
        with pytest.raises(InvalidData, match="time_limit_s must be a positive number"):
            max_batch(CHAIN, 200, method="greedy", time_limit_s=seconds)


def test_a_solve_that_begins_as_the_time_for_all_ends_is_no_wrong_limit() -> None:
    answer = Curve(CHAIN).solve(40, "greedy", None, Deadline(0.0), None, None)
    assert answer.budget_bytes == 40


@pytest.mark.thorough
def test_out_of_time_is_answered_from_neighbours() -> None:
    answers = sweep(CHAIN, [30, 40, 50], total_s=1e-9)
    assert [answer.limit for answer in answers] == ["time"] * 3


def test_what_is_left_of_a_cancelled_sweep_is_cancelled() -> None:
    told: list[Answer] = []
    answers = sweep(CHAIN, [30, 40, 50], method="greedy", on_answer=told.append, cancelled=lambda: bool(told))
    assert [answer.budget_bytes for answer in told] == [50]
    assert [answer.limit for answer in answers[:2]] == ["cancel"] * 2
    assert [answer.status for answer in answers[:2]] == [Status.CANCELLED] * 2


@SETTINGS
@given(
    graph=graphs(least_ops=3, most_ops=5, most_values=2, fixed=True),
    budget=st.integers(10, 120),
    most=st.none() | st.integers(0, 60),
    batch=st.sampled_from([1, 1, 2, 3]),
    whole=st.booleans(),
)
def test_largest_batch_against_all_batches(
    graph: Graph, budget: int, most: int | None, batch: int, whole: bool
) -> None:
    """By trying each batch with the exact optimum: floor ≤ truth ≤ ceiling; at any capture, all growing or not."""
    values = tuple(range(graph.values)) if whole else None
    if graph.backward_from is None and most is None:
        with pytest.raises(InvalidData, match="no backward pass"):
            max_batch(graph, budget, batch=batch, values=values)
        return
    family = BatchFamily(graph, budget, batch, values)
    limit = one_forward_pass_more(graph) if most is None else most
    told: dict[str, Any] = {"batch": batch, "values": values, "most_cost_ns": most}
    try:
        family.ceiling(lambda one: least_need(one)[0])
    except InvalidData:
        assert least_need(replace(family.scaled(100 * batch), fixed_bytes=0))[0] < 100
        with pytest.raises(InvalidData, match="nothing in the graph"):
            max_batch(graph, budget, **told)
        return
    found = max_batch(graph, budget, **told, time_limit_s=1, total_s=4)
    truth = 0
    for size in range(1, budget * batch + 1):
        cost = optimum(family.at(size)).cost_ns
        if cost is None or cost > limit:
            break
        truth = size
    assert found.batch <= truth <= found.bound
    if found.batch:
        assert found.answer.cost_ns is not None
        verify(Problem(family.scaled(found.batch), budget), found.answer.plan)
        assert verify(family.at(found.batch), found.answer.plan).cost_ns <= limit


@pytest.mark.thorough
def test_the_input_grows_too() -> None:
    """10 fixed bytes of which 6 are the input: batch 3 leaves (100 − 4) / 3 bytes for one sample."""
    with_input = max_batch(CHAIN, 100, batch_bytes=6, method="linearized-greedy")
    without = max_batch(CHAIN, 100, method="linearized-greedy")
    assert with_input.batch <= without.batch
    assert BatchFamily(CHAIN, 100, batch_bytes=6).scaled(3).fixed_bytes == 22
    assert with_input.answer.budget_bytes == 100


def test_checkpoint_all_is_equation_ten() -> None:
    """max B = ⌊(M − M_fixed) / (M@1 − M_fixed)⌋."""
    peak = plain_peak(CHAIN)
    found = max_batch(CHAIN, 1000, method="checkpoint-all")
    assert found.batch == (1000 - 10) // (peak - 10)


@pytest.mark.thorough
@SETTINGS
@given(graph=linear_graphs(most_layers=6), memory=st.integers(20, 400), freeing=st.sampled_from(["last-use", "paper"]))
@pytest.mark.parametrize("method", ["linearized-greedy", "ap-sqrt", "griewank"])
def test_a_baselines_largest_batch_is_equation_ten(method: str, graph: Graph, memory: int, freeing: str) -> None:
    """One sample more, and no plan of the baseline is both cheap enough and small enough; at the batch one is."""
    family = BatchFamily(graph, memory)
    options = {} if method == "griewank" else {"freeing": freeing}
    try:
        found = max_batch(graph, memory, method=method, options=options)
    except InvalidData:  # nothing grows
        return
    most = one_forward_pass_more(graph)

    def possible(size: int) -> bool:
        cost = solve(family.at(size), method=method, max_gap=0, options=options).cost_ns
        return cost is not None and cost <= most

    assert not possible(found.batch + 1)
    assert found.batch == 0 or possible(found.batch)
    if found.answer is not None:
        verify(Problem(family.scaled(found.batch), memory), found.answer.plan)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("network", "method", "sizes"), [("vgg19", "linearized-greedy", (289, 272)), ("segnet", "ap-greedy", (60, 50))]
)
def test_largest_batches_of_the_papers_networks(network: str, method: str, sizes: tuple[int, int]) -> None:
    """In 16 GB, the input not counted: with values freed after their last use, and as the paper counts."""
    graph = training_graph(ARCHITECTURES[network](), 1)
    subject = graph.with_fixed(graph.fixed_bytes - 4 * prod(ARCHITECTURES[network]().shape))
    told = [max_batch(subject, 16 * 10**9, method=method, options={"freeing": each}) for each in ("last-use", "paper")]
    assert tuple(found.batch for found in told) == sizes


@pytest.mark.slow
def test_largest_batches_of_resnet50() -> None:
    graph = training_graph(ARCHITECTURES["resnet50"](), 1)
    image = 4 * prod(ARCHITECTURES["resnet50"]().shape)
    for memory, grows, size in ((16 * 2**30, image, 506), (16 * 10**9, image, 471), (16 * 10**9, 0, 479)):
        subject = graph if grows else graph.with_fixed(graph.fixed_bytes - image)
        assert max_batch(subject, memory, batch_bytes=grows, method="linearized-greedy").batch == size


def test_batches_refused() -> None:
    with pytest.raises(InvalidData, match="batch_bytes must be from 0 to the 10 fixed bytes, not 11"):
        max_batch(CHAIN, 100, batch_bytes=11)
    with pytest.raises(InvalidData, match="move nothing to the host"):
        max_batch(CHAIN.with_link(Link(10**9, 10**9, host_bytes=5)), 100)
    assert max_batch(CHAIN, 5).batch == 0
    assert max_batch(CHAIN, 1000, most_cost_ns=0).bound == 0
