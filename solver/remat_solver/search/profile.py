"""Schedules in a profile: loaded, read back, and the memory at every key kept up to date while they change.

Each use reads the latest instance of a value, and an instance lives to its last use. So every set of pairs is a
schedule, and only memory can fail. The memory is a list of blocks of up to `BLOCK` keys; each block has a pending
addend and bounds on its entries, so that most of a range addition touches a block in one step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from remat_ir import Graph

from .layout import (
    BEST_AT,
    BEST_COST,
    BEST_LENGTH,
    BLOCK,
    BLOCK_COLUMNS,
    BLOCKS,
    BLOCKS_AT,
    BOTTOM,
    BUDGET,
    COST,
    COUNT,
    EXTRAS_AT,
    FIRST,
    FREE,
    FREE_AT,
    JOURNAL,
    KEEP,
    LAZY,
    OPTIONAL,
    OVER,
    ROW,
    ROWS_AT,
    TOP,
    Ints,
    N,
    begin_stages,
    compiled,
    cost_of,
    delete_stage,
    enter_stage,
    inner,
    inputs_at,
    int64,
    kind_of,
    maker_of,
    nth_stage,
    readers_at,
    runs_of,
    size_of,
    stage_index,
    values_from,
    workspace_of,
)


@inner
def last_use(m: Ints, value: int, start: int, end: int) -> int:
    """Key of the last use in stages start … end − 1, −1 without one, beyond all keys for a kept value."""
    n = m[N]
    if kind_of(m, value) == KEEP:
        return int(n * n)
    best = -1
    for e in range(readers_at(m, value), readers_at(m, value + 1)):
        user = m[e]
        if user >= end:
            break
        stage = nth_stage(m, user, runs_of(m, user) - 1)
        if stage >= end:
            stage = nth_stage(m, user, stage_index(m, user, end - 1))
        if stage >= start:
            best = max(best, stage * n + user)
    return int(best)


@inner
def first_use(m: Ints, value: int, after: int, end: int) -> int:
    """Key of the first use behind the key `after`, in a stage before `end`, or −1."""
    n = m[N]
    best = -1
    stage_after = after // n
    op_after = after - stage_after * n
    for e in range(readers_at(m, value), readers_at(m, value + 1)):
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
def block_at(m: Ints, number: int) -> int:
    """The place of a block; there are `BLOCKS` of them."""
    return int(m[BLOCKS_AT] + number * BLOCK_COLUMNS)


@inner
def behind(block: int) -> int:
    """The place of the next block."""
    return block + BLOCK_COLUMNS


@inner
def keys_in(m: Ints, block: int) -> int:
    """How many keys a block has."""
    return int(m[block + COUNT])


@inner
def key_in(m: Ints, block: int, index: int) -> int:
    """A key of a block."""
    return int(m[m[block + ROW] + index])


@inner
def memory_in(m: Ints, block: int, index: int) -> int:
    """The memory at a key of a block."""
    return int(m[m[block + ROW] + BLOCK + index] + m[block + LAZY])


@inner
def may_exceed(m: Ints, block: int) -> bool:
    """Whether the memory at a key of a block may be above the budget, by the block's bound."""
    return bool(m[block + TOP] + m[block + LAZY] > m[BUDGET])


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
    begins = workspace_of(m, op)
    for value in range(values_from(m, op), values_from(m, op + 1)):
        if kind_of(m, value) == OPTIONAL:
            after = nth_stage(m, op, stage_index(m, op, stage) + 1)
            if last_use(m, value, stage, after) < 0:
                continue
        begins += size_of(m, value)
    return begins


@inner
def _made_at(m: Ints, value: int, stage: int) -> int:
    """The key before which an instance of a value takes no memory, where nothing reads it."""
    maker = maker_of(m, value)
    return int(stage * m[N] + maker - (kind_of(m, value) == OPTIONAL))


