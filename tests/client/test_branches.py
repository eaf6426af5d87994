"""Graphs whose branches meet: they are seen, and a join's plans are plans of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import examples
from remat.chains.branches import branches_of
from remat_ir import Graph, Join, Problem, graph_of, join_in_bytes, verify
from remat_solver.join.table import JoinTable


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.lists(st.integers(2, 5), min_size=2, max_size=3), st.integers(0, 9))
def test_a_join_in_bytes_is_seen_and_its_plans_cost_the_same(lengths: list[int], more: int) -> None:
    join = Join(tuple(lengths), 2, 3, 5, slots=99, slot_bytes=10)
    found = branches_of(join.to_graph())
    assert found is not None
    assert found.lengths == tuple(lengths)
    assert found.homogenized(99) == join
    slots = 2 * len(lengths) + 1 + more
    steps = JoinTable(join.lengths, slots).plan(slots)
    assert steps is not None
    own_order = verify(Problem(*_roomy(join_in_bytes(join, steps)[0])), join_in_bytes(join, steps)[1])
    # the graph's own order of backward steps, not the plan's: the same steps, each once, in another order
    assert verify(Problem(*_roomy(found.graph)), found.plan(steps)).cost_ns == own_order.cost_ns


def _roomy(graph: Graph) -> tuple[Graph, int]:
    return graph, 10**9


def test_what_is_no_join() -> None:
    path = graph_of([1] * 4, [1] * 4, [(), (0,), (0, 1), (0, 2)], backward_from=2)
    assert branches_of(path) is None
    assert branches_of(graph_of([1] * 3, [1] * 3, [(), (0,), (1,)])) is None
    skip = graph_of([1] * 8, [1] * 8, [(), (0,), (), (2,), (1, 3), (0, 4), (1, 5), (3, 6)], backward_from=6)
    assert branches_of(skip) is None
