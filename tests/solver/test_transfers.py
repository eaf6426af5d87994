"""Plans of graphs with a link: copies have their place, plans are as good as brute force on small graphs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chains import chains, lift_orders
from drawn import examples, graphs, layered, linear_graphs, sequences
from remat_ir import (
    Chain,
    Graph,
    InvalidPlan,
    Link,
    Offload,
    Problem,
    Status,
    graph_of,
    lowered_plan,
    plain_peak,
    plan_of,
    replay,
    replay_chain,
    verify,
)
from remat_ir.greedy import least_memory
from remat_solver import solve
from remat_solver.bounds import least_need
from remat_solver.deadline import Deadline
from remat_solver.incumbent import Incumbent
from remat_solver.placement import chosen_gaps, place, pruned, timetable
from remat_solver.transfers.method import ChainTransferSearch
from remat_solver.transfers.search import TransferSearch, relieved
from solver.brute import agrees
from solver.test_transfer_bound import little_linked
from solver.transfer_brute import least_makespan

SETTINGS = settings(max_examples=examples(40), deadline=None, derandomize=True)
ROOMY = 2**50
TWELVE = graph_of([100] * 24, [100] * 24, layered(12), backward_from=12)
"""Twelve layers and their backward pass."""
STARTS = ("rotor", "pofo", "offload-only", "offload-all", "save-on-cpu", "layer-fractions")
LINKS = st.builds(
    Link,
    st.sampled_from((10**9, 3 * 10**8)),
    st.sampled_from((10**9, 2 * 10**9)),
    st.integers(0, 2),
    st.none() | st.integers(0, 12),
)


@SETTINGS
@given(graphs(most_ops=9) | linear_graphs(most_layers=5), LINKS, st.data())
def test_what_is_placed_is_a_plan(graph: Graph, link: Link, data: st.DataObject) -> None:
    """For any sequence and any gaps: as the verifier has it, makespan, peak and the host's limit."""
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


@pytest.mark.thorough
@SETTINGS
@given(st.data())
def test_what_is_placed_on_a_chain_is_a_plan_of_the_chain(data: st.DataObject) -> None:
    """For any sequence and any gaps: what a chain plan stores is a graph of the same memory, and copies of the same."""
    chain = replace(data.draw(chains(link=True)), input_may_leave=data.draw(st.booleans()))
    order = data.draw(lift_orders(chain))
    problem = Problem(chain, ROOMY)
    search = ChainTransferSearch(Incumbent(problem, Deadline(None)))
    table = search.table(order)
    plain = lowered_plan(chain, order)
    peaks = [moment.peak_bytes for moment in replay_chain(chain, plain) if moment.op is not None]
    assert table.load[-len(peaks) :] == peaks
    assert search.planned(place(table, ROOMY, []))[1] == plain
    gaps = [gap for gap in table.gaps if search.may_move(gap, search.movable)]
    placed = place(table, ROOMY, data.draw(st.lists(st.sampled_from(gaps), unique=True)) if gaps else [])
    cost_ns, plan = search.planned(placed)
    verdict = verify(problem, plan)
    assert verdict.cost_ns == cost_ns >= placed.cost_ns
    assert verdict.peak_bytes == verify(Problem(table.graph, ROOMY), placed.plan).peak_bytes


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(5))
def test_auto_on_a_chain_is_no_worse_than_what_it_starts_from(seed: int) -> None:
    """Also with a limit on the host, which the chain's plans keep."""
    draw = random.Random(seed)
    stages = draw.randint(4, 8)
    activation = [draw.randint(4, 40) for _ in range(stages + 1)]
    forward = [draw.randint(10, 60) for _ in range(stages)]
    chain = Chain(
        forward_ns=tuple(forward),
        backward_ns=tuple(2 * time for time in forward),
        forward_workspace_bytes=(0,) * stages,
        backward_workspace_bytes=(0,) * stages,
        tape_bytes=tuple(size * draw.randint(2, 4) for size in activation[1:]),
        activation_bytes=tuple(activation),
        gradient_bytes=tuple(activation),
        link_bytes_per_s=2 * 10**9,
        host_bytes=draw.choice((None, 100)),
    )
    least, _ = least_need(chain)
    problem = Problem(chain, least + int(draw.choice((0.2, 0.5)) * (plain_peak(chain) - least)))
    costs = [solve(problem, method=name).cost_ns for name in STARTS]
    least_ns = min(cost for cost in costs if cost is not None)
    seen: list[int | None] = []
    answer = solve(
        problem,
        time_limit_s=60,
        max_gap=0.0,
        on_progress=lambda progress: seen.append(progress.cost_ns),
        cancelled=lambda: any(cost is not None and cost <= least_ns for cost in seen),
    )
    assert answer.cost_ns <= least_ns


def test_a_copy_is_hidden_where_there_is_time() -> None:
    """Ten ops of 100 ns between a value's uses, its copies of 200 ns each: it leaves and is back at no cost."""
    chain = [[], [0], *([i] for i in range(1, 10)), [0, 10]]
    graph = graph_of([100] * 12, [200, *[10] * 5, 200, *[10] * 5], chain).with_link(Link(10**9, 10**9))
    answer = solve(Problem(graph, 230), time_limit_s=60)
    assert (answer.status, answer.cost_ns, answer.restricted_to) == (Status.OPTIMAL, 1200, ())
    assert Offload(0) in answer.plan.steps


