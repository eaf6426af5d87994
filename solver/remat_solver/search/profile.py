"""The memory profile of a set of recomputations: one array, kept up to date in compiled code while the set changes.

A schedule is a set of (stage, op) pairs: op v runs in stage t, before op t runs for the first time; every pair (v, v)
is in it. Pairs run in the order of their keys t·n + v, each use reads the latest instance, an instance of a value lives
to its last use. So every set is a schedule, and only memory can fail (Checkmate, Section 4, calls the set R).

The profile holds the bytes at every key. It is a list of blocks of up to `BLOCK` keys; each block has a pending addend
and bounds on its entries, so that most of a range addition touches a block in one step.

All of it is one array `m` of 64-bit integers: compiled functions pass one array much faster than a tuple of many. With
n ops, v values, e readings and b blocks at most:

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
points: that is what the row behind the last op and the last value is for. `LAST` is the last stage in which an op may
run. So the i-th stage of an op is `m[m[o + STAGES] + STAGE * i]` with o = `m[OPS_AT] + op * OP`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import _numba

Ints: TypeAlias = NDArray[np.int64]
F = TypeVar("F", bound=Callable[..., Any])

BLOCK = 64
compiled: Callable[[F], F] = _numba.kernel(nogil=True, boundscheck=False, error_model="numpy")
int64: Any = np.int64
"""For an argument that is a literal: numba compiles a function once for each literal that it is called with."""
inner: Callable[[F], F] = _numba.inner(boundscheck=False, error_model="numpy")

# registers; OVER is the sum over all keys of max(0, memory − budget)
N, OVER, COST, BUDGET, BLOCKS, FREE, EXTRAS, POOL, JOURNAL, RANDOM, BEST_LENGTH, BEST_COST = range(12)
# places of tables, in their order; most end where the next one starts
OPS_AT, VALUES_AT, BLOCKS_AT, FREE_AT, EXTRAS_AT, JOURNAL_AT, BEST_AT, ROWS_AT, POOL_AT, POOL_END = range(12, 22)
HEAD = 24
# columns of an op; the row behind the last op ends its `READS` and `MAKES`
READS, MAKES, OP_COST, WORKSPACE, LAST, STAGES, RUNS, ROOM = range(8)
OP = 8
# columns of a value; `USERS` likewise
USERS, MAKER, SIZE, KIND = range(4)
VALUE = 4
OPTIONAL, KEEP = 1, 2
# columns of a block: `ROW` leads to its keys, and BLOCK further to the memory at them
FIRST, LAZY, TOP, BOTTOM, COUNT, ROW = range(6)
BLOCK_COLUMNS = 8
# an entry of an op's stages: the stage, and its number among the recomputations
STAGE = 2


@inner
def stage_index(m: Ints, op: int, stage: int) -> int:
    """Index among the op's stages of the last one at or before `stage`, or −1."""
    o = m[OPS_AT] + op * OP
    at, high = m[o + STAGES], m[o + RUNS]
    low = 0
    while low < high:
        middle = (low + high) >> 1
        if m[at + STAGE * middle] <= stage:
            low = middle + 1
        else:
            high = middle
    return low - 1


@inner
def nth_stage(m: Ints, op: int, index: int) -> int:
    """The op's index-th stage, or n behind the last."""
    o = m[OPS_AT] + op * OP
    return int(m[m[o + STAGES] + STAGE * index] if index < m[o + RUNS] else m[N])


@inner
def runs_in(m: Ints, op: int, stage: int) -> bool:
    """Whether the op runs in the stage."""
    i = stage_index(m, op, stage)
    return i >= 0 and nth_stage(m, op, i) == stage


