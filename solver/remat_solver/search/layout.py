"""One array of 64-bit integers that holds a graph, a schedule of it and its memory, and names for what lies in it.

A schedule is a set of (stage, op) pairs: op v runs in stage t, before op t runs for the first time; every pair (v, v)
is in it. Pairs run in the order of their keys t·n + v (Checkmate, Section 4, calls the set R). Compiled functions pass
one array much faster than a tuple of many, so all is one, `m`. Who reads and writes it does so by the registers and the
functions of this module; only `profile`, whose blocks these are, knows the columns of a block.

With n ops, v values, e readings and b blocks at most:

    place        what lies there                             columns of a row
    0            registers                                   N OVER COST BUDGET … BEST_COST
    12           the places below                            OPS_AT VALUES_AT … POOL_END
    OPS_AT       n + 1 ops, OP apart                         READS MAKES OP_COST WORKSPACE LAST STAGES RUNS ROOM
    VALUES_AT    v + 1 values, VALUE apart                   USERS MAKER SIZE KIND
    ← READS      e values that ops read, op by op            value
    ← USERS      e ops that read values, value by value      op
    BLOCKS_AT    the blocks, `BLOCKS` of b + 1               FIRST LAZY TOP BOTTOM COUNT ROW
    FREE_AT      the rows of no block, `FREE` of b           place of the row
    EXTRAS_AT    the recomputations, `EXTRAS` of them        stage, op
    JOURNAL_AT   the changes of a move, `JOURNAL` of them    placed or removed, stage, op
    BEST_AT      the best schedule, `BEST_LENGTH` long       key
    ← ROW        b rows of 2 · BLOCK, from ROWS_AT on        COUNT keys; from BLOCK on the memory at each, less LAZY
    ← STAGES     what each op has room for, from POOL_AT     RUNS times: stage, number among the recomputations
    POOL         the end of what is used
    POOL_END

← X says that column X of a row leads there: it holds an index into `m` itself. What an op reads ends where the next
op's `READS` points, its values end before the next op's `MAKES`, and a value's readers where the next value's `USERS`
points: that is what the row behind the last op and the last value is for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from remat_ir import Graph

from .. import _numba

Ints: TypeAlias = NDArray[np.int64]
F = TypeVar("F", bound=Callable[..., Any])

compiled: Callable[[F], F] = _numba.kernel(nogil=True, boundscheck=False, error_model="numpy")
int64: Any = np.int64
"""For an argument that is a literal: numba compiles a function once for each literal that it is called with."""
inner: Callable[[F], F] = _numba.inner(boundscheck=False, error_model="numpy")

# registers; OVER is the sum over all keys of max(0, memory − budget)
N, OVER, COST, BUDGET, BLOCKS, FREE, EXTRAS, POOL, JOURNAL, RANDOM, BEST_LENGTH, BEST_COST = range(12)
# places of tables, in their order; most end where the next one starts
OPS_AT, VALUES_AT, BLOCKS_AT, FREE_AT, EXTRAS_AT, JOURNAL_AT, BEST_AT, ROWS_AT, POOL_AT, POOL_END = range(12, 22)
HEAD = 24
# columns of an op, and of a value; LAST is the last stage in which an op may run
READS, MAKES, OP_COST, WORKSPACE, LAST, STAGES, RUNS, ROOM = range(8)
OP = 8
USERS, MAKER, SIZE, KIND = range(4)
VALUE = 4
OPTIONAL, KEEP = 1, 2
"""Kinds of a value: it is made only where something reads it, or it stays to the end."""
# a block: `ROW` leads to its keys, and BLOCK further to the memory at them
BLOCK = 64
FIRST, LAZY, TOP, BOTTOM, COUNT, ROW = range(6)
BLOCK_COLUMNS = 8
_STAGE, _EXTRA, _CHANGE = 2, 2, 3
"""Numbers of an entry: of an op's stages, of the recomputations, of the journal."""
_CHANGES = 4096
NO_COST = 1 << 62


