"""Chen et al., "Training Deep Nets with Sublinear Memory Cost": which ops to checkpoint, and what that retains."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from remat_ir import Graph
from remat_ir.working_set import pinned_ops

from .recompute import Retained

MOST_THRESHOLDS = 400
"""Segment sizes that the search over b tries."""


def every_root(candidates: Sequence[int]) -> tuple[int, ...]:
    """√n segments of √n ops: every k-th candidate, k = ⌈√n⌉ (Chen et al., Section 3.1)."""
    step = math.isqrt(max(0, len(candidates) - 1)) + 1
    return tuple(candidates[step - 1 : len(candidates) - 1 : step])


def by_size(graph: Graph, forward: int, candidates: Sequence[int], threshold: int) -> tuple[int, ...]:
    """Checkpoint the first candidate at which the segment's values exceed `threshold` bytes (Chen et al., Alg. 3)."""
    allowed, chosen, size = frozenset(candidates), [], 0
    for op in range(forward):
        size += sum(graph.value_bytes[value] for value in graph.op_values[op])
        if op in allowed and size > threshold:
            chosen.append(op)
            size = 0
    return tuple(chosen)


def thresholds(graph: Graph, forward: int) -> list[int]:
    """The values of b worth trying, descending: sums of successive ops' values, thinned evenly to a few hundred."""
    sizes = [sum(graph.value_bytes[value] for value in graph.op_values[op]) for op in range(forward)]
    total = sum(sizes)
    sums = {0, total}
    for first in range(0, forward, max(1, forward // 100)):
        size = 0
        for op in range(first, forward):
            size += sizes[op]
            sums.add(size)
    ordered = sorted(sums, reverse=True)
    if len(ordered) <= MOST_THRESHOLDS:
        return ordered
    step = (len(ordered) - 1) / (MOST_THRESHOLDS - 1)
    return [ordered[round(i * step)] for i in range(MOST_THRESHOLDS)]


def greedy_choices(graph: Graph, forward: int, candidates: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The different sets of checkpoints that some segment size leads to, from one segment to many."""
    seen = set()
    for threshold in thresholds(graph, forward):
        chosen = by_size(graph, forward, candidates, threshold)
        if chosen not in seen:
            seen.add(chosen)
            yield chosen


def retained(graph: Graph, forward: int, checkpoints: Sequence[int]) -> Retained:
    """What Chen's backward pass holds, as S, given checkpoints among the forward ops.

    Checkpoints stay once made. Another forward value is dropped after its last use in the forward pass and made again
    when the backward pass first needs a value of its segment, to stay until its last use; the segment after the last
    checkpoint is still there when the backward pass begins. Backward values stay until their last use. An optional
    value is never a checkpoint: it belongs to the segment that its op closes.
    """
    marks = sorted(checkpoints)
    stay = frozenset(marks) | pinned_ops(graph)
    optional = frozenset(graph.optional)
    segment = [bisect_left(marks, op) for op in range(forward)]
    inside = [
        op < forward and (op not in stay or value in optional) for value, op in enumerate(graph.value_op)
    ]  # [values] whether it lives and dies with its segment
    begins = [graph.ops] * (len(marks) + 1)  # [segments] the first backward op that needs one of its values
    for op in range(graph.ops - 1, forward - 1, -1):
        for value in graph.op_inputs[op]:
            if inside[value]:
                begins[segment[graph.value_op[value]]] = op
    stages: list[list[tuple[int, int]]] = []
    for value, op in enumerate(graph.value_op):
        users = graph.users[value]
        last = users[-1] if users else op
        if op >= forward or (inside[value] and segment[op] == len(marks)):
            stages.append([(op + 1, last)])
        elif not inside[value]:
            stages.append([(op + 1, graph.ops - 1)] if users else [])
        else:
            last_forward = max((user for user in users if user < forward), default=op)
            stages.append([(op + 1, last_forward), (max(begins[segment[op]], op) + 1, last)])
    return stages
