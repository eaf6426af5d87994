"""The relaxation of graphs with a link: never above the least makespan of any plan, by brute force over all plans."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples, graphs, layered, linear_graphs
from remat_ir import Graph, Link, Problem, graph_of
from remat_ir.graph import working_set
from remat_solver.array_view import ArrayView, view_of
from remat_solver.backends.engine import Engine
from remat_solver.deadline import Deadline
from remat_solver.transfers import bound
from remat_solver.transfers.bound import relax, solved
from solver.transfer_brute import least_makespan

SETTINGS = settings(max_examples=examples(20), deadline=None, derandomize=True)


@st.composite
def linked(draw: st.DrawFn, most_ops: int = 4) -> Problem:
    """A small graph with a link, and a budget from the least that any op needs on."""
    small = graphs(least_ops=3, most_ops=most_ops, most_values=2, most_cost=4, most_bytes=4, fixed=False)
    graph: Graph = draw(small | linear_graphs(least_layers=2, most_layers=most_ops // 2 + 1, most=4))
    link = Link(
        draw(st.sampled_from((10**9, 2 * 10**9, 5 * 10**8))),
        draw(st.sampled_from((10**9, 2 * 10**9, 5 * 10**8))),
        latency_ns=draw(st.integers(0, 1)),
        host_bytes=draw(st.none() | st.integers(2, 8)),
    )
    graph = graph.with_link(link)
    return Problem(graph, working_set(graph).least_bytes + draw(st.integers(0, 6)))


@SETTINGS
@given(problem=linked(), data=st.data())
def test_the_bound_is_below_every_plan(problem: Problem, data: st.DataObject, engine: Engine) -> None:
    """For any cuts, and with any rows (h)."""
    best, _ = least_makespan(problem)
    view = view_of(problem)
    cuts = (*sorted(data.draw(st.sets(st.integers(0, view.ops - 2), max_size=3))), view.ops - 1)
    relaxed = solved(engine, view, cuts, Deadline(60))
    every = {c: set(range(view.ops)) for c in range(len(cuts))}
    whole = engine.run(relax(view, problem.graph.link, cuts, every).program)
    if best is None:
        return
    assert relaxed.bound_ns <= best
    assert whole.status == "optimal"
    assert view.cost.sum() + whole.bound <= best + 1e-6


MUST_MOVE = Problem(
    Graph(
        (1, 1, 2, 1, 1),
        ((), (), (), (1, 2), (0, 3)),
        (0, 1, 2, 3, 4),
        (10, 10, 10, 1, 1),
        once=(0, 1, 2, 3),
        link=Link(10**9, 10**9),
    ),
    21,
)
"""Value 0 must go out and come back, 10 ns each way, and nothing else can be done: 25 ns in place of 6."""


def test_it_sees_what_a_link_can_carry(engine: Engine) -> None:
    assert least_makespan(MUST_MOVE)[0] == 25
    relaxed = solved(engine, view_of(MUST_MOVE), (1, 2, 3, 4), Deadline(60))
    # as far as the rows can tell, the copy that runs at a cut may be another one
    assert 15 <= relaxed.bound_ns <= 25


@pytest.mark.parametrize("row", ["times", "room", "copies back"])
def test_rows_that_ask_for_too_much_are_caught(row: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants of the relaxation are above the least makespan, or find no plan where there is one."""
    view, link = view_of(MUST_MOVE), MUST_MOVE.graph.link
    if row == "times":
        monkeypatch.setattr(bound, "copy_times", lambda view, link: tuple(3 * t for t in copy_times(view, link)))
    elif row == "room":
        monkeypatch.setattr(bound, "_memory", _too_much_memory)
    else:
        monkeypatch.setattr(bound, "_supply", lambda *given: tuple(terms[:-1] for terms in supply(*given)))
    whole = engine.run(relax(view, link, tuple(range(view.ops)), {}).program)
    assert whole.status == "infeasible" or view.cost.sum() + whole.bound > 25.5


copy_times, supply, memory = bound.copy_times, bound._supply, bound._memory


def _too_much_memory(view: ArrayView, *rest: Any) -> None:
    memory(replace(view, capacity=view.capacity - 2), *rest)


def little_linked(seed: int) -> Problem:
    """Two layers with its backward pass, and a link."""
    draw = random.Random(seed)
    inputs = layered(2)
    costs = [draw.randint(1, 4) for _ in inputs]
    graph = graph_of(costs, [draw.randint(1, 4) for _ in inputs], inputs).with_link(Link(10**9, 10**9))
    return Problem(graph, working_set(graph).least_bytes + draw.randint(0, 1))