def profile_of(graph: Graph, budget_bytes: int, seed: int) -> Ints:
    """The array of a graph with room for 4 recomputations per op, about 4 kB per op; `profile.load` comes next.

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
    values_at = HEAD + (n + 1) * OP
    edges_at = values_at + (values + 1) * VALUE
    blocks_at = edges_at + 2 * edges
    free_at = blocks_at + (rows + 1) * BLOCK_COLUMNS
    extras_at = free_at + rows
    journal_at = extras_at + _EXTRA * most
    best_at = journal_at + _CHANGE * _CHANGES
    rows_at = best_at + n + most
    pool_at = rows_at + rows * 2 * BLOCK
    end = pool_at + _STAGE * (8 * n + 12 * most)

    m = np.zeros(end, np.int64)
    m[OPS_AT : POOL_END + 1] = (
        *(HEAD, values_at, blocks_at, free_at, extras_at, journal_at, best_at, rows_at, pool_at, end),
    )
    m[N], m[BUDGET] = n, (budget_bytes - graph.fixed_bytes) >> shift
    m[BEST_COST] = NO_COST
    m[RANDOM] = ((2 * seed + 1) * 0x9E3779B97F4A7C15 % 2**63) | 1
    _fill_ops(graph, m[HEAD:values_at].reshape(n + 1, OP), shift, edges_at)
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


@inner
def inputs_at(m: Ints, op: int) -> int:
    """Where the values that an op reads begin in `m`; they end at those of the next op."""
    return int(m[m[OPS_AT] + op * OP + READS])


@inner
def values_from(m: Ints, op: int) -> int:
    """The first value that an op makes; the last one comes before the first of the next op."""
    return int(m[m[OPS_AT] + op * OP + MAKES])


@inner
def cost_of(m: Ints, op: int) -> int:
    """Ns of one run of an op."""
    return int(m[m[OPS_AT] + op * OP + OP_COST])


@inner
def workspace_of(m: Ints, op: int) -> int:
    """Bytes that an op needs while it runs."""
    return int(m[m[OPS_AT] + op * OP + WORKSPACE])


@inner
def last_stage(m: Ints, op: int) -> int:
    """The last stage in which an op may run."""
    return int(m[m[OPS_AT] + op * OP + LAST])


@inner
def runs_of(m: Ints, op: int) -> int:
    """In how many stages an op runs."""
    return int(m[m[OPS_AT] + op * OP + RUNS])


@inner
def readers_at(m: Ints, value: int) -> int:
    """Where the ops that read a value begin in `m`; they end at those of the next value."""
    return int(m[m[VALUES_AT] + value * VALUE + USERS])


@inner
def maker_of(m: Ints, value: int) -> int:
    """The op that makes a value."""
    return int(m[m[VALUES_AT] + value * VALUE + MAKER])


@inner
def size_of(m: Ints, value: int) -> int:
    """Bytes of a value, scaled."""
    return int(m[m[VALUES_AT] + value * VALUE + SIZE])


@inner
def kind_of(m: Ints, value: int) -> int:
    """`OPTIONAL`, `KEEP`, or 0."""
    return int(m[m[VALUES_AT] + value * VALUE + KIND])


@inner
def _stage_at(m: Ints, op: int, index: int) -> int:
    """Where the index-th stage of an op is in `m`; behind it lies its number among the recomputations."""
    return int(m[m[OPS_AT] + op * OP + STAGES] + _STAGE * index)


@inner
def stage_index(m: Ints, op: int, stage: int) -> int:
    """Index among the op's stages of the last one at or before `stage`, or −1."""
    at, low, high = _stage_at(m, op, int64(0)), 0, runs_of(m, op)
    while low < high:
        middle = (low + high) >> 1
        if m[at + _STAGE * middle] <= stage:
            low = middle + 1
        else:
            high = middle
    return low - 1


@inner
def nth_stage(m: Ints, op: int, index: int) -> int:
    """The op's index-th stage, or n behind the last."""
    return int(m[_stage_at(m, op, index)] if index < runs_of(m, op) else m[N])


