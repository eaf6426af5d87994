"""Making the array of a profile from a graph, loading schedules into it, and reading them back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from remat_ir import Graph, Plan, plan_of

from .profile import (
    BEST_AT,
    BEST_COST,
    BEST_LENGTH,
    BLOCK,
    BLOCK_COLUMNS,
    BLOCKS,
    BLOCKS_AT,
    BUDGET,
    COST,
    COUNT,
    EXTRAS,
    EXTRAS_AT,
    FIRST,
    FREE,
    FREE_AT,
    HEAD,
    JOURNAL,
    JOURNAL_AT,
    KEEP,
    KIND,
    LAST,
    LAZY,
    MAKER,
    MAKES,
    OP,
    OP_COST,
    OPS_AT,
    OPTIONAL,
    OVER,
    POOL,
    POOL_AT,
    POOL_END,
    RANDOM,
    READS,
    ROOM,
    ROW,
    ROWS_AT,
    RUNS,
    SIZE,
    STAGE,
    STAGES,
    USERS,
    VALUE,
    VALUES_AT,
    WORKSPACE,
    Ints,
    N,
    compiled,
    inner,
    last_use,
    nth_stage,
    refresh,
)

_FILL = BLOCK * 3 // 4
_CHANGES = 4096
NO_COST = 1 << 62


def profile_of(graph: Graph, budget_bytes: int, seed: int) -> Ints:
    """The array of a profile with room for 4 recomputations per op, about 4 kB per op; `load` comes next.

    Sizes are scaled, rounded up, where the sum over all keys might leave 64 bits: a schedule that fits the scaled
    budget fits the true one.
    """
    n, values = graph.ops, graph.values
    most = 4 * n + 1024
    rows = 4 * (n + most) // BLOCK + 8
    shift = 0
    while ((sum(graph.value_bytes) + sum(graph.op_workspace_bytes)) >> shift) * (n + most) >= 1 << 62:
        shift += 1

    edges = sum(map(len, graph.op_inputs))
    ops_at = HEAD
    values_at = ops_at + (n + 1) * OP
    edges_at = values_at + (values + 1) * VALUE
    blocks_at = edges_at + 2 * edges
    free_at = blocks_at + (rows + 1) * BLOCK_COLUMNS
    extras_at = free_at + rows
    journal_at = extras_at + 2 * most
    best_at = journal_at + 3 * _CHANGES
    rows_at = best_at + n + most
    pool_at = rows_at + rows * 2 * BLOCK
    end = pool_at + STAGE * (8 * n + 12 * most)

    m = np.zeros(end, np.int64)
    m[[N, OPS_AT, VALUES_AT, BLOCKS_AT, FREE_AT]] = n, ops_at, values_at, blocks_at, free_at
    m[[EXTRAS_AT, JOURNAL_AT, BEST_AT, ROWS_AT, POOL_AT, POOL_END]] = (
        extras_at,
        journal_at,
        best_at,
        rows_at,
        pool_at,
        end,
    )
    m[BUDGET] = (budget_bytes - graph.fixed_bytes) >> shift
    m[BEST_COST] = NO_COST
    m[RANDOM] = ((2 * seed + 1) * 0x9E3779B97F4A7C15 % 2**63) | 1
    _fill_ops(graph, m[ops_at:values_at].reshape(n + 1, OP), shift, edges_at)
    _fill_values(graph, m[values_at:edges_at].reshape(values + 1, VALUE), shift, edges_at + edges)
    m[edges_at : edges_at + edges] = [value for inputs in graph.op_inputs for value in inputs]
    m[edges_at + edges : blocks_at] = [op for users in graph.users for op in users]
    return m


def _fill_ops(graph: Graph, table: Ints, shift: int, reads_at: int) -> None:
    n = graph.ops
    table[:, READS] = reads_at
    table[1:, READS] += np.cumsum([len(inputs) for inputs in graph.op_inputs])
    table[1:, MAKES] = np.cumsum([len(values) for values in graph.op_values])
    table[:n, OP_COST] = graph.op_cost_ns
    table[:n, WORKSPACE] = -(-np.array(graph.op_workspace_bytes, np.int64) >> shift)
    table[:n, LAST] = graph.last_stage


def _fill_values(graph: Graph, table: Ints, shift: int, users_at: int) -> None:
    values = graph.values
    table[:, USERS] = users_at
    table[1:, USERS] += np.cumsum([len(users) for users in graph.users], dtype=np.int64)
    table[:values, MAKER] = graph.value_op
    table[:values, SIZE] = -(-np.array(graph.value_bytes, np.int64) >> shift)
    table[list(graph.optional), KIND] = OPTIONAL
    table[list(graph.keep), KIND] = KEEP


@compiled
def load(m: Ints, keys: Ints) -> None:
    """Make the schedule of the ascending `keys`, which hold every (v, v), the current one."""
    n, ops, length = m[N], m[OPS_AT], len(keys)
    m[COST] = m[EXTRAS] = m[OVER] = m[JOURNAL] = 0
    for op in range(n):
        m[ops + op * OP + RUNS] = 0
    for key in keys:
        m[ops + key % n * OP + RUNS] += 1
    used = m[POOL_AT]
    for op in range(n):
        o = ops + op * OP
        m[o + STAGES], m[o + ROOM] = used, 2 * m[o + RUNS]
        used += STAGE * 2 * m[o + RUNS]
        m[o + RUNS] = 0
    m[POOL] = used
    for key in keys:
        stage, op = key // n, key % n
        o = ops + op * OP
        at = m[o + STAGES] + STAGE * m[o + RUNS]
        m[at] = stage
        m[o + RUNS] += 1
        m[COST] += m[o + OP_COST]
        if stage > op:
            extra = m[EXTRAS_AT] + 2 * m[EXTRAS]
            m[at + 1], m[extra], m[extra + 1] = m[EXTRAS], stage, op
            m[EXTRAS] += 1
    change = np.zeros(length + 1, np.int64)
    for start in range(length):
        stage, op = keys[start] // n, keys[start] % n
        _lifetimes_of(m, keys, start, stage, op, change)
    _fill_blocks(m, keys, change)


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
    n, o = m[N], m[OPS_AT] + op * OP
    change[start] += m[o + WORKSPACE]
    change[start + 1] -= m[o + WORKSPACE]
    i = 0
    while m[m[o + STAGES] + STAGE * i] != stage:
        i += 1
    for value in range(m[o + MAKES], m[o + OP + MAKES]):
        v = m[VALUES_AT] + value * VALUE
        end = last_use(m, value, stage, nth_stage(m, op, i + 1))
        stop = start + 1
        if end >= n * n:
            stop = len(keys)
        elif end >= 0:
            stop = _position(keys, end) + 1
        elif m[v + KIND] == OPTIONAL:
            continue
        change[start] += m[v + SIZE]
        change[stop] -= m[v + SIZE]


@inner
def _fill_blocks(m: Ints, keys: Ints, change: Ints) -> None:
    length, memory = len(keys), 0
    rows = m[EXTRAS_AT] - m[FREE_AT]
    for i in range(rows):
        m[m[FREE_AT] + i] = m[ROWS_AT] + 2 * BLOCK * (rows - 1 - i)
    m[FREE], m[BLOCKS] = rows, (length + _FILL - 1) // _FILL
    block = m[BLOCKS_AT] - BLOCK_COLUMNS
    for i in range(length):
        memory += change[i]
        if i % _FILL == 0:
            block += BLOCK_COLUMNS
            m[FREE] -= 1
            m[block + ROW] = m[m[FREE_AT] + m[FREE]]
            m[block + FIRST], m[block + LAZY] = keys[i], 0
        at = m[block + ROW] + i % _FILL
        m[at], m[at + BLOCK] = keys[i], memory
        m[block + COUNT] = i % _FILL + 1
        m[OVER] += max(0, memory - m[BUDGET])
    for b in range(m[BLOCKS]):
        refresh(m, m[BLOCKS_AT] + b * BLOCK_COLUMNS)


@inner
def note_best(m: Ints) -> None:
    """Note the current schedule as the best one."""
    at = m[BEST_AT]
    for b in range(m[BLOCKS]):
        block = m[BLOCKS_AT] + b * BLOCK_COLUMNS
        for i in range(m[block + COUNT]):
            m[at] = m[m[block + ROW] + i]
            at += 1
    m[BEST_LENGTH], m[BEST_COST] = at - m[BEST_AT], m[COST]


def note_loaded(m: Ints, keys: Ints) -> None:
    """Note the schedule that has just been loaded, if it is within the budget and cheaper than the best."""
    if m[OVER] == 0 and m[COST] < m[BEST_COST]:
        m[m[BEST_AT] : m[BEST_AT] + len(keys)] = keys
        m[BEST_LENGTH], m[BEST_COST] = len(keys), m[COST]


def best_keys(m: Ints) -> Ints:
    """The ascending keys of the best schedule within the budget; empty without one."""
    return m[m[BEST_AT] : m[BEST_AT] + m[BEST_LENGTH]].copy()


def current(m: Ints) -> tuple[Ints, Ints]:
    """The ascending keys of the current schedule, and at each the memory without fixed bytes, in scaled bytes."""
    keys, memory = [], []
    for b in range(m[BLOCKS]):
        block = m[m[BLOCKS_AT] + b * BLOCK_COLUMNS : m[BLOCKS_AT] + (b + 1) * BLOCK_COLUMNS]
        row, count = block[ROW], block[COUNT]
        keys.append(m[row : row + count])
        memory.append(m[row + BLOCK : row + BLOCK + count] + block[LAZY])
    return np.concatenate(keys), np.concatenate(memory)


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
