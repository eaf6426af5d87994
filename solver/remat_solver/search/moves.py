"""Moves of the local search on a profile, and simulated annealing by them, compiled.

A move is a list of placements and removals, noted in a journal so that it can be taken back. Whatever a move does, the
result is a schedule; what it costs and how far it exceeds the budget is in the profile's registers.
"""

from __future__ import annotations

import math

import numpy as np

from .profile import (
    BEST_AT,
    BEST_COST,
    BLOCK,
    BLOCK_COLUMNS,
    BLOCKS,
    BLOCKS_AT,
    BUDGET,
    COST,
    COUNT,
    EXTRAS,
    EXTRAS_AT,
    JOURNAL,
    JOURNAL_AT,
    LAST,
    LAZY,
    MAKER,
    MAKES,
    OP,
    OP_COST,
    OPS_AT,
    OVER,
    RANDOM,
    READS,
    ROW,
    RUNS,
    SIZE,
    TOP,
    VALUE,
    VALUES_AT,
    Ints,
    N,
    compiled,
    first_use,
    has_room,
    inner,
    int64,
    last_use,
    locate,
    nth_stage,
    place,
    rank,
    refresh,
    remove,
    runs_in,
    stage_index,
)
from .state import note_best

_DEPTH = 40
_LARGEST_CLEARED = 256


@inner
def draw(m: Ints, below: int) -> int:
    """A random integer from 0 to below − 1 (Marsaglia's xorshift, 13-7-17)."""
    x = m[RANDOM]
    x ^= x << 13
    x ^= (x >> 7) & 0x01FFFFFFFFFFFFFF
    x ^= x << 17
    m[RANDOM] = x
    return int((x & 0x7FFFFFFFFFFFFFFF) % below)


@inner
def chance(m: Ints) -> float:
    """A random number in [0, 1)."""
    return draw(m, 1 << 53) / 9007199254740992.0


@inner
def _note(m: Ints, placed: int, stage: int, op: int) -> None:
    at = m[JOURNAL_AT] + 3 * m[JOURNAL]
    m[at], m[at + 1], m[at + 2] = placed, stage, op
    m[JOURNAL] += 1


@inner
def _journal_full(m: Ints) -> bool:
    return bool(m[JOURNAL_AT] + 3 * (m[JOURNAL] + 1) > m[BEST_AT])


@inner
def _try_place(m: Ints, stage: int, op: int) -> bool:
    """Place and note it; False where there is no room."""
    if _journal_full(m) or not has_room(m):
        return False
    place(m, stage, op)
    _note(m, 1, stage, op)
    return True


@inner
def _try_remove(m: Ints, stage: int, op: int) -> bool:
    if _journal_full(m):
        return False
    remove(m, stage, op)
    _note(m, 0, stage, op)
    return True


@inner
def undo(m: Ints) -> None:
    """Take back everything in the journal."""
    for at in range(m[JOURNAL_AT] + 3 * (m[JOURNAL] - 1), m[JOURNAL_AT] - 1, -3):
        if m[at]:
            remove(m, m[at + 1], m[at + 2])
        else:
            place(m, m[at + 1], m[at + 2])
    m[JOURNAL] = 0


@inner
def _remake(m: Ints, stage: int, op: int, across: int, odds: float) -> None:
    """Place an op, and, by chance, whatever it reads that would have to be kept across the key `across` for it."""
    n, start = m[N], m[JOURNAL]
    if not _try_place(m, stage, op):
        return
    done = start
    while done < m[JOURNAL] and done - start < _DEPTH:
        reader = m[m[JOURNAL_AT] + 3 * done + 2]
        key = stage * n + reader
        done += 1
        o = m[OPS_AT] + reader * OP
        for e in range(m[o + READS], m[o + OP + READS]):
            value = m[e]
            maker = m[m[VALUES_AT] + value * VALUE + MAKER]
            if stage > m[m[OPS_AT] + maker * OP + LAST]:
                continue
            i = stage_index(m, maker, stage)
            made = nth_stage(m, maker, i)
            if made == stage:
                continue
            if last_use(m, value, stage, nth_stage(m, maker, i + 1)) > key and chance(m) > 0.05:
                continue  # it lives beyond this use anyway
            since = max(made * n + maker, last_use(m, value, made, stage))
            within = first_use(m, value, stage * n - 1, stage + 1)
            if within < key:
                since = max(since, within)
            if chance(m) < (odds if since < across else 0.25 * odds):
                _try_place(m, stage, maker)


