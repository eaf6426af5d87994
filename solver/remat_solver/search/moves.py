"""Moves of the local search on a profile, and simulated annealing by them, compiled.

A move is a list of placements and removals, noted in a journal so that it can be taken back. Whatever a move does, the
result is a schedule; what it costs and how far it exceeds the budget is in the profile's registers.
"""

from __future__ import annotations

import math

import numpy as np

from .layout import (
    BEST_COST,
    BLOCKS,
    BUDGET,
    COST,
    EXTRAS,
    JOURNAL,
    OVER,
    RANDOM,
    Ints,
    N,
    change,
    compiled,
    cost_of,
    extra,
    has_room,
    inner,
    inputs_at,
    int64,
    journal_full,
    last_stage,
    maker_of,
    note_change,
    nth_stage,
    runs_in,
    runs_of,
    size_of,
    stage_index,
    values_from,
)
from .profile import (
    behind,
    block_at,
    first_use,
    key_in,
    keys_in,
    last_use,
    locate,
    may_exceed,
    memory_in,
    note_best,
    place,
    rank,
    refresh,
    remove,
)

# The odds below were chosen by hand on a few graphs; no search over them was made.
_DEPTH = 40
"""Changes of one move that may lead to further ones."""
_READ_ANYWAY, _FRESH = 0.05, 0.25
"""Odds of making an input again that lives beyond its use anyway, and the factor on those of one just made or read."""
_LEAST_ODDS, _MORE_ODDS = 0.3, 0.7
"""Odds that an evicted value's inputs are made again with it: the first, and up to so much more."""
_CANDIDATES, _FEWER_CANDIDATES = 40, 30
"""Values that are drawn to find one to evict."""
_POOL = 3
"""How many of them that may be evicted are compared at most."""
_TO_USE, _NEARBY, _NEAR_STAGES = 0.4, 0.7, 3
"""Up to which lots a recomputation is moved to its first use, and by at most so many stages; else anywhere between."""
_SHIFTED_ODDS, _ADDED_ODDS = 0.5, 0.3
"""Odds that the inputs of a recomputation that is moved, or added, are made again with it."""
_CLEARED, _LARGEST_CLEARED = 0.7, 256
"""The share of a stage's recomputations that is taken out, and how many at most."""
_DROPPED = 0.85
"""Odds that what a removed recomputation alone had read is removed with it."""
_EVICT_OVER, _EVICT = 0.6, 0.15
"""Odds of an eviction while the memory is above the budget, and else."""
_REMOVE, _SHIFT, _REPLACE, _CLEAR = 0.2, 0.35, 0.45, 0.5
"""How far beyond those of an eviction the lots of the other moves go; behind the last a recomputation is added."""


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
def _try_place(m: Ints, stage: int, op: int) -> bool:
    """Place and note it; False where there is no room."""
    if journal_full(m) or not has_room(m):
        return False
    place(m, stage, op)
    note_change(m, 1, stage, op)
    return True


@inner
def _try_remove(m: Ints, stage: int, op: int) -> bool:
    if journal_full(m):
        return False
    remove(m, stage, op)
    note_change(m, 0, stage, op)
    return True


@inner
def undo(m: Ints) -> None:
    """Take back everything in the journal."""
    for number in range(m[JOURNAL] - 1, -1, -1):
        placed, stage, op = change(m, number)
        if placed:
            remove(m, stage, op)
        else:
            place(m, stage, op)
    m[JOURNAL] = 0


@inner
def _remake(m: Ints, stage: int, op: int, across: int, odds: float) -> None:
    """Place an op, and, by chance, whatever it reads that would have to be kept across the key `across` for it."""
    n, start = m[N], m[JOURNAL]
    if not _try_place(m, stage, op):
        return
    done = start
    while done < m[JOURNAL] and done - start < _DEPTH:
        _, _, reader = change(m, done)
        key = stage * n + reader
        done += 1
        for e in range(inputs_at(m, reader), inputs_at(m, reader + 1)):
            value = m[e]
            maker = maker_of(m, value)
            if stage > last_stage(m, maker):
                continue
            i = stage_index(m, maker, stage)
            made = nth_stage(m, maker, i)
            if made == stage:
                continue
            if last_use(m, value, stage, nth_stage(m, maker, i + 1)) > key and chance(m) > _READ_ANYWAY:
                continue  # it lives beyond this use anyway
            since = max(made * n + maker, last_use(m, value, made, stage))
            within = first_use(m, value, stage * n - 1, stage + 1)
            if within < key:
                since = max(since, within)
            if chance(m) < (odds if since < across else _FRESH * odds):
                _try_place(m, stage, maker)


