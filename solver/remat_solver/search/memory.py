"""The memory at every key of a schedule, in blocks that change in one step, in compiled code."""

from __future__ import annotations

from .layout import (
    BLOCK,
    BLOCK_COLUMNS,
    BLOCKS,
    BLOCKS_AT,
    BOTTOM,
    BUDGET,
    COUNT,
    FIRST,
    FREE,
    FREE_AT,
    LAZY,
    OVER,
    ROW,
    TOP,
    Ints,
    inner,
    int64,
)


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