@pytest.mark.thorough
def test_what_moves_is_worth_its_bytes_on_a_host_with_a_limit() -> None:
    """Twelve layers, the later ones ten times as slow: a host for four values takes those that take long to make."""
    times = [100 if i % 3 else 1000 for i in range(12)]
    graph = graph_of([*times, *[100] * 12], [100] * 24, layered(12), backward_from=12)
    alone = solve(Problem(graph, 800), time_limit_s=60, max_gap=0.0)
    assert alone.status is Status.OPTIMAL
    assert searched(Problem(graph.with_link(Link(10**9, 10**9)), 800)).cost_ns == graph.total_cost_ns
    limited = Problem(graph.with_link(Link(10**9, 10**9, host_bytes=200)), 800)
    found = searched(limited)
    assert graph.total_cost_ns < found.cost_ns < alone.cost_ns
    assert 0 < max(moment.host_bytes for moment in replay(limited.graph, found.plan)) <= 200


@pytest.mark.thorough
def test_a_plan_without_transfers_is_polished_to_one_that_moves() -> None:
    """Every layer computed twice: with a link there is time for, nothing is made again, and nothing is random."""
    graph = TWELVE.with_link(Link(10**10, 10**10))
    again = least_memory(graph)
    assert len(again.computes) > graph.ops
    plans = []
    for _ in range(2):
        incumbent = Incumbent(Problem(graph, 800), Deadline(None))
        search = TransferSearch(incumbent)
        search.adopt(again)
        search.polish()
        plans.append(incumbent.plan)
        assert incumbent.cost_ns == graph.total_cost_ns
    assert plans[0] == plans[1]


@SETTINGS
@given(graphs(most_ops=9) | linear_graphs(most_layers=5), LINKS, st.data())
def test_polishing_never_makes_a_plan_worse(graph: Graph, link: Link, data: st.DataObject) -> None:
    """From any sequence, with a budget that it fits; what comes out has passed the verifier."""
    graph = graph.with_link(link)
    order = data.draw(sequences(graph))
    peak = max(timetable(graph, order).load, default=0)
    incumbent = Incumbent(Problem(graph, peak), Deadline(None))
    search = TransferSearch(incumbent)
    search.adopt(plan_of(graph, order))
    before = incumbent.cost_ns
    search.polish()
    assert incumbent.cost_ns <= before
    again = search.best
    search.polish()
    assert search.best is again


def searched(problem: Problem, rounds: int = 20) -> Incumbent:
    """What the search has found after so many changes of its set, whatever the time that they take."""
    incumbent = Incumbent(problem, Deadline(None))
    search, left = TransferSearch(incumbent), iter(range(rounds))

    def more() -> None:
        if next(left, None) is None:
            incumbent.close()

    search.offload_only()
    search.run(more)
    return incumbent


def test_moved_values_take_memory_only_where_they_are_used() -> None:
    graph = graph_of([1, 1, 1, 1], [4, 5, 6, 1], [[], [0], [1], [0, 2]]).with_link(Link(1, 1))
    free = relieved(graph, {0})
    assert free.link is None
    peaks = [moment.peak_bytes for moment in replay(free, plan_of(free, range(4))) if moment.op is not None]
    assert peaks == [4, 9, 11, 11]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
def test_auto_is_no_better_than_brute_force_and_seldom_worse(seed: int) -> None:
    problem = little_linked(seed)
    best, _ = least_makespan(problem)
    answer = solve(problem, time_limit_s=2.0, max_gap=0.0)
    agrees(problem, answer, best)
    if answer.cost_ns is not None:
        assert answer.bound_ns is not None
        assert answer.cost_ns <= 2 * best


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["offload-only", "offload-all", "save-on-cpu", "layer-fractions"])
def test_what_others_do_is_a_plan_or_says_why_not(method: str) -> None:
    """A network of twelve layers over a fast link: all of them fit two thirds of the memory."""
    answer = solve(Problem(TWELVE.with_link(Link(10**10, 10**10)), 900), method=method)
    assert answer.plan is not None, answer.message
    assert answer.bound_ns == 2400
    if method.startswith("offload"):
        assert answer.cost_ns == 2400
    assert solve(Problem(TWELVE, 900), method=method).plan is None
    tight = solve(Problem(TWELVE.with_link(Link(10**10, 10**10)), 300), method=method)
    assert tight.plan is not None or tight.message


@pytest.mark.parametrize("forward", [1, 2, 3])
def test_fractions_of_a_forward_pass_of_a_few_ops(forward: int) -> None:
    """Too few to cut into layers: it is one."""
    graph = graph_of([1] * 4, [2] * 4, [[], [0], [1], [2, 0]], backward_from=forward).with_link(Link(10**9, 10**9))
    answer = solve(Problem(graph, 4 * plain_peak(graph)), method="layer-fractions")
    assert answer.cost_ns == 4, answer.message