@inner
def _drop_unread(m: Ints, start: int) -> None:
    """Remove, after each removal noted from `start` on, the recomputations of its inputs that nobody reads now."""
    done = start
    while done < m[JOURNAL]:
        placed, stage, op = change(m, done)
        done += 1
        if placed:
            continue
        for e in range(inputs_at(m, op), inputs_at(m, op + 1)):
            maker = maker_of(m, m[e])
            i = stage_index(m, maker, stage)
            made = nth_stage(m, maker, i)
            if made != maker and not _is_read(m, maker, made, nth_stage(m, maker, i + 1)):
                _try_remove(m, made, maker)


@inner
def _is_read(m: Ints, op: int, made: int, after: int) -> bool:
    """Whether something reads what an op makes in a stage, before it makes it again."""
    for value in range(values_from(m, op), values_from(m, op + 1)):  # noqa: SIM110 – numba has no generators in `any`
        if last_use(m, value, made, after) >= 0:
            return True
    return False


@inner
def _any_key(m: Ints) -> int:
    block = block_at(m, draw(m, m[BLOCKS]))
    return key_in(m, block, draw(m, keys_in(m, block)))


@inner
def _over_key(m: Ints) -> int:
    """A key at which memory is above the budget, or −1."""
    blocks = m[BLOCKS]
    number = draw(m, blocks)
    for _ in range(blocks):
        block = block_at(m, number)
        number = number + 1 if number + 1 < blocks else 0
        if not may_exceed(m, block):
            continue
        refresh(m, block)
        if not may_exceed(m, block):
            continue
        count = keys_in(m, block)
        i = draw(m, count)
        while memory_in(m, block, i) <= m[BUDGET]:
            i = i + 1 if i + 1 < count else 0
        return key_in(m, block, i)
    return -1


@inner
def _evict_across(m: Ints, across: int, tries: int, pool: int) -> None:
    """Free a value that is idle at the key `across` and make it again at its next use.

    Of `pool` candidates the one with the most bytes × stages per cost.
    """
    n = m[N]
    stage, op = across // n, across % n
    values = values_from(m, stage)
    if values == 0:
        return
    best, best_stage, best_op, found = -1.0, -1, -1, 0
    for _ in range(tries):
        value = draw(m, values)
        maker = maker_of(m, value)
        if stage > last_stage(m, maker):
            continue
        i = stage_index(m, maker, stage if maker < op else stage - 1)
        use = first_use(m, value, across - 1, nth_stage(m, maker, i + 1))
        if use <= across:
            continue
        again = use // n
        if again * n + maker <= across or again > last_stage(m, maker) or runs_in(m, maker, again):
            continue
        worth = size_of(m, value) * (again - stage + 1.0) / (cost_of(m, maker) + 1.0)
        if worth > best:
            best, best_stage, best_op = worth, again, maker
        found += 1
        if found >= pool:
            break
    if best_op >= 0:
        _remake(m, best_stage, best_op, across, _LEAST_ODDS + _MORE_ODDS * chance(m))