@inner
def last_use(m: Ints, value: int, start: int, end: int) -> int:
    """Key of the last use in stages start … end − 1, −1 without one, beyond all keys for a kept value."""
    v, n = m[VALUES_AT] + value * VALUE, m[N]
    if m[v + KIND] == KEEP:
        return int(n * n)
    best = -1
    ops = m[OPS_AT]
    for e in range(m[v + USERS], m[v + VALUE + USERS]):
        user = m[e]
        if user >= end:
            break
        o = ops + user * OP
        i = m[o + RUNS] - 1
        stage = m[m[o + STAGES] + STAGE * i]
        if stage >= end:
            stage = m[m[o + STAGES] + STAGE * stage_index(m, user, end - 1)]
        if stage >= start and stage * n + user > best:
            best = stage * n + user
    return int(best)


@inner
def first_use(m: Ints, value: int, after: int, end: int) -> int:
    """Key of the first use behind the key `after`, in a stage before `end`, or −1."""
    v, n = m[VALUES_AT] + value * VALUE, m[N]
    best = -1
    stage_after = after // n
    op_after = after - stage_after * n
    for e in range(m[v + USERS], m[v + VALUE + USERS]):
        user = m[e]
        if user >= end:
            break
        i = stage_index(m, user, stage_after if user <= op_after else stage_after - 1) + 1
        stage = nth_stage(m, user, i)
        if stage < end and (best < 0 or stage * n + user < best):
            best = stage * n + user
    return int(best)


@inner
def locate(m: Ints, key: int) -> int:
    """The place of the last block whose first key is at most `key`."""
    at = m[BLOCKS_AT]
    low, high = 0, m[BLOCKS]
    while high - low > 1:
        middle = (low + high) >> 1
        if m[at + middle * BLOCK_COLUMNS + FIRST] <= key:
            low = middle
        else:
            high = middle
    return int(at + low * BLOCK_COLUMNS)


@inner
def rank(m: Ints, block: int, key: int) -> int:
    """How many keys of the block are at most `key`."""
    at = m[block + ROW]
    low, high = 0, m[block + COUNT]
    while low < high:
        middle = (low + high) >> 1
        if m[at + middle] <= key:
            low = middle + 1
        else:
            high = middle
    return low


@inner
def _add_to_part(m: Ints, block: int, start: int, end: int, amount: int) -> None:
    memory = m[block + ROW] + BLOCK
    base = m[block + LAZY] - m[BUDGET]
    change = 0
    part = m[memory + start : memory + end]  # a slice, so that the loop can be vectorised
    if amount > 0:
        top = m[block + TOP]
        for i in range(len(part)):
            old = part[i]
            part[i] = old + amount
            top = max(top, old + amount)
            change += max(0, old + amount + base) - max(0, old + base)
        m[block + TOP] = top
    else:
        bottom = m[block + BOTTOM]
        for i in range(len(part)):
            old = part[i]
            part[i] = old + amount
            bottom = min(bottom, old + amount)
            change += max(0, old + amount + base) - max(0, old + base)
        m[block + BOTTOM] = bottom
    m[OVER] += change


@inner
def _add_to_block(m: Ints, block: int, amount: int) -> None:
    base = m[block + LAZY] - m[BUDGET]
    m[block + LAZY] += amount
    top, bottom = m[block + TOP] + base, m[block + BOTTOM] + base
    if top <= 0 and top + amount <= 0:
        return
    if bottom >= 0 and bottom + amount >= 0:
        m[OVER] += amount * m[block + COUNT]
        return
    memory = m[block + ROW] + BLOCK
    part = m[memory : memory + m[block + COUNT]]
    top, bottom = part[0], part[0]
    change = 0
    for i in range(len(part)):
        here = part[i]
        top, bottom = max(top, here), min(bottom, here)
        change += max(0, here + base + amount) - max(0, here + base)
    m[block + TOP], m[block + BOTTOM] = top, bottom
    m[OVER] += change


@inner
def add_between(m: Ints, low: int, high: int, amount: int) -> None:
    """Add to the memory at the keys in (low, high]."""
    if high <= low or amount == 0:
        return
    a, b = locate(m, low), locate(m, high)
    start, end = rank(m, a, low), rank(m, b, high)
    if a == b:
        if start < end:
            _add_to_part(m, a, start, end, amount)
        return
    if start < m[a + COUNT]:
        _add_to_part(m, a, start, m[a + COUNT], amount)
    for block in range(a + BLOCK_COLUMNS, b, BLOCK_COLUMNS):
        _add_to_block(m, block, amount)
    if end == m[b + COUNT]:
        _add_to_block(m, b, amount)
    elif end:
        _add_to_part(m, b, int64(0), end, amount)


