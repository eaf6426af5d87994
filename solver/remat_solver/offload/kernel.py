"""The recursions of the offload-and-recompute program, compiled once and cached on disk (POFO supplement, B.1 to B.3).

Sizes are in memory slots, times in ns, β in slots per ns. A step's rest of a transfer is rounded up to whole slots, so
that no plan counts on a transfer that has not ended.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .._numba import inner, kernel

FOREVER = np.inf
NEEDED = -1.0
_spliced = partial(inner, inline="always")
Array = Any


@_spliced
def _pair(i: int, j: int, stages: int) -> int:
    return (i - 1) * stages - ((i - 1) * (i - 2)) // 2 + j - i


@_spliced
def _rest(amount: int, time: float, beta: float) -> int:
    """What remains of so many slots after a time on the link, in whole slots."""
    moved = time * beta
    return 0 if moved >= amount else amount - int(moved + 1e-9)


@kernel()
def backward_best(
    i: int, j: int, held: int, due: int, memory: int, beta: float,
    forward: Array, backward: Array, activation: Array, tape: Array, delta: Array, over_f: Array, over_n: Array,
    over_b: Array, table: Array,
) -> tuple[float, int]:  # fmt: skip
    """C_Δ(i, j, A, Δ) and how it is reached: 0 by F_all^i first, otherwise the i' whose a^(i') is saved next.

    `held` is A, the input I_i included; `due` is Δ, what must have been prefetched by the end (B.3).
    """
    stages = forward.shape[0] - 1
    best, choice = FOREVER, -1
    need_f = delta[j] + tape[i] + over_f[i]
    need_b = delta[i] + tape[i] + delta[i - 1] + over_b[i]
    spare = memory - held
    if need_f <= spare and need_b <= spare:
        if i == j:
            late = max(need_f - beta * backward[i], need_b) - spare + due
            return forward[i] + backward[i] + max(0.0, late / beta), 0
        idle_b = max(0.0, (need_b - spare + due) / beta)
        due_1 = _rest(due, backward[i] + idle_b, beta)
        if held + tape[i] + due_1 <= memory:
            inner = table[_pair(i + 1, j, stages), held + tape[i], due_1]
            if inner < FOREVER:
                due_2 = _rest(due_1, inner, beta)
                best = forward[i] + inner + backward[i] + idle_b + max(0.0, (need_f - spare + due_2) / beta)
                choice = 0
    steps, late, most = 0.0, -FOREVER, 0
    for k in range(i, j):
        need = delta[j] + activation[k] + over_n[k] + (activation[k - 1] if k > i else 0)
        most = max(most, need)
        if most > spare:
            break
        steps += forward[k]
        late = max(late - beta * forward[k], need)
        tail = table[_pair(i, k, stages), held, due]
        if tail == FOREVER:
            continue
        due_2 = _rest(due, tail, beta)
        if held + activation[k] + due_2 > memory:
            continue
        inner = table[_pair(k + 1, j, stages), held + activation[k], due_2]
        if inner == FOREVER:
            continue
        due_3 = _rest(due_2, inner, beta)
        value = steps + inner + tail + max(0.0, (late - spare + due_3) / beta)
        if value < best:
            best, choice = value, k
    return best, choice


@kernel(nogil=True)
def fill_backward(
    i: int, j: int, memory: int, beta: float,
    forward: Array, backward: Array, activation: Array, tape: Array, delta: Array, over_f: Array, over_n: Array,
    over_b: Array, table: Array,
) -> None:  # fmt: skip
    """Fill C_Δ of two stages i ≤ j, for all A + Δ within the memory; those between i and j must be there."""
    pair = _pair(i, j, forward.shape[0] - 1)
    for held in range(memory + 1):
        for due in range(memory - held, -1, -1):
            best, _ = backward_best(
                i, j, held, due, memory, beta, forward, backward, activation, tape, delta, over_f, over_n, over_b,
                table,
            )  # fmt: skip
            table[pair, held, due] = best


def states(memory: int) -> int:
    """How many states (A, Δ_F, Δ_B) there are with A + Δ_F and A + Δ_B within the memory."""
    return (memory + 1) * (memory + 2) * (2 * memory + 3) // 6


_states = _spliced(states)


@_spliced
def _state(held: int, left: int, due: int, memory: int) -> int:
    """The place of a state among those of a stage, in the order of `fill_forward`'s loops."""
    return int(_states(memory) - _states(memory - held) + left * (memory - held + 1) + due)


@_spliced
def _onward(table: Array, x: int, i: int, state: int, mark: bool) -> float:
    """The value of a later state, or, while states are marked, a note that it will be needed."""
    if mark:
        table[x, i, state] = NEEDED
        return FOREVER
    return float(table[x, i, state])