@inner
def _shift(m: Ints, stage: int, op: int) -> None:
    """Recompute in another stage between the previous instance and the first use."""
    n = m[N]
    i = stage_index(m, op, stage)
    low, end = nth_stage(m, op, i - 1) + 1, nth_stage(m, op, i + 1)
    high = end
    for value in range(values_from(m, op), values_from(m, op + 1)):
        use = first_use(m, value, stage * n + op, end)
        if use >= 0:
            high = min(high, use // n)
    if high == end:  # nobody reads it
        high = stage
    lot = chance(m)
    if lot < _TO_USE:
        to = high
    elif lot < _NEARBY:
        to = stage + (1 if draw(m, 2) else -1) * (1 + draw(m, _NEAR_STAGES))
    else:
        to = low + draw(m, high - low + 1)
    if to == stage or to < low or to >= n or to > last_stage(m, op) or runs_in(m, op, to):
        return
    start = m[JOURNAL]
    if not _try_remove(m, stage, op):
        return
    if draw(m, 2):
        _try_place(m, to, op)
    else:
        _drop_unread(m, start)
        if not runs_in(m, op, to):
            _remake(m, to, op, stage * n + op, _SHIFTED_ODDS)


@inner
def _replace(m: Ints, stage: int, op: int) -> None:
    """Keep a value that was made again, and evict another one across the gap instead."""
    before = nth_stage(m, op, stage_index(m, op, stage) - 1)
    start = m[JOURNAL]
    if not _try_remove(m, stage, op):
        return
    _drop_unread(m, start)
    if stage - before > 1:
        middle = before + 1 + draw(m, stage - before - 1)
        _evict_across(m, middle * m[N] + middle, int64(_FEWER_CANDIDATES), int64(1))


@inner
def _clear_stage(m: Ints, stage: int) -> None:
    """Take out most recomputations of a stage."""
    first = stage * m[N]
    block = locate(m, first)
    i = rank(m, block, first - 1)
    chosen = np.empty(_LARGEST_CLEARED, np.int64)
    count = 0
    while count < _LARGEST_CLEARED:
        if i >= keys_in(m, block):
            block, i = behind(block), 0
        op = key_in(m, block, i) - first
        if op == stage:
            break
        if chance(m) < _CLEARED:
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
    outputs = values_from(m, op + 1) - values_from(m, op)
    if last_stage(m, op) == op or outputs == 0:
        return
    i = draw(m, runs_of(m, op))
    made, end = nth_stage(m, op, i), nth_stage(m, op, i + 1)
    value = values_from(m, op) + draw(m, outputs)
    use = last_use(m, value, made, end) if draw(m, 2) else first_use(m, value, made * n + op, end)
    if use >= 0 and op < use // n <= last_stage(m, op) and not runs_in(m, op, use // n):
        _remake(m, use // n, op, made * n + op, _ADDED_ODDS)


@inner
def move(m: Ints) -> None:
    """Make one random move."""
    lot = chance(m)
    over = m[OVER] > 0
    evict = _EVICT_OVER if over else _EVICT
    if lot < evict:
        across = _over_key(m) if over else -1
        _evict_across(m, across if across >= 0 else _any_key(m), int64(_CANDIDATES), 1 + draw(m, _POOL))
        return
    if m[EXTRAS] == 0:
        return
    stage, op = extra(m, draw(m, m[EXTRAS]))
    if lot < evict + _REMOVE:
        start = m[JOURNAL]
        if _try_remove(m, stage, op) and chance(m) < _DROPPED:
            _drop_unread(m, start)
    elif lot < evict + _SHIFT:
        _shift(m, stage, op)
    elif lot < evict + _REPLACE:
        _replace(m, stage, op)
    elif lot < evict + _CLEAR:
        _clear_stage(m, stage)
    else:
        _add_at_use(m)


_WINDOW = 2000


@compiled
def anneal(m: Ints, weight: float, hot: float, cold: float, moves: int) -> float:
    """Make so many moves while the temperature falls from `hot` to `cold` ns; notes the best schedule in the profile.

    The objective is cost + `weight` · Σ over keys of the bytes above the budget. The weight adapts so that the search
    is within the budget for 20 to 60 % of its time. Returns the weight as it ends.
    """
    over_count = 0
    ratio = math.log(cold / hot) / moves
    temperature = hot
    for number in range(moves):
        if number & 63 == 0:
            temperature = hot * math.exp(ratio * number)
        cost, over = m[COST], m[OVER]
        move(m)
        if m[JOURNAL] > 0:
            worse = (m[COST] - cost) + weight * (m[OVER] - over)
            if worse <= 0 or chance(m) < math.exp(-worse / temperature):
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
    return weight
