"""What baselines of the literature retain, as S: Chen et al.'s sublinear memory, Griewank and Walther's revolve."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import comb
from typing import NamedTuple

from remat_ir import Graph
from remat_ir.graph import pinned_ops

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
    sums = {0}
    for first in range(0, forward, max(1, forward // 100)):
        sums.update(accumulate(sizes[first:]))
    ordered = sorted(sums, reverse=True)
    if len(ordered) <= MOST_THRESHOLDS:
        return ordered
    step = (len(ordered) - 1) / (MOST_THRESHOLDS - 1)
    return [ordered[round(i * step)] for i in range(MOST_THRESHOLDS)]


def chen_retained(graph: Graph, forward: int, checkpoints: Sequence[int]) -> Retained:
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


class Snapshot(NamedTuple):
    """The state after step `step` is held while steps `highest` down to `lowest` are reversed."""

    step: int
    highest: int
    lowest: int


def repetitions(length: int, slots: int) -> int:
    """r, the most often that revolve runs a step: the least with C(slots + r, slots) ≥ length."""
    r = 0
    while comb(slots + r, slots) < length:
        r += 1
    return r


def advances(length: int, slots: int) -> int:
    """The steps run to reverse `length` steps with `slots` slots, the start's own included, turns not counted.

    Griewank and Walther, Algorithm 799, equation (3): r · length − C(slots + r, slots + 1).
    """
    r = repetitions(length, slots)
    return r * length - comb(slots + r, slots + 1)


def split(length: int, slots: int) -> int:
    """How many steps to run before the next snapshot, so that `advances` is reached (Algorithm 799, Section 2)."""
    r = repetitions(length, slots)
    least_left = comb(slots + r - 2, slots - 1) if r >= 1 else 1  # what slots − 1 can reverse in r − 1 repetitions
    return min(comb(slots + r - 1, slots), length - least_left)


def snapshots(length: int, slots: int) -> Iterator[Snapshot]:
    """Revolve's snapshots for steps 0 … length−1; the step's own input takes the first of the slots, and is not named.

    Raises:
        ValueError: no slot at all.
    """
    if slots < 1:
        raise ValueError("revolve needs a slot for the input")
    ranges = [(0, length, slots)]
    while ranges:
        start, end, free = ranges.pop()
        if free > 1 and end - start > 1:
            middle = start + split(end - start, free)
            yield Snapshot(middle - 1, end - 1, middle)
            ranges.extend([(start, middle, free), (middle, end, free - 1)])


def revolve_retained(graph: Graph, forward: int, slots: int) -> Retained:
    """What revolve holds, as S, on a linear graph whose forward steps are ops 0 … forward−1.

    A backward op reverses the latest forward op that it or an earlier backward op has brought it down to. While step j
    is reversed, the snapshots of the schedule are held, and the values of steps j and j − 1 from their first use to
    their last; each reversal runs step j again, as revolve's turn does. Backward values stay until their last use.
    """
    latest = [
        max((graph.value_op[v] for v in inputs if graph.value_op[v] < forward), default=forward - 1)
        for inputs in graph.op_inputs[forward:]
    ]
    reversing = list(accumulate(latest, min))  # [backward ops] the forward step that each one reverses
    first, last = _reversing_stages(reversing, forward, graph.ops)
    stages: list[list[tuple[int, int]]] = []
    for value, op in enumerate(graph.value_op):
        users = graph.users[value]
        if op >= forward:
            stages.append([(op + 1, users[-1] if users else op)])
            continue
        # op j's value is its successor's input: revolve_retained for one stage of the forward pass
        runs = [(op + 1, op + 1)] if op + 1 < forward else []
        for turn in (op, op + 1):
            reads = [user for user in users if user >= forward and reversing[user - forward] == turn]
            if reads:
                begin = op + 1 if turn == forward - 1 else first[turn] + 1
                runs.append((begin, reads[-1]))
        stages.append(runs)
    optional = frozenset(graph.optional)
    for held in snapshots(forward, slots):
        begin = held.step + 1 if held.highest == forward - 1 else first[held.highest] + 1
        for value in graph.op_values[held.step]:
            if value not in optional:
                stages[value].append((begin, last[held.lowest]))
    return stages


def _reversing_stages(reversing: list[int], forward: int, ops: int) -> tuple[list[int], list[int]]:
    """[steps] the first stage that reverses this step or a lower one, and the last that reverses it or a higher one."""
    first, last = [ops] * forward, [forward - 1] * forward
    for op, step in enumerate(reversing, forward):
        first[step], last[step] = min(first[step], op), op
    return list(accumulate(first, min)), list(accumulate(reversed(last), max))[::-1]
