"""What is stopped ends soon: no program is written on, and no table filled, after the first look that says stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from benchmarks.graphs.instances import instance

from remat_ir import Link, Problem, budget_at, graph_of, plain_chain_plan, plain_peak, verify
from remat_solver.array_view import view_of
from remat_solver.backends.engine import Engine
from remat_solver.blocks.segments import joined, segments_of
from remat_solver.bounds import pair_table
from remat_solver.chain import table as table_module
from remat_solver.chain.rotor import SequentialOptions, sequential
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


LITTLE = little_graph(3, 40)


def staged_program(stop: Callable[[], bool]) -> object:
    view = view_of(Problem(LITTLE, plain_peak(LITTLE) - 1))
    rows = Rows({LITTLE.ops // 3, LITTLE.ops - 1}, recomputations={LITTLE.ops - 1: {0, 1}})
    rows.cut(LITTLE.ops // 2)
    return write(view, rows, scale_of(view), stop=stop)


def transfer_program(stop: Callable[[], bool]) -> object:
    view = view_of(Problem(LITTLE.with_link(LINK), plain_peak(LITTLE) - 1))
    return relax(view, LINK, (LITTLE.ops // 3, LITTLE.ops - 1), {1: {0, 1}}, stop)


@pytest.mark.parametrize(
    ("fill", "looks", "step"),
    [
        (staged_program, 20, 7),
        (transfer_program, 20, 7),
        (lambda stop: joined(segments_of(instance("gpt-6")), 8, stop), 20, 7),
        (lambda stop: Table(linked_chain(24, 1), 20_000_000, 150, stop=stop), 10, 3),
        (lambda stop: Least(linked_chain(24, 1), stop=stop), 10, 3),
        (lambda stop: OffloadTable(linked_chain(6, 1), 20_000_000, 40, stop=stop), 10, 3),
        (lambda stop: JoinTable((6, 5, 7), 9, stop=stop), 10, 3),
        (lambda stop: contiguous_plan((20, 30), 12, (False, False), stop), 10, 3),
        (lambda stop: relaxed_steps((20, 30), 12, (False, False), stop), 10, 3),
    ],
    ids=["staged", "transfers", "blocks", "chain", "least", "offload", "join", "contiguous", "relaxed"],
)
def test_nothing_is_written_or_filled_after_the_look_that_says_stop(
    fill: Callable[[Callable[[], bool]], Any], looks: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "_SUMS", 1)
    monkeypatch.setattr(table_module, "_LEAST_SUMS", 1)
    whole = After()
    fill(whole)
    assert whole.polls >= looks
    for most in range(0, whole.polls, step):
        stop = After(most)
        with pytest.raises(TimeUp):
            fill(stop)
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


def test_a_cancel_ends_the_first_walks_of_the_least_budget() -> None:
    graph = graph_of([1] * 5, [4, 2, 4, 2, 1], [[], [0], [1], [2], [0, 3]])
    stop = After()
    found = Interval(graph, Deadline(60), cancelled=stop)
    stop.most = stop.polls + 1  # seen once more before the walks, which would find 7 bytes
    assert found.narrowed(None).high == plain_peak(graph) == 10


def test_no_further_number_of_segments_is_tried_once_stopped() -> None:
    chain = linked_chain(24, 1)
    stopped = Incumbent(Problem(chain, plain_peak(chain)), Deadline(None), cancelled=After(0))
    sequential(stopped, SequentialOptions())
    assert stopped.plan is None
    assert stopped.known.enough_bytes is None


def test_a_table_of_pairs_that_is_stopped_says_nothing() -> None:
    assert not pair_table(little_graph(0, 10), After(0)).any()


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