@inner
def runs_in(m: Ints, op: int, stage: int) -> bool:
    """Whether the op runs in the stage."""
    i = stage_index(m, op, stage)
    return i >= 0 and nth_stage(m, op, i) == stage


@inner
def begin_stages(m: Ints, keys: Ints) -> None:
    """Let every op run in its own stage alone, with room for twice its stages among some keys."""
    n, used = m[N], m[POOL_AT]
    m[EXTRAS] = 0
    for op in range(n):
        m[m[OPS_AT] + op * OP + RUNS] = 0
    for key in keys:
        m[m[OPS_AT] + key % n * OP + RUNS] += 1
    for op in range(n):
        o = m[OPS_AT] + op * OP
        m[o + STAGES], m[o + ROOM] = used, 2 * m[o + RUNS]
        used += _STAGE * m[o + ROOM]
        m[o + RUNS] = 1
        m[m[o + STAGES]] = op
    m[POOL] = used


@inner
def enter_stage(m: Ints, op: int, index: int, stage: int) -> None:
    """Enter a stage behind the index-th of the op, and the pair among the recomputations."""
    o, runs = m[OPS_AT] + op * OP, runs_of(m, op)
    if runs == m[o + ROOM]:
        old, new = m[o + STAGES], m[POOL]
        for i in range(_STAGE * runs):
            m[new + i] = m[old + i]
        m[o + STAGES], m[o + ROOM] = new, 2 * runs
        m[POOL] = new + _STAGE * 2 * runs
    at = _stage_at(m, op, index + 1)
    for i in range(_stage_at(m, op, runs) - 1, at - 1, -1):
        m[i + _STAGE] = m[i]
    m[at], m[at + 1] = stage, m[EXTRAS]
    m[o + RUNS] = runs + 1
    _set_extra(m, m[EXTRAS], stage, op)
    m[EXTRAS] += 1


@inner
def delete_stage(m: Ints, op: int, index: int) -> None:
    """Take the index-th stage of an op out; the last of the recomputations takes its number."""
    at, last = _stage_at(m, op, index), m[EXTRAS] - 1
    number = m[at + 1]
    m[m[OPS_AT] + op * OP + RUNS] -= 1
    for i in range(at, _stage_at(m, op, runs_of(m, op))):
        m[i] = m[i + _STAGE]
    if number != last:
        stage, other = extra(m, last)
        _set_extra(m, number, stage, other)
        m[_stage_at(m, other, stage_index(m, other, stage)) + 1] = number
    m[EXTRAS] = last


@inner
def extra(m: Ints, number: int) -> tuple[int, int]:
    """Stage and op of a recomputation; there are `EXTRAS` of them."""
    at = m[EXTRAS_AT] + _EXTRA * number
    return m[at], m[at + 1]


@inner
def _set_extra(m: Ints, number: int, stage: int, op: int) -> None:
    at = m[EXTRAS_AT] + _EXTRA * number
    m[at], m[at + 1] = stage, op


@inner
def has_room(m: Ints) -> bool:
    """Whether one more recomputation fits into the tables."""
    extras = m[EXTRAS_AT] + _EXTRA * (m[EXTRAS] + 1) < m[JOURNAL_AT]
    pool = m[POOL] + 4 * _STAGE * (m[EXTRAS] + 1) < m[POOL_END]
    return bool(extras and pool and m[FREE] > 1)


@inner
def note_change(m: Ints, placed: int, stage: int, op: int) -> None:
    """Add a change of a move to the journal."""
    at = m[JOURNAL_AT] + _CHANGE * m[JOURNAL]
    m[at], m[at + 1], m[at + 2] = placed, stage, op
    m[JOURNAL] += 1


@inner
def change(m: Ints, number: int) -> tuple[int, int, int]:
    """A change in the journal: whether the op was placed, the stage, and the op."""
    at = m[JOURNAL_AT] + _CHANGE * number
    return m[at], m[at + 1], m[at + 2]


@inner
def journal_full(m: Ints) -> bool:
    """Whether the journal takes no further change."""
    return bool(m[JOURNAL_AT] + _CHANGE * (m[JOURNAL] + 1) > m[BEST_AT])
