"""Plans that torch's partitioner carries out: each forward op is saved, or computed again once, where torch puts it.

Torch's min-cut partitioner takes a tag a node, and places what is computed again itself
(`torch._functorch.partitioners.reordering_to_mimic_autograd_engine`): before each op of the backward pass, in order,
everything that it needs and that is not there, in the order of the forward pass; held to its last use.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .errors import InvalidData
from .graph import Graph
from .plan import Compute, Free, Plan, makers, plan_of


def tagged_order(graph: Graph, again: Collection[int]) -> tuple[int, ...]:
    """The ops in the order in which torch runs them where `again` are tagged to be computed again, all others saved.

    Whether the graph allows each recomputation is the verifier's to say. Linear, but for sorting.

    Raises:
        InvalidData: the graph marks no backward pass, or an op is not of its forward pass.

    >>> from remat_ir import graph_of
    >>> graph = graph_of([1] * 5, [1] * 5, [[], [0], [1], [2, 1], [3, 0]], backward_from=3)
    >>> tagged_order(graph, {0, 1}), tagged_order(graph, {1})
    ((0, 1, 2, 0, 1, 3, 4), (0, 1, 2, 1, 3, 4))
    """
    boundary = _boundary(graph)
    missing = set(again)
    if missing and not 0 <= min(missing) <= max(missing) < boundary:
        wrong = min(op for op in missing if not 0 <= op < boundary)
        raise InvalidData(f"op {wrong} is tagged, and the forward pass has ops 0 to {boundary - 1}")
    order = list(range(boundary))
    for op in range(boundary, graph.ops):
        row = makers(graph, graph.op_inputs[op], lambda value: graph.value_op[value] in missing)
        missing.difference_update(row)
        order += (*sorted(row), op)
    return tuple(order)


def tagged_plan(graph: Graph, again: Collection[int]) -> Plan:
    """The plan that torch carries out where `again` are tagged to be computed again.

    Raises:
        InvalidData: as `tagged_order`.
    """
    return plan_of(graph, tagged_order(graph, again))


def tags_of(graph: Graph, plan: Plan) -> frozenset[int]:
    """The forward ops to tag so that torch saves what a plan holds when the backward pass begins.

    An op is computed again where one of its values is needed in the backward pass and is not held then. Of a plan that
    torch carries out, these are the ops that it computes again.

    Raises:
        InvalidData: the graph marks no backward pass.
    """
    boundary = _boundary(graph)
    held = _held(graph, plan, boundary)
    needed = {value for op in range(boundary, graph.ops) for value in graph.op_inputs[op]}
    again = set()
    for op in range(boundary - 1, -1, -1):
        if graph.last_stage[op] == op:  # it runs once
            continue
        if any(value in needed and value not in held for value in graph.op_values[op]):
            again.add(op)
            needed.update(graph.op_inputs[op])
    return frozenset(again)


def is_tagged(graph: Graph, plan: Plan) -> bool:
    """Whether torch carries out a plan as it is: its ops run in the order that its tags lead to, nothing is moved."""
    if not all(isinstance(step, (Compute, Free)) for step in plan.steps):
        return False
    if graph.backward_from is None:
        return plan.computes == tuple(range(graph.ops))
    return plan.computes == tagged_order(graph, tags_of(graph, plan))


def confined(graph: Graph) -> Graph:
    """A graph whose plans include all that torch carries out on this one, op for op at the same cost and peak.

    Its op 0 is new: it makes values without bytes that say until when an op may run. Torch computes an op again before
    the first backward op that reads of it; where none does, for one of its readers that is computed again. So the op
    reads a value that the last such backward op consumes, and what it made stays from there on. Ops that torch never
    computes again run once. A bound on the plans of this graph is one of the space `tags` (docs/proofs.md, P20).

    Raises:
        InvalidData: the graph marks no backward pass.

    >>> from remat_ir import graph_of
    >>> found = confined(graph_of([1] * 5, [1] * 5, [[], [0], [1], [2, 1], [3, 0]], backward_from=3))
    >>> found.last_stage, found.op_inputs[1:3]
    ((0, 5, 4, 4, 4, 5), ((1,), (0, 2)))
    """
    boundary = _boundary(graph)
    until: dict[int, int] = {}
    for op in range(boundary - 1, -1, -1):
        readers = {reader for value in graph.op_values[op] for reader in graph.users[value]}
        direct = [reader for reader in readers if reader >= boundary]
        last = min(direct) if direct else max((until[reader] for reader in readers & until.keys()), default=0)
        if last and graph.last_stage[op] >= boundary:
            until[op] = last
    number = {last: i for i, last in enumerate(sorted(set(until.values())))}
    new = len(number)

    def marks(op: int) -> tuple[int, ...]:
        return (number[until.get(op, op)],) if op in until or op in number else ()

    return replace(
        graph,
        op_cost_ns=(0, *graph.op_cost_ns),
        op_workspace_bytes=(0, *graph.op_workspace_bytes),
        op_inputs=((), *((*marks(op), *(v + new for v in row)) for op, row in enumerate(graph.op_inputs))),
        value_op=(*[0] * new, *(op + 1 for op in graph.value_op)),
        value_bytes=(*[0] * new, *graph.value_bytes),
        optional=tuple(value + new for value in graph.optional),
        once=(0, *(op + 1 for op in range(graph.ops) if op not in until)),
        keep=tuple(value + new for value in graph.keep),
        consumes=(*range(new), *(value + new for value in graph.consumes)),
        backward_from=boundary + 1,
        link=None,
        op_names=None,
        value_names=None,
    )


def _boundary(graph: Graph) -> int:
    """The first op of the backward pass.

    Raises:
        InvalidData: the graph marks none.
    """
    if graph.backward_from is None:
        raise InvalidData("the graph marks no backward pass, so nothing in it can be tagged", "/backward_from")
    return graph.backward_from


def _held(graph: Graph, plan: Plan, boundary: int) -> set[int]:
    """The values that are there just before the first op of the backward pass, or what comes back for it, runs."""
    held: set[int] = set()
    done = 0
    for step in plan.steps:
        if isinstance(step, Compute):
            if done == boundary:
                break
            done = max(done, step.op + 1)
            held.update(graph.op_always[step.op] if step.kept is None else step.kept)
        elif isinstance(step, Free):
            held.discard(step.value)
    return held