@inner
def _with_tape(
    i: int, own: int, held: int, left: int, due: int, memory: int, beta: float,
    forward: Array, backward: Array, tape: Array, delta: Array, over_f: Array, over_b: Array,
    table: Array, price: float, mark: bool,
) -> tuple[float, int]:  # fmt: skip
    """The best of F_all^i first, and whether its input, of `own` slots, is offloaded."""
    stages = forward.shape[0] - 1
    best, moved = FOREVER, 0
    spare = memory - held - own
    need_f = tape[i] + over_f[i]
    need_b = delta[i] + tape[i] + delta[i - 1] + over_b[i]
    if need_f > spare or need_b > spare:
        return best, moved
    idle_f = max(0.0, (need_f - spare + left) / beta)
    idle_b = max(0.0, (need_b - spare + due) / beta)
    once = forward[i] + backward[i] + idle_f + idle_b
    if i == stages:
        # between the phases both transfers must come to an end
        rest = max(0.0, left - (forward[i] + idle_f) * beta) + max(0.0, due - (backward[i] + idle_b) * beta)
        return once + rest / beta, moved
    for v in range(2 if own > 0 else 1):
        go, come = v * own, _rest(due, backward[i] + idle_b, beta) + v * own
        go = _rest(left + go, forward[i] + idle_f, beta)
        keep = held + (0 if v else own)
        if keep + go <= memory and keep + come <= memory:
            value = once + price * v * own + _onward(table, 1, i + 1, _state(keep, go, come, memory), mark)
            if value < best:
                best, moved = value, v
    return best, moved


@inner
def _without_tape(
    i: int, own: int, held: int, left: int, due: int, memory: int, beta: float,
    forward: Array, activation: Array, over_n: Array, tails: Array, table: Array, price: float, mark: bool,
) -> tuple[float, int, int]:  # fmt: skip
    """The best of F_ck^i first and F_none up to some stage before the last, that stage, and whether its input goes."""
    best, last, moved = FOREVER, -1, 0
    spare = memory - held - own
    stages = forward.shape[0] - 1
    steps, late, first, after = 0.0, -FOREVER, 0, 0
    for j in range(i, stages):
        need = activation[j] + over_n[j] + (activation[j - 1] if j > i else 0)
        if j == i:
            first = need
        else:
            after = max(after, need)
        if first > spare or after > spare + own:
            break
        late = max(late, need - beta * steps)
        steps += forward[j]
        if held + own + due > memory:
            continue
        tail = tails[_pair(i, j, stages), held + own, due]
        if tail == FOREVER:
            continue
        idle = max(0.0, (late - spare + left) / beta)
        for v in range(2 if own > 0 else 1):
            if v == 0 and after > spare:
                continue
            come = _rest(due, tail, beta) + v * own
            go = _rest(left + v * own, steps + idle, beta)
            keep = held + (0 if v else own)
            if keep + go <= memory and keep + come <= memory:
                onward = _onward(table, 0, j + 1, _state(keep, go, come, memory), mark)
                value = steps + tail + idle + price * v * own + onward
                if value < best:
                    best, last, moved = value, j, v
    return best, last, moved


@kernel()
def forward_best(
    x: int, i: int, held: int, left: int, due: int, memory: int, beta: float,
    forward: Array, backward: Array, activation: Array, tape: Array, delta: Array, over_f: Array, over_n: Array,
    over_b: Array, tails: Array, table: Array, price: float, mark: bool,
) -> tuple[float, int, int]:  # fmt: skip
    """OC_x(i, A, Δ_F, Δ_B), the last stage of the first step, 0 for F_all^i alone, and whether its input is offloaded.

    `held` is A, without the input I_i; `left` is Δ_F, what is still to be offloaded; `due` is Δ_B, what must have been
    prefetched by the end of B^i (B.1, B.2). The input of stage 1 has no slots where it stays on the device. `price` is
    what a slot on the host costs, in ns.
    """
    own = tape[i - 1] if x else activation[i - 1]
    if memory - held - own < 0:
        return FOREVER, -1, 0
    best, moved = _with_tape(
        i, own, held, left, due, memory, beta, forward, backward, tape, delta, over_f, over_b, table, price, mark
    )
    last = 0 if best < FOREVER else -1
    value, end, goes = _without_tape(
        i, own, held, left, due, memory, beta, forward, activation, over_n, tails, table, price, mark
    )
    if value < best:
        return value, end, goes
    return best, last, moved


@kernel(nogil=True)
def fill_forward(
    i: int, first: int, end: int, mark: bool, memory: int, beta: float,
    forward: Array, backward: Array, activation: Array, tape: Array, delta: Array, over_f: Array, over_n: Array,
    over_b: Array, tails: Array, table: Array, price: float,
) -> None:  # fmt: skip
    """Fill OC_x of a stage for first ≤ A < end, where the states are marked; or mark the states that these lead to."""
    for x in range(2):
        state = _state(first, 0, 0, memory) - 1
        for held in range(first, end):
            for left in range(memory - held + 1):
                for due in range(memory - held + 1):
                    state += 1
                    if table[x, i, state] != NEEDED:
                        continue
                    best, _, _ = forward_best(
                        x, i, held, left, due, memory, beta, forward, backward, activation, tape, delta, over_f,
                        over_n, over_b, tails, table, price, mark,
                    )  # fmt: skip
                    if not mark:
                        table[x, i, state] = best
