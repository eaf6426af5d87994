"""Little training steps on which rematerialization pays, small enough for brute force."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from remat_ir import Graph, Problem, plain_peak
from remat_ir.graph import working_set


class Written:
    """A graph as it is written, op by op."""

    def __init__(self) -> None:
        self.costs: list[int] = []
        self.inputs: list[tuple[int, ...]] = []
        self.value_op: list[int] = []
        self.sizes: list[int] = []

    def op(self, cost: int, reads: Iterable[int], *made: int) -> list[int]:
        """Add an op that makes values of these sizes, and return them."""
        values = list(range(len(self.sizes), len(self.sizes) + len(made)))
        self.value_op += [len(self.costs)] * len(made)
        self.sizes += made
        self.costs.append(cost)
        self.inputs.append(tuple(sorted(set(reads))))
        return values

    def graph(self, **more: Any) -> Graph:
        return Graph(tuple(self.costs), tuple(self.inputs), tuple(self.value_op), tuple(self.sizes), **more)


def little_graph(seed: int, ops: int, *, rich: bool = True, consumes: bool = True) -> Graph:
    """A forward pass with a skip now and then, and a backward pass that reads it in reverse.

    `rich` adds second and third values, optional, kept and consumed ones, `once` ops, workspaces and fixed bytes;
    without it each op makes one value, as in the papers. `consumes` may be switched off.
    """
    draw = random.Random(seed)
    forward = min((ops + 1) // 2, ops - 1)
    first: list[int] = []  # op -> its main value
    made: list[list[int]] = []
    inputs: list[list[int]] = []
    values = 0
    for op in range(ops):
        first.append(values)
        more = draw.choice((0, 0, 0, 1, 1, 2)) if rich else 0
        made.append(list(range(values, values + 1 + more)))
        values += 1 + more
        read: set[int] = set()
        if op and draw.random() < 0.95:
            read.add(first[op - 1])
        if op < forward:
            if op > 1 and draw.random() < 0.3:
                read.add(first[draw.randrange(op - 1)])
        else:
            mirror = ops - 1 - op
            for source in (mirror, mirror - 1):
                if 0 <= source < op and draw.random() < 0.8:
                    read.add(draw.choice(made[source]))
        if op > 1 and draw.random() < 0.2:
            read.add(draw.randrange(first[op]))
        inputs.append(sorted(read))
    value_op = [op for op in range(ops) for _ in made[op]]
    large = draw.random() < 0.5
    sizes = [
        draw.randint(1, 4) + (draw.choice((0, 4, 8)) if large and value_op[v] < forward - 1 else 0)
        for v in range(values)
    ]
    costs = tuple(draw.choice((0, 1, 1, 2, 3, 5, 8)) for _ in range(ops))
    if not rich:
        return Graph(costs, tuple(map(tuple, inputs)), tuple(value_op), tuple(sizes), backward_from=forward)
    chance = draw.choice((0.0, 0.15, 0.4))
    optional = [v for v in range(values) if draw.random() < chance]
    graph = Graph(
        op_cost_ns=costs,
        op_inputs=tuple(map(tuple, inputs)),
        value_op=tuple(value_op),
        value_bytes=tuple(0 if draw.random() < 0.05 else size for size in sizes),
        op_workspace_bytes=tuple(draw.choice((0, 0, 0, 1, 3)) for _ in range(ops)),
        optional=tuple(optional),
        keep=tuple(v for v in range(values) if v not in optional and draw.random() < 0.05),
        once=tuple(op for op in range(ops) if draw.random() < 0.06),
        backward_from=draw.choice((None, forward, draw.randrange(ops))),
        fixed_bytes=draw.choice((0, 0, 3)),
    )
    return consuming(graph, draw, draw.choice((0.0, 0.0, 0.3))) if consumes else graph


def consuming(graph: Graph, draw: random.Random, chance: float) -> Graph:
    """The graph with some values consumed by their last readers, which then run once."""
    consumed = [v for v in range(graph.values) if graph.users[v] and v not in graph.keep and draw.random() < chance]
    once = sorted({*graph.once, *(graph.users[v][-1] for v in consumed)})
    return replace(graph, consumes=tuple(consumed), once=tuple(once))


def little_problems(seed: int, ops: int, *, rich: bool = True, budgets: int = 5) -> Iterator[Problem]:
    """One graph under budgets from what its largest op needs up to just below the plain peak."""
    graph = little_graph(seed, ops, rich=rich)
    least, plain = working_set(graph).least_bytes, plain_peak(graph)
    for budget in sorted({least + (plain - least) * step // budgets for step in range(budgets)} - {plain}):
        yield Problem(graph, budget)


@st.composite
def problems(draw: st.DrawFn, most_ops: int = 5, rich: bool | None = None) -> Problem:
    """A strategy of problems whose budget lies between what the largest op needs, less one, and the plain peak."""
    kind = draw(st.booleans()) if rich is None else rich
    graph = little_graph(draw(st.integers(0, 2**32)), draw(st.integers(1, most_ops)), rich=kind)
    least, plain = working_set(graph).least_bytes, plain_peak(graph)
    return Problem(graph, draw(st.integers(max(0, least - 1), max(least, plain))))
