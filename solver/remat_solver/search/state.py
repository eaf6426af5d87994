"""Loading schedules into a profile, and reading them back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from remat_ir import Graph, Plan, plan_of

from .layout import (
    BEST_AT,
    BEST_COST,
    BEST_LENGTH,
    COST,
    JOURNAL,
    OPTIONAL,
    OVER,
    Ints,
    N,
    begin_stages,
    compiled,
    cost_of,
    enter_stage,
    inner,
    kind_of,
    nth_stage,
    runs_of,
    size_of,
    stage_index,
    values_from,
    workspace_of,
)
from .profile import fill_blocks, last_use


@compiled
def load(m: Ints, keys: Ints) -> None:
    """Make the schedule of the ascending `keys`, which hold every (v, v), the current one."""
    n = m[N]
    m[COST] = m[JOURNAL] = 0
    begin_stages(m, keys)
    for key in keys:
        stage, op = key // n, key % n
        m[COST] += cost_of(m, op)
        if stage > op:
            enter_stage(m, op, runs_of(m, op) - 1, stage)
    change = np.zeros(len(keys) + 1, np.int64)
    for start in range(len(keys)):
        _lifetimes_of(m, keys, start, keys[start] // n, keys[start] % n, change)
    fill_blocks(m, keys, change)


@inner
def _position(keys: Ints, key: int) -> int:
    """Where the key is among the ascending keys."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) >> 1
        if keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low


@inner
def _lifetimes_of(m: Ints, keys: Ints, start: int, stage: int, op: int, change: Ints) -> None:
    change[start] += workspace_of(m, op)
    change[start + 1] -= workspace_of(m, op)
    after = nth_stage(m, op, stage_index(m, op, stage) + 1)
    for value in range(values_from(m, op), values_from(m, op + 1)):
        end = last_use(m, value, stage, after)
        stop = start + 1
        if end >= m[N] * m[N]:
            stop = len(keys)
        elif end >= 0:
            stop = _position(keys, end) + 1
        elif kind_of(m, value) == OPTIONAL:
            continue
        change[start] += size_of(m, value)
        change[stop] -= size_of(m, value)


def note_loaded(m: Ints, keys: Ints) -> None:
    """Note the schedule that has just been loaded, if it is within the budget and cheaper than the best."""
    if m[OVER] == 0 and m[COST] < m[BEST_COST]:
        m[m[BEST_AT] : m[BEST_AT] + len(keys)] = keys
        m[BEST_LENGTH], m[BEST_COST] = len(keys), m[COST]


def best_keys(m: Ints) -> Ints:
    """The ascending keys of the best schedule within the budget; empty without one."""
    return m[m[BEST_AT] : m[BEST_AT] + m[BEST_LENGTH]].copy()


def keys_of(graph: Graph, sequence: Sequence[int]) -> Ints:
    """The keys of a sequence of ops: an op that runs more than once in a stage counts once there."""
    keys, stage = set(), 0
    for op in sequence:
        keys.add(stage * graph.ops + op)
        if op == stage:
            stage += 1
    return np.array(sorted(keys), np.int64)


def sequence_of(graph: Graph, keys: Ints) -> tuple[int, ...]:
    """The ops of a schedule in the order in which they run."""
    return tuple((keys % graph.ops).tolist())


def plan_from(graph: Graph, keys: Ints) -> Plan:
    """The plan of a schedule."""
    return plan_of(graph, sequence_of(graph, keys))