@inner
def refresh(m: Ints, block: int) -> None:
    """Make the bounds of a block exact."""
    memory = m[block + ROW] + BLOCK
    part = m[memory : memory + m[block + COUNT]]
    top, bottom = part[0], part[0]
    for i in range(1, len(part)):
        top, bottom = max(top, part[i]), min(bottom, part[i])
    m[block + TOP], m[block + BOTTOM] = top, bottom


@inner
def _open_block(m: Ints, block: int) -> None:
    """Make place for a block, with an empty row."""
    end = m[BLOCKS_AT] + m[BLOCKS] * BLOCK_COLUMNS
    for i in range(end - 1, block - 1, -1):
        m[i + BLOCK_COLUMNS] = m[i]
    m[BLOCKS] += 1
    m[FREE] -= 1
    m[block + ROW] = m[m[FREE_AT] + m[FREE]]
    m[block + COUNT] = m[block + LAZY] = 0


@inner
def _close_block(m: Ints, block: int) -> None:
    m[m[FREE_AT] + m[FREE]] = m[block + ROW]
    m[FREE] += 1
    m[BLOCKS] -= 1
    for i in range(block, m[BLOCKS_AT] + m[BLOCKS] * BLOCK_COLUMNS):
        m[i] = m[i + BLOCK_COLUMNS]


@inner
def insert(m: Ints, key: int, memory: int) -> None:
    block = locate(m, key)
    if m[block + COUNT] == BLOCK:
        behind, half = block + BLOCK_COLUMNS, BLOCK // 2
        _open_block(m, behind)
        old, new = m[block + ROW], m[behind + ROW]
        for i in range(half):
            m[new + i], m[new + BLOCK + i] = m[old + half + i], m[old + BLOCK + half + i]
        m[block + COUNT] = m[behind + COUNT] = half
        m[behind + FIRST], m[behind + LAZY] = m[new], m[block + LAZY]
        refresh(m, block)
        refresh(m, behind)
        if key >= m[behind + FIRST]:
            block = behind
    row, i = m[block + ROW], m[block + COUNT]
    while i > 0 and m[row + i - 1] > key:
        m[row + i], m[row + BLOCK + i] = m[row + i - 1], m[row + BLOCK + i - 1]
        i -= 1
    inner = memory - m[block + LAZY]
    m[row + i], m[row + BLOCK + i] = key, inner
    m[block + COUNT] += 1
    m[block + TOP], m[block + BOTTOM] = max(m[block + TOP], inner), min(m[block + BOTTOM], inner)
    m[OVER] += max(0, memory - m[BUDGET])


@inner
def erase(m: Ints, key: int) -> None:
    block = locate(m, key)
    row, count = m[block + ROW], m[block + COUNT] - 1
    at = rank(m, block, key) - 1
    m[OVER] -= max(0, m[row + BLOCK + at] + m[block + LAZY] - m[BUDGET])
    for i in range(at, count):
        m[row + i], m[row + BLOCK + i] = m[row + i + 1], m[row + BLOCK + i + 1]
    m[block + COUNT] = count
    if count == 0:
        _close_block(m, block)
        return
    m[block + FIRST] = m[row]
    behind = block + BLOCK_COLUMNS
    if behind < m[BLOCKS_AT] + m[BLOCKS] * BLOCK_COLUMNS and count + m[behind + COUNT] <= BLOCK // 2:
        other, more = m[behind + ROW], m[behind + COUNT]
        shift = m[behind + LAZY] - m[block + LAZY]
        for i in range(more):
            m[row + count + i], m[row + BLOCK + count + i] = m[other + i], m[other + BLOCK + i] + shift
        m[block + COUNT] = count + more
        _close_block(m, behind)
        refresh(m, block)


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
