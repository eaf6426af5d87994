"""What is stopped ends soon: no program is written on, and no table filled, after the first look that says stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from benchmarks.graphs.instances import instance

from remat_ir import Graph, Link, Problem, budget_at, plain_chain_plan, plain_peak, verify
from remat_solver.array_view import view_of
from remat_solver.backends.engine import Engine
from remat_solver.blocks.segments import joined, segments_of
from remat_solver.bounds import pair_table
from remat_solver.chain import table as table_module
from remat_solver.chain.table import Least, Table
from remat_solver.deadline import Deadline, TimeUp
from remat_solver.incumbent import Incumbent
from remat_solver.join.table import JoinTable, contiguous_plan, relaxed_steps
from remat_solver.methods.least import Interval
from remat_solver.offload.method import makespan_bound, repaired_plan
from remat_solver.offload.table import OffloadTable, Schedule
from remat_solver.staged.prove import Proof
from remat_solver.staged.rows import Rows, write
from remat_solver.staged.scale import scale_of
from remat_solver.transfers.bound import relax
from solver.little import little_graph
from solver.stops import After
from solver.test_offload import linked_chain

LINK = Link(10**9, 10**9)


def staged_program(graph: Graph, stop: Callable[[], bool]) -> object:
    view = view_of(Problem(graph, plain_peak(graph) - 1))
    rows = Rows({graph.ops // 3, graph.ops - 1}, recomputations={graph.ops - 1: {0, 1}})
    rows.cut(graph.ops // 2)
    return write(view, rows, scale_of(view), stop=stop)


def transfer_program(graph: Graph, stop: Callable[[], bool]) -> object:
    view = view_of(Problem(graph.with_link(LINK), plain_peak(graph) - 1))
    return relax(view, LINK, (graph.ops // 3, graph.ops - 1), {1: {0, 1}}, stop)


def blocks(graph: Graph, stop: Callable[[], bool]) -> object:
    segments = segments_of(graph)
    return joined(segments, 8, stop)


@pytest.mark.parametrize("write_all", [staged_program, transfer_program, blocks])
def test_nothing_is_written_after_the_look_that_says_stop(write_all: Callable[..., Any]) -> None:
    graph = instance("gpt-6") if write_all is blocks else little_graph(3, 40)
    whole = After()
    write_all(graph, whole)
    assert whole.polls >= 20
    for most in range(0, whole.polls, 7):
        stop = After(most)
        with pytest.raises(TimeUp):
            write_all(graph, stop)
        assert stop.polls == most + 1


def test_the_proof_ends_wherever_it_is_stopped() -> None:
    """Also in the middle of a program: after the look that says stop only few others follow, and none is a round."""
    graph = little_graph(1, 24)
    problem = Problem(graph, int(0.8 * plain_peak(graph)))

    def polls(most: float) -> After:
        stop = After(most)
        Proof(Incumbent(problem, Deadline(None), cancelled=stop, certify=True)).run(engine)
        return stop

    with Engine("highs") as engine:
        whole = polls(float("inf")).polls
        assert whole > 60
        for most in range(0, min(whole, 150), 10):
            assert polls(most).polls <= most + 12


def test_the_least_budget_is_left_where_it_is_stopped() -> None:
    stop = After(0)
    found = Interval(little_graph(2, 30), Deadline(60), cancelled=stop).narrowed()
    assert found.low <= found.high
    assert stop.polls <= 10


def test_a_table_of_pairs_that_is_stopped_says_nothing() -> None:
    assert not pair_table(little_graph(0, 10), After(0)).any()


@pytest.mark.parametrize(
    "fill",
    [
        lambda stop: Table(linked_chain(24, 1), 20_000_000, 150, stop=stop),
        lambda stop: Least(linked_chain(24, 1), stop=stop),
        lambda stop: OffloadTable(linked_chain(6, 1), 20_000_000, 40, stop=stop),
        lambda stop: JoinTable((6, 5, 7), 9, stop=stop),
        lambda stop: contiguous_plan((20, 30), 12, (False, False), stop),
        lambda stop: relaxed_steps((20, 30), 12, (False, False), stop),
    ],
    ids=["chain", "least", "offload", "join", "contiguous", "relaxed"],
)
def test_a_table_of_a_structure_is_left_at_the_look_that_says_stop(
    fill: Callable[[Callable[[], bool]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "_SUMS", 1)
    monkeypatch.setattr(table_module, "_LEAST_SUMS", 1)
    whole = After()
    fill(whole)
    assert whole.polls >= 10
    for most in range(0, whole.polls, 3):
        stop = After(most)
        with pytest.raises(TimeUp):
            fill(stop)
        assert stop.polls == most + 1


def test_a_moved_plan_is_kept_where_time_ends_its_improvement() -> None:
    chain = linked_chain(12, 1, 4)
    problem = Problem(chain, budget_at(chain, 0.7))
    plain = plain_chain_plan(chain)
    schedule = Schedule(plain.steps[:12], plain.steps[12:], frozenset(chain.movable))
    assert makespan_bound(chain, problem.budget_bytes, lambda: True) >= chain.total_cost_ns
    whole = After()
    best = verify(problem, repaired_plan(problem, schedule, whole)).cost_ns
    costs = [verify(problem, repaired_plan(problem, schedule, After(most))).cost_ns for most in range(whole.polls)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > best
    assert costs[-1] >= best
