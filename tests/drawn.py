"""Hypothesis strategies for graphs, problems and op sequences of the whole model."""

from __future__ import annotations

import os
from dataclasses import replace
from fractions import Fraction

from hypothesis import strategies as st

from remat_ir import Graph, Problem, Subject, budget_at, graph_of

DEPTH = float(os.environ.get("REMAT_TEST_DEPTH", "0.25"))
"""`make test` draws a quarter of each property's examples, `make test-thorough` all of them."""


def examples(number: int) -> int:
    """How many examples a property draws of what is its share."""
    return max(4, round(number * DEPTH))


def posed(subject: Subject, share: float) -> Problem:
    """The problem of keeping to a share of the plain peak."""
    return Problem(subject, budget_at(subject, share))


@st.composite
def graphs(
    draw: st.DrawFn,
    *,
    least_ops: int = 1,
    most_ops: int = 7,
    most_values: int = 3,
    most_cost: int = 9,
    most_bytes: int = 9,
    fixed: bool = True,
    whole: bool = True,
) -> Graph:
    """A random graph.

    `whole` draws the whole model: up to `most_values` values per op (also none, also unread ones), optional, kept and
    consumed values, once ops, workspaces, `backward_from`. Without it every op makes exactly one value and there is
    nothing else: the papers' model. `fixed` draws fixed bytes too.
    """
    ops = draw(st.integers(least_ops, most_ops))
    cost = draw(st.lists(st.integers(0, most_cost), min_size=ops, max_size=ops))
    counts = draw(st.lists(st.integers(0, most_values), min_size=ops, max_size=ops)) if whole else [1] * ops
    value_op = [op for op, count in enumerate(counts) for _ in range(count)]
    values = len(value_op)
    sizes = draw(st.lists(st.integers(0, most_bytes), min_size=values, max_size=values))
    inputs = []
    for op in range(ops):
        before = [value for value in range(values) if value_op[value] < op]
        # mostly recent values, as in networks; now and then an old one
        read = draw(st.lists(st.sampled_from(before), max_size=3, unique=True)) if before else []
        if before and draw(st.integers(0, 3)) and before[-1] not in read:
            read.append(before[-1])
        inputs.append(tuple(sorted(read)))
    fixed_bytes = draw(st.integers(0, 5)) if fixed else 0
    if not whole:
        return graph_of(cost, sizes, inputs, fixed_bytes=fixed_bytes)
    # 0 in most places, so that several features seldom drown all freedom in one graph
    kind = [draw(st.sampled_from((0, 0, 0, 0, 1, 2))) for _ in range(values)]
    graph = Graph(
        op_cost_ns=tuple(cost),
        op_inputs=tuple(inputs),
        value_op=tuple(value_op),
        value_bytes=tuple(sizes),
        op_workspace_bytes=tuple(draw(st.sampled_from((0, 0, 0, 1, 4))) for _ in range(ops)),
        optional=tuple(value for value in range(values) if kind[value] == 1),
        keep=tuple(value for value in range(values) if kind[value] == 2),
        once=tuple(op for op in range(ops) if draw(st.integers(0, 5)) == 5),
        backward_from=draw(st.none() | st.integers(0, ops - 1)),
        fixed_bytes=fixed_bytes,
    )
    read = [v for v in range(values) if graph.users[v] and kind[v] != 2]
    consumed = draw(st.just([]) | st.lists(st.sampled_from(read), unique=True, max_size=2)) if read else []
    once = {*graph.once, *(graph.users[v][-1] for v in consumed)}
    return replace(graph, consumes=tuple(sorted(consumed)), once=tuple(sorted(once)))


def layered(layers: int, *, read_inputs: bool = True) -> list[list[int]]:
    """What the ops of a linear training step read; a backward op its layer's output, the gradient, and the input."""
    forward = [[i - 1] if i else [] for i in range(layers)]
    return forward + [
        [*forward[i] * read_inputs, i, *([2 * layers - 2 - i] if i < layers - 1 else [])]
        for i in reversed(range(layers))
    ]


@st.composite
def linear_graphs(
    draw: st.DrawFn, *, least_layers: int = 1, most_layers: int = 6, unit: bool = False, most: int = 9
) -> Graph:
    """A linear training graph: layers 0 … l−1, each reading the one before, and their backward ops in reverse.

    The backward op of layer i reads the upstream gradient, its layer's input and its layer's output, as in Checkmate,
    Section 4.1. `unit` makes all costs and sizes 1.
    """
    layers = draw(st.integers(least_layers, most_layers))
    number = st.just(1) if unit else st.integers(1, most)
    inputs = layered(layers)
    costs = draw(st.lists(number, min_size=2 * layers, max_size=2 * layers))
    sizes = draw(st.lists(number, min_size=2 * layers, max_size=2 * layers))
    return graph_of(costs, sizes, inputs, backward_from=layers)


@st.composite
def problems(draw: st.DrawFn, graph: st.SearchStrategy[Graph] | None = None) -> Problem:
    """A graph and a budget between nothing and a little above the plain peak."""
    drawn = draw(graphs() if graph is None else graph)
    return Problem(drawn, budget_at(drawn, Fraction(draw(st.integers(0, 22)), 20)))


@st.composite
def sequences(draw: st.DrawFn, graph: Graph) -> list[int]:
    """Ops in an order in which every input exists: first computations in op order, random recomputations between.

    What makes a kept value, and `once` ops, are computed once, and what reads a consumed value not again; the
    least-memory plan of the sequence is valid.
    """
    pinned = set(graph.once) | {graph.value_op[value] for value in graph.keep}
    order: list[int] = []
    for op in range(graph.ops):
        gone = {v for v in graph.consumes if graph.users[v][-1] < op}
        if op and (free := [i for i in range(op) if i not in pinned and gone.isdisjoint(graph.op_inputs[i])]):
            order.extend(draw(st.lists(st.sampled_from(free), max_size=3)))
        order.append(op)
    return order
