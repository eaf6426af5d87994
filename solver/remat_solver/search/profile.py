"""The memory profile of a set of recomputations, kept up to date in compiled code while the set changes."""

from __future__ import annotations

from .layout import (
    BLOCK,
    BLOCK_COLUMNS,
    COST,
    COUNT,
    EXTRAS,
    EXTRAS_AT,
    FREE,
    JOURNAL_AT,
    KIND,
    LAZY,
    MAKER,
    MAKES,
    OP,
    OP_COST,
    OPS_AT,
    OPTIONAL,
    POOL,
    POOL_END,
    READS,
    ROOM,
    ROW,
    RUNS,
    SIZE,
    STAGE,
    STAGES,
    VALUE,
    VALUES_AT,
    WORKSPACE,
    Ints,
    N,
    inner,
    int64,
)
from .lifetimes import (
    last_use,
    nth_stage,
    stage_index,
)
from .memory import (
    add_between,
    erase,
    insert,
    locate,
    rank,
)


@inner
def _starting(m: Ints, stage: int, op: int) -> int:
    """Bytes that begin with one run of an op: outputs that it makes, and its workspace."""
    o = m[OPS_AT] + op * OP
    begins = m[o + WORKSPACE]
    for value in range(m[o + MAKES], m[o + OP + MAKES]):
        v = m[VALUES_AT] + value * VALUE
        if m[v + KIND] == OPTIONAL:
            after = nth_stage(m, op, stage_index(m, op, stage) + 1)
            if last_use(m, value, stage, after) < 0:
                continue
        begins += m[v + SIZE]
    return int(begins)


@inner
def _list_stage(m: Ints, op: int, index: int, stage: int) -> None:
    """Enter a stage behind the index-th of the op, and the pair among the recomputations."""
    o = m[OPS_AT] + op * OP
    runs = m[o + RUNS]
    if runs == m[o + ROOM]:
        old, new = m[o + STAGES], m[POOL]
        for i in range(STAGE * runs):
            m[new + i] = m[old + i]
        m[o + STAGES], m[o + ROOM] = new, 2 * runs
        m[POOL] = new + STAGE * 2 * runs
    at = m[o + STAGES] + STAGE * (index + 1)
    for i in range(m[o + STAGES] + STAGE * runs - 1, at - 1, -1):
        m[i + STAGE] = m[i]
    number = m[EXTRAS]
    m[at], m[at + 1] = stage, number
    m[o + RUNS] = runs + 1
    extra = m[EXTRAS_AT] + 2 * number
    m[extra], m[extra + 1] = stage, op
    m[EXTRAS] = number + 1


@inner
def _unlist_stage(m: Ints, op: int, index: int) -> None:
    o = m[OPS_AT] + op * OP
    at = m[o + STAGES] + STAGE * index
    number, last = m[at + 1], m[EXTRAS] - 1
    m[o + RUNS] -= 1
    for i in range(at, m[o + STAGES] + STAGE * m[o + RUNS]):
        m[i] = m[i + STAGE]
    if number != last:
        extra, moved = m[EXTRAS_AT] + 2 * number, m[EXTRAS_AT] + 2 * last
        m[extra], m[extra + 1] = m[moved], m[moved + 1]
        other = m[OPS_AT] + m[moved + 1] * OP
        m[m[other + STAGES] + STAGE * stage_index(m, m[moved + 1], m[moved]) + 1] = number
    m[EXTRAS] = last


@inner
def has_room(m: Ints) -> bool:
    """Whether one more recomputation fits into the tables."""
    extras = m[EXTRAS_AT] + 2 * m[EXTRAS] + 2 < m[JOURNAL_AT]
    pool = m[POOL] + 4 * STAGE * (m[EXTRAS] + 1) < m[POOL_END]
    return bool(extras and pool and m[FREE] > 1)


@inner
def _input_lifetimes(m: Ints, stage: int, op: int, sign: int) -> int:
    """Lengthen (sign 1) or shorten (−1) the inputs' lifetimes up to one run of an op; the bytes by which they do."""
    n, o = m[N], m[OPS_AT] + op * OP
    key = stage * n + op
    total = 0
    for e in range(m[o + READS], m[o + OP + READS]):
        v = m[VALUES_AT] + m[e] * VALUE
        maker = m[v + MAKER]
        j = stage_index(m, maker, stage)
        made = nth_stage(m, maker, j)
        low = last_use(m, m[e], made, nth_stage(m, maker, j + 1))
        if low < key:
            if low < 0:
                low = made * n + maker - (m[v + KIND] == OPTIONAL)
            add_between(m, low, key, sign * m[v + SIZE])
            total += m[v + SIZE]
    return int(total)


@inner
def _output_lifetimes(m: Ints, stage: int, op: int, before: int, after: int, sign: int) -> int:
    """Cut (sign −1) or join (1) the older instances of what a run of an op makes anew; its bytes that nobody reads."""
    n, o = m[N], m[OPS_AT] + op * OP
    total = 0
    for value in range(m[o + MAKES], m[o + OP + MAKES]):
        v = m[VALUES_AT] + value * VALUE
        if last_use(m, value, stage, after) < 0:
            if m[v + KIND] != OPTIONAL:
                total += m[v + SIZE]
            continue
        low = last_use(m, value, before, stage)
        if low < 0:
            low = before * n + op - (m[v + KIND] == OPTIONAL)
        add_between(m, low, stage * n + op - 1, sign * m[v + SIZE])
    return int(total)


@inner
def place(m: Ints, stage: int, op: int) -> None:
    """Let the op run in the stage, where it does not; it must be allowed to, and stage > op."""
    n = m[N]
    key = stage * n + op
    index = stage_index(m, op, stage)
    block = locate(m, key)
    i = rank(m, block, key)
    if i == m[block + COUNT]:
        block, i = block + BLOCK_COLUMNS, 0
    follower = m[m[block + ROW] + i]
    # what the follower finds resident is what this run finds, values read from now on included
    here = m[m[block + ROW] + BLOCK + i] + m[block + LAZY] - _starting(m, follower // n, follower % n)
    here += m[m[OPS_AT] + op * OP + WORKSPACE]
    here += _output_lifetimes(m, stage, op, nth_stage(m, op, index), nth_stage(m, op, index + 1), int64(-1))
    here += _input_lifetimes(m, stage, op, int64(1))
    insert(m, key, here)
    _list_stage(m, op, index, stage)
    m[COST] += m[m[OPS_AT] + op * OP + OP_COST]


@inner
def remove(m: Ints, stage: int, op: int) -> None:
    """Let the op run in the stage no longer; the exact inverse of `place`."""
    index = stage_index(m, op, stage)
    _unlist_stage(m, op, index)
    erase(m, stage * m[N] + op)
    _output_lifetimes(m, stage, op, nth_stage(m, op, index - 1), nth_stage(m, op, index), int64(1))
    _input_lifetimes(m, stage, op, int64(-1))
    m[COST] -= m[m[OPS_AT] + op * OP + OP_COST]
