"""One segment of a training graph as a graph of its own, by which equal segments are recognised."""

from __future__ import annotations

from dataclasses import dataclass

from remat_ir import Graph

from .segments import Segments


@dataclass(frozen=True)
class Block:
    """A segment's forward and backward ops, between an op that makes what they read of others and a turn between them.

    Op 0 makes, and keeps, what comes from earlier segments. The turn stands for all that happens between the two
    parts: it reads what later segments read of this one, and makes what the backward part reads of them. Two segments
    are repeats of each other exactly where their graphs are equal: ops numbered from the segment's first, with the
    same costs, sizes, flags and edges.

    Attributes:
        graph: the block's graph.
        turn: the op between the two parts.
        outside_bytes: of the values that op 0 makes.
        joint: the block's values that later segments read.
    """

    graph: Graph
    turn: int
    outside_bytes: int
    joint: tuple[int, ...]


def block_of(segments: Segments, segment: int) -> Block:
    """The block of a segment; block op k > 0 is the k-th of its forward ops, then the turn, then the backward ops."""
    graph = segments.graph
    forward, backward = segments.forward(segment), segments.backward(segment)
    inner = {op: 1 + i for i, op in enumerate(forward)}
    turn = 1 + len(forward)
    inner |= {op: turn + 1 + i for i, op in enumerate(backward)}
    before, between = _outside(graph, forward, backward, inner)
    number: dict[int, int] = {}
    value_op: list[int] = []
    made_by = {0: before, turn: between} | {place: graph.op_values[op] for op, place in inner.items()}
    for place in range(turn + 1 + len(backward)):
        for value in made_by[place]:
            number[value] = len(value_op)
            value_op.append(place)
    joint = tuple(number[v] for v in segments.joints[segment] if graph.value_op[v] in inner)
    optional, keep = frozenset(graph.optional), frozenset(graph.keep)
    leaving = {
        v for op in backward for v in graph.op_values[op] if any(u not in inner for u in graph.users[v]) or v in keep
    }
    ops = [0, *forward, 0, *backward]
    inputs = [tuple(number[v] for v in graph.op_inputs[op]) for op in ops]
    inputs[0], inputs[turn] = (), joint
    own = [v for v in number if graph.value_op[v] in inner]
    own_set = frozenset(own) - leaving
    return Block(
        Graph(
            op_cost_ns=tuple(0 if place in (0, turn) else graph.op_cost_ns[op] for place, op in enumerate(ops)),
            op_inputs=tuple(inputs),
            value_op=tuple(value_op),
            value_bytes=tuple(graph.value_bytes[v] for v in number),
            op_workspace_bytes=tuple(
                0 if place in (0, turn) else graph.op_workspace_bytes[op] for place, op in enumerate(ops)
            ),
            optional=tuple(number[v] for v in own if v in optional and v not in leaving),
            once=tuple(sorted({0, turn, *(inner[op] for op in graph.once if op in inner)})),
            keep=tuple(sorted([number[v] for v in before] + [number[v] for v in leaving])),
            consumes=tuple(number[v] for v in graph.consumes if v in own_set and graph.users[v][-1] in inner),
            backward_from=turn,
        ),
        turn,
        sum(graph.value_bytes[v] for v in before),
        joint,
    )


def _outside(
    graph: Graph, forward: range, backward: range, inner: dict[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The values that a segment reads of earlier forward ops, and what its backward part reads of anything else."""
    read = {v for op in (*forward, *backward) for v in graph.op_inputs[op] if graph.value_op[v] not in inner}
    before = tuple(sorted(v for v in read if graph.value_op[v] < forward.start))
    return before, tuple(sorted(read.difference(before)))
