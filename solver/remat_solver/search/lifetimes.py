"""In which stages an op runs, and from which key to which its values are used, in compiled code."""

from __future__ import annotations

from .layout import (
    KEEP,
    KIND,
    OP,
    OPS_AT,
    RUNS,
    STAGE,
    STAGES,
    USERS,
    VALUE,
    VALUES_AT,
    Ints,
    N,
    inner,
)


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