@inner
def _input_lifetimes(m: Ints, stage: int, op: int, sign: int) -> int:
    """Lengthen (sign 1) or shorten (−1) the inputs' lifetimes up to one run of an op; the bytes by which they do."""
    key = stage * m[N] + op
    total = 0
    for e in range(inputs_at(m, op), inputs_at(m, op + 1)):
        value = m[e]
        maker = maker_of(m, value)
        j = stage_index(m, maker, stage)
        made = nth_stage(m, maker, j)
        low = last_use(m, value, made, nth_stage(m, maker, j + 1))
        if low < key:
            add_between(m, _made_at(m, value, made) if low < 0 else low, key, sign * size_of(m, value))
            total += size_of(m, value)
    return total


@inner
def _output_lifetimes(m: Ints, stage: int, op: int, before: int, after: int, sign: int) -> int:
    """Cut (sign −1) or join (1) the older instances of what a run of an op makes anew; its bytes that nobody reads."""
    total = 0
    for value in range(values_from(m, op), values_from(m, op + 1)):
        if last_use(m, value, stage, after) < 0:
            if kind_of(m, value) != OPTIONAL:
                total += size_of(m, value)
            continue
        low = last_use(m, value, before, stage)
        low = _made_at(m, value, before) if low < 0 else low
        add_between(m, low, stage * m[N] + op - 1, sign * size_of(m, value))
    return total


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
    follower = key_in(m, block, i)
    # what the follower finds resident is what this run finds, values read from now on included
    here = memory_in(m, block, i) - _starting(m, follower // n, follower % n) + workspace_of(m, op)
    here += _output_lifetimes(m, stage, op, nth_stage(m, op, index), nth_stage(m, op, index + 1), int64(-1))
    here += _input_lifetimes(m, stage, op, int64(1))
    insert(m, key, here)
    enter_stage(m, op, index, stage)
    m[COST] += cost_of(m, op)


@inner
def remove(m: Ints, stage: int, op: int) -> None:
    """Let the op run in the stage no longer; the exact inverse of `place`."""
    index = stage_index(m, op, stage)
    delete_stage(m, op, index)
    erase(m, stage * m[N] + op)
    _output_lifetimes(m, stage, op, nth_stage(m, op, index - 1), nth_stage(m, op, index), int64(1))
    _input_lifetimes(m, stage, op, int64(-1))
    m[COST] -= cost_of(m, op)


_FILL = BLOCK * 3 // 4


@inner
def _fill_blocks(m: Ints, keys: Ints, change: Ints) -> None:
    """Blocks of ascending keys, by the bytes by which the memory changes at each."""
    memory, rows = 0, m[EXTRAS_AT] - m[FREE_AT]
    m[OVER] = 0
    for i in range(rows):
        m[m[FREE_AT] + i] = m[ROWS_AT] + 2 * BLOCK * (rows - 1 - i)
    m[FREE], m[BLOCKS] = rows, (len(keys) + _FILL - 1) // _FILL
    block = block_at(m, int64(-1))
    for i in range(len(keys)):
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
    for number in range(m[BLOCKS]):
        refresh(m, block_at(m, number))


@inner
def note_best(m: Ints) -> None:
    """Note the current schedule as the best one."""
    at = m[BEST_AT]
    for number in range(m[BLOCKS]):
        block = block_at(m, number)
        for i in range(keys_in(m, block)):
            m[at] = key_in(m, block, i)
            at += 1
    m[BEST_LENGTH], m[BEST_COST] = at - m[BEST_AT], m[COST]


@compiled
def load(m: Ints, keys: Ints) -> None:
    """Make the schedule of the ascending `keys`, which hold every (v, v), the current one; note it where it is best."""
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
    _fill_blocks(m, keys, change)
    if m[OVER] == 0 and m[COST] < m[BEST_COST]:
        note_best(m)


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


def current(m: Ints) -> tuple[Ints, Ints]:
    """The ascending keys of the current schedule, and at each the memory without fixed bytes, in scaled bytes."""
    blocks = m[m[BLOCKS_AT] :][: m[BLOCKS] * BLOCK_COLUMNS].reshape(-1, BLOCK_COLUMNS)
    keys = [m[b[ROW] :][: b[COUNT]] for b in blocks]
    memory = [m[b[ROW] + BLOCK :][: b[COUNT]] + b[LAZY] for b in blocks]
    return np.concatenate(keys), np.concatenate(memory)


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