@inner
def _drop_unread(m: Ints, start: int) -> None:
    """Remove, after each removal noted from `start` on, the recomputations of its inputs that nobody reads now."""
    done = start
    while done < m[JOURNAL]:
        at = m[JOURNAL_AT] + 3 * done
        done += 1
        if m[at]:
            continue
        stage, o = m[at + 1], m[OPS_AT] + m[at + 2] * OP
        for e in range(m[o + READS], m[o + OP + READS]):
            maker = m[m[VALUES_AT] + m[e] * VALUE + MAKER]
            i = stage_index(m, maker, stage)
            made = nth_stage(m, maker, i)
            if made == maker:
                continue
            after, source = nth_stage(m, maker, i + 1), m[OPS_AT] + maker * OP
            read = False
            for value in range(m[source + MAKES], m[source + OP + MAKES]):
                if last_use(m, value, made, after) >= 0:
                    read = True
                    break
            if not read:
                _try_remove(m, made, maker)


@inner
def _any_key(m: Ints) -> int:
    block = m[BLOCKS_AT] + draw(m, m[BLOCKS]) * BLOCK_COLUMNS
    return int(m[m[block + ROW] + draw(m, m[block + COUNT])])


@inner
def _over_key(m: Ints) -> int:
    """A key at which memory is above the budget, or −1."""
    blocks, budget = m[BLOCKS], m[BUDGET]
    number = draw(m, blocks)
    for _ in range(blocks):
        block = m[BLOCKS_AT] + number * BLOCK_COLUMNS
        number = number + 1 if number + 1 < blocks else 0
        if m[block + TOP] + m[block + LAZY] <= budget:
            continue
        refresh(m, block)
        if m[block + TOP] + m[block + LAZY] <= budget:
            continue
        count = m[block + COUNT]
        i = draw(m, count)
        while m[m[block + ROW] + BLOCK + i] + m[block + LAZY] <= budget:
            i = i + 1 if i + 1 < count else 0
        return int(m[m[block + ROW] + i])
    return -1


@inner
def _evict_across(m: Ints, across: int, tries: int, pool: int) -> None:
    """Free a value that is idle at the key `across` and make it again at its next use.

    Of `pool` candidates the one with the most bytes × stages per cost.
    """
    n = m[N]
    stage, op = across // n, across % n
    values = m[m[OPS_AT] + stage * OP + MAKES]
    if values == 0:
        return
    best, best_stage, best_op, found = -1.0, -1, -1, 0
    for _ in range(tries):
        value = draw(m, values)
        v = m[VALUES_AT] + value * VALUE
        maker = m[v + MAKER]
        o = m[OPS_AT] + maker * OP
        if stage > m[o + LAST]:
            continue
        i = stage_index(m, maker, stage if maker < op else stage - 1)
        use = first_use(m, value, across - 1, nth_stage(m, maker, i + 1))
        if use <= across:
            continue
        again = use // n
        if again * n + maker <= across or again > m[o + LAST] or runs_in(m, maker, again):
            continue
        worth = m[v + SIZE] * (again - stage + 1.0) / (m[o + OP_COST] + 1.0)
        if worth > best:
            best, best_stage, best_op = worth, again, maker
        found += 1
        if found >= pool:
            break
    if best_op >= 0:
        _remake(m, best_stage, best_op, across, 0.3 + 0.7 * chance(m))


