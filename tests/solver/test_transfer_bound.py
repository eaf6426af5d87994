"""The relaxation of graphs with a link: never above the least makespan of any plan, by brute force over all plans."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import graphs, linear_graphs
from remat_ir import Graph, Link, Problem
from remat_ir.working_set import working_set
from remat_solver.array_view import view_of
from remat_solver.backends import Engine
from remat_solver.deadline import Deadline
from remat_solver.transfers.bound import proved_ns, solved
from remat_solver.transfers.relaxation import relax
from solver.transfer_brute import least_makespan

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def linked(draw: st.DrawFn, most_ops: int = 5) -> Problem:
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
@given(linked(), st.data())
def test_the_bound_is_below_every_plan(problem: Problem, data: st.DataObject) -> None:
    """For any cuts, and with any rows (h)."""
    best, _ = least_makespan(problem)
    view = view_of(problem)
    cuts = (*sorted(data.draw(st.sets(st.integers(0, view.ops - 2), max_size=3))), view.ops - 1)
    with Engine("highs") as engine:
        relaxed = solved(engine, view, cuts, Deadline(60))
        every = {c: set(range(view.ops)) for c in range(len(cuts))}
        assert problem.graph.link is not None
        program, _ = relax(view, problem.graph.link, cuts, every)
        whole = engine.run(program)
    if best is None:
        return
    assert relaxed is not None
    assert relaxed.bound_ns <= best
    assert whole.status == "optimal"
    assert view.cost.sum() + whole.bound <= best + 1e-6


def test_it_sees_what_a_link_can_carry() -> None:
    """Two values of 10 bytes, a link of a byte a ns, room for one of them: the other goes out and comes back."""
    graph = Graph(
        (1, 1, 30, 1), ((), (), (), (0, 1, 2)), (0, 1, 2, 3), (10, 10, 10, 1), once=(0, 1, 2)
    ).with_link(Link(10**9, 10**9))
    assert least_makespan(Problem(graph, 31)) == (33, least_makespan(Problem(graph, 31))[1])
    tight = Graph(
        (1, 1, 2, 1, 1), ((), (), (), (1, 2), (0, 3)), (0, 1, 2, 3, 4), (10, 10, 10, 1, 1), once=(0, 1, 2, 3)
    ).with_link(Link(10**9, 10**9))
    problem = Problem(tight, 21)
    assert least_makespan(problem)[0] is None  # op 3 needs 21, and 10 more if value 0 is not away
    problem = Problem(tight, 31)
    assert least_makespan(problem)[0] == 6
