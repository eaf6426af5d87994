"""Plans of graphs with a link: copies have their place, plans are as good as brute force on small graphs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import graphs, linear_graphs, sequences
from remat_ir import Graph, InvalidPlan, Link, Offload, Problem, Status, graph_of, plan_of, replay, verify
from remat_solver import solve
from remat_solver.transfers.choose import chosen_gaps, pruned
from remat_solver.transfers.place import place, timetable
from remat_solver.transfers.search import relieved
from solver.test_transfer_bound import little_linked
from solver.transfer_brute import least_makespan

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)
ROOMY = 2**50
LINKS = st.builds(Link, st.sampled_from((10**9, 3 * 10**8)), st.sampled_from((10**9, 2 * 10**9)), st.integers(0, 2))


@SETTINGS
@given(graphs(most_ops=9) | linear_graphs(most_layers=5), LINKS, st.data())
def test_what_is_placed_is_a_plan(graph: Graph, link: Link, data: st.DataObject) -> None:
    """For any sequence and any gaps: as the verifier has it, makespan and peak."""
    graph = graph.with_link(link)
    order = data.draw(sequences(graph))
    table = timetable(graph, order)
    plain = plan_of(graph, order)
    assert table.load == [moment.peak_bytes for moment in replay(graph, plain) if moment.op is not None]
    moved = data.draw(st.lists(st.sampled_from(table.gaps), unique=True)) if table.gaps else []
    placed = place(table, ROOMY, moved)
    assert verify(Problem(graph, ROOMY), placed.plan).cost_ns == placed.cost_ns
    budget = max(table.load) - data.draw(st.integers(0, 8))
    gaps = chosen_gaps(table, budget)
    if gaps is None:
        return
    try:
        tight = place(table, budget, gaps)
    except InvalidPlan:
        return
    assert verify(Problem(graph, budget), tight.plan).cost_ns == tight.cost_ns
    fewer, left = pruned(Problem(graph, budget), table, gaps, tight, lambda: False)
    assert verify(Problem(graph, budget), fewer.plan).cost_ns == fewer.cost_ns <= tight.cost_ns
    assert set(left) <= set(gaps)


def test_a_copy_is_hidden_where_there_is_time() -> None:
    """Ten ops of 100 ns between a value's uses, its copies of 200 ns each: it leaves and is back at no cost."""
    chain = [[], [0], *([i] for i in range(1, 10)), [0, 10]]
    graph = graph_of([100] * 12, [200, *[10] * 5, 200, *[10] * 5], chain).with_link(Link(10**9, 10**9))
    answer = solve(Problem(graph, 230), time_limit_s=60)
    assert (answer.status, answer.cost_ns, answer.restricted_to) == (Status.OPTIMAL, 1200, ())
    assert answer.plan is not None
    assert Offload(0) in answer.plan.steps


def test_moved_values_take_memory_only_where_they_are_used() -> None:
    graph = graph_of([1, 1, 1, 1], [4, 5, 6, 1], [[], [0], [1], [0, 2]]).with_link(Link(1, 1))
    free = relieved(graph, {0})
    assert free.link is None
    peaks = [moment.peak_bytes for moment in replay(free, plan_of(free, range(4))) if moment.op is not None]
    assert peaks == [4, 9, 11, 11]


@pytest.mark.parametrize("seed", range(6))
def test_auto_is_no_better_than_brute_force_and_seldom_worse(seed: int) -> None:
    problem = little_linked(seed)
    best, _ = least_makespan(problem)
    answer = solve(problem, time_limit_s=2.0)
    if best is None:
        assert answer.plan is None
        return
    if answer.cost_ns is not None:
        assert answer.bound_ns is not None
        assert answer.cost_ns >= best
        if not answer.restricted_to:
            assert answer.bound_ns <= best
        assert answer.cost_ns <= 2 * best


@pytest.mark.parametrize("method", ["offload-only", "offload-all", "save-on-cpu", "layer-fractions"])
def test_what_others_do_is_a_plan_or_says_why_not(method: str) -> None:
    """A network of twelve layers over a fast link: all of them fit two thirds of the memory."""
    layers = 12
    inputs: list[list[int]] = [[i - 1] if i else [] for i in range(layers)]
    for i in reversed(range(layers)):
        inputs.append([*([i - 1] if i else []), i, *([len(inputs) - 1] if i < layers - 1 else [])])
    graph = graph_of([100] * 24, [100] * 24, inputs, backward_from=layers).with_link(Link(10**10, 10**10))
    answer = solve(Problem(graph, 900), method=method)
    assert answer.plan is not None, answer.message
    assert answer.bound_ns == 2400
    if method.startswith("offload"):
        assert answer.cost_ns == 2400
    assert solve(Problem(graph.with_link(None), 900), method=method).plan is None
    tight = solve(Problem(graph, 300), method=method)
    assert tight.plan is not None or tight.message