@inner
def _shift(m: Ints, stage: int, op: int) -> None:
    """Recompute in another stage between the previous instance and the first use."""
    n, o = m[N], m[OPS_AT] + op * OP
    i = stage_index(m, op, stage)
    low, end = nth_stage(m, op, i - 1) + 1, nth_stage(m, op, i + 1)
    high = end
    for value in range(m[o + MAKES], m[o + OP + MAKES]):
        use = first_use(m, value, stage * n + op, end)
        if use >= 0:
            high = min(high, use // n)
    if high == end:  # nobody reads it
        high = stage
    lot = chance(m)
    if lot < 0.4:
        to = high
    elif lot < 0.7:
        to = stage + (1 if draw(m, 2) else -1) * (1 + draw(m, 3))
    else:
        to = low + draw(m, high - low + 1)
    if to == stage or to < low or to >= n or to > m[o + LAST] or runs_in(m, op, to):
        return
    start = m[JOURNAL]
    if not _try_remove(m, stage, op):
        return
    if draw(m, 2):
        _try_place(m, to, op)
    else:
        _drop_unread(m, start)
        if not runs_in(m, op, to):
            _remake(m, to, op, stage * n + op, 0.5)


@inner
def _replace(m: Ints, stage: int, op: int) -> None:
    """Keep a value that was made again, and evict another one across the gap instead."""
    n = m[N]
    before = nth_stage(m, op, stage_index(m, op, stage) - 1)
    start = m[JOURNAL]
    if not _try_remove(m, stage, op):
        return
    _drop_unread(m, start)
    if stage - before > 1:
        middle = before + 1 + draw(m, stage - before - 1)
        _evict_across(m, middle * n + middle, int64(30), int64(1))


@inner
def _clear_stage(m: Ints, stage: int) -> None:
    """Take out most recomputations of a stage."""
    first = stage * m[N]
    block = locate(m, first)
    i = rank(m, block, first - 1)
    chosen = np.empty(_LARGEST_CLEARED, np.int64)
    count = 0
    while count < _LARGEST_CLEARED:
        if i >= m[block + COUNT]:
            block, i = block + BLOCK_COLUMNS, 0
        op = m[m[block + ROW] + i] - first
        if op == stage:
            break
        if chance(m) < 0.7:
            chosen[count] = op
            count += 1
        i += 1
    start = m[JOURNAL]
    for a in range(count):
        _try_remove(m, stage, chosen[a])
    if draw(m, 2):
        _drop_unread(m, start)


@inner
def _add_at_use(m: Ints) -> None:
    """Make some value again at its next or at its last use."""
    n = m[N]
    op = draw(m, n)
    o = m[OPS_AT] + op * OP
    outputs = m[o + OP + MAKES] - m[o + MAKES]
    if m[o + LAST] == op or outputs == 0:
        return
    i = draw(m, m[o + RUNS])
    made, end = nth_stage(m, op, i), nth_stage(m, op, i + 1)
    value = m[o + MAKES] + draw(m, outputs)
    use = last_use(m, value, made, end) if draw(m, 2) else first_use(m, value, made * n + op, end)
    if use >= 0 and op < use // n <= m[o + LAST] and not runs_in(m, op, use // n):
        _remake(m, use // n, op, made * n + op, 0.3)


@inner
def move(m: Ints, pool: int) -> None:
    """Make one random move."""
    lot = chance(m)
    over = m[OVER] > 0
    evict = 0.6 if over else 0.15
    if lot < evict:
        across = _over_key(m) if over else -1
        _evict_across(m, across if across >= 0 else _any_key(m), int64(40), 1 + draw(m, pool))
        return
    if m[EXTRAS] == 0:
        return
    extra = m[EXTRAS_AT] + 2 * draw(m, m[EXTRAS])
    stage, op = m[extra], m[extra + 1]
    if lot < evict + 0.2:
        start = m[JOURNAL]
        if _try_remove(m, stage, op) and chance(m) < 0.85:
            _drop_unread(m, start)
    elif lot < evict + 0.35:
        _shift(m, stage, op)
    elif lot < evict + 0.45:
        _replace(m, stage, op)
    elif lot < evict + 0.5:
        _clear_stage(m, stage)
    else:
        _add_at_use(m)


_WINDOW = 2000


@compiled
def anneal(m: Ints, weight: float, hot: float, cold: float, moves: int, pool: int) -> tuple[float, int]:
    """Make so many moves while the temperature falls from `hot` to `cold` ns; notes the best schedule in the profile.

    The objective is cost + `weight` · Σ over keys of the bytes above the budget. The weight adapts so that the search
    is within the budget for 20 to 60 % of its time. Returns the weight as it ends, and how many moves were kept.
    """
    kept, over_count = 0, 0
    ratio = math.log(cold / hot) / moves
    temperature = hot
    for number in range(moves):
        if number & 63 == 0:
            temperature = hot * math.exp(ratio * number)
        cost, over = m[COST], m[OVER]
        move(m, pool)
        if m[JOURNAL] > 0:
            worse = (m[COST] - cost) + weight * (m[OVER] - over)
            if worse <= 0 or chance(m) < math.exp(-worse / temperature):
                kept += 1
                m[JOURNAL] = 0
                if m[OVER] == 0 and m[COST] < m[BEST_COST]:
                    note_best(m)
            else:
                undo(m)
        if m[OVER] > 0:
            over_count += 1
        if number % _WINDOW == _WINDOW - 1:
            if over_count > 0.8 * _WINDOW:
                weight *= 1.15
            elif over_count < 0.4 * _WINDOW:
                weight /= 1.15
            over_count = 0
    return weight, kept
