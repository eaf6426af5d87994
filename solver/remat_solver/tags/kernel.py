"""What a set of tags costs, and its peak, and annealing over such sets, compiled.

A set is a byte for each forward op: 1 where it is computed again. Its evaluation follows `remat_ir.tags` and
`remat_ir.replay` on arrays, and shares no code with them: a test holds them against each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._numba import inner, kernel

if TYPE_CHECKING:
    import numpy.typing as npt

    Integers = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.uint8]

FORBIDDEN = 1 << 60
"""The excess of a set in which an op is computed again that may not be."""


class Arrays(NamedTuple):
    """A graph in columns, and the space that an evaluation needs.

    Attributes:
        numbers: ops, first op of the backward pass, budget and fixed bytes.
        cost, workspace, last_stage: [ops] as in the graph.
        in_start, in_value: the values that op o reads: `in_value[in_start[o] : in_start[o + 1]]`.
        out_start: the values that op o makes are `out_start[o]` to `out_start[o + 1]` − 1.
        size, maker: [values] bytes and op.
        optional, keep: [values] 1 or 0.
        order: [2 · ops] the ops as they run. change: [2 · ops + 2] bytes. need: [2 · ops] bytes. stack: [ops].
        last: [values] the position of the last use. open: [ops] what is still to be computed again.
    """

    numbers: Integers
    cost: Integers
    workspace: Integers
    last_stage: Integers
    in_start: Integers
    in_value: Integers
    out_start: Integers
    size: Integers
    maker: Integers
    optional: Flags
    keep: Flags
    order: Integers
    change: Integers
    need: Integers
    stack: Integers
    last: Integers
    open: Flags


@inner
def _ordered(a: Any, again: Any) -> int:
    """Fill `order`; its length, or −1 where an op may not run again at its place."""
    ops: int = a.numbers[0]
    boundary: int = a.numbers[1]
    length = boundary
    for op in range(boundary):
        a.order[op] = op
        a.open[op] = again[op]
    for op in range(boundary, ops):
        start, top = length, 1
        a.stack[0] = op
        while top:
            top -= 1
            reader = a.stack[top]
            for i in range(a.in_start[reader], a.in_start[reader + 1]):
                maker = a.maker[a.in_value[i]]
                if maker < boundary and a.open[maker]:
                    if a.last_stage[maker] < op:
                        return -1
                    a.open[maker] = 0
                    a.order[length] = maker
                    length += 1
                    a.stack[top] = maker
                    top += 1
        if length - start > 1:
            a.order[start:length].sort()
        a.order[length] = op
        length += 1
    return length


@inner
def _evaluate(a: Any, again: Any) -> tuple[int, int, int]:
    """The cost, the peak and the sum over all steps of what exceeds the budget of a set of tags."""
    length = _ordered(a, again)
    if length < 0:
        return FORBIDDEN, FORBIDDEN, FORBIDDEN
    cost = 0
    a.change[: length + 2] = 0
    a.last[:] = -1
    for position in range(length - 1, -1, -1):
        op = a.order[position]
        cost += a.cost[op]
        need = a.workspace[op]
        for value in range(a.out_start[op], a.out_start[op + 1]):
            end = length - 1 if a.keep[value] else a.last[value]
            if end >= 0 or not a.optional[value]:
                need += a.size[value]
            if end > position:
                a.change[position + 1] += a.size[value]
                a.change[end + 1] -= a.size[value]
            a.last[value] = -1
        a.need[position] = need
        for i in range(a.in_start[op], a.in_start[op + 1]):
            value = a.in_value[i]
            if a.last[value] < 0:
                a.last[value] = position
    budget, resident = a.numbers[2], a.numbers[3]
    peak, over = resident, 0
    for position in range(length):
        resident += a.change[position]
        here = resident + a.need[position]
        peak = max(peak, here)
        over += max(0, here - budget)
    return cost, peak, over


@kernel()
def evaluate(a: Any, again: Any) -> tuple[int, int, int]:
    """See `_evaluate`."""
    found: tuple[int, int, int] = _evaluate(a, again)
    return found


@inner
def _move(free: Any, again: Any) -> None:
    """Change a set at random: one op; one each way; a stretch; the border of a stretch by one."""
    count = free.shape[0]
    kind = np.random.random()
    at = np.random.randint(count)
    if kind < 0.5:
        again[free[at]] = 1 - again[free[at]]
    elif kind < 0.7:
        again[free[at]] = 1 - again[free[at]]
        other = min(count - 1, max(0, at + np.random.randint(-8, 9)))
        again[free[other]] = 1 - again[free[at]]
    elif kind < 0.85:
        to = 1 if np.random.random() < 0.5 else 0
        for i in range(at, min(count, at + 1 + np.random.randint(1 + count // 8))):
            again[free[i]] = to
    else:
        step = 1 if np.random.random() < 0.5 else -1
        for _ in range(count):
            nearby = at + step
            if not 0 <= nearby < count:
                break
            if again[free[nearby]] != again[free[at]]:
                here = again[free[at]]
                again[free[at]] = again[free[nearby]]
                again[free[nearby]] = here
                break
            at = nearby


@kernel()
def anneal(
    a: Any, free: Any, again: Any, best: Any, best_cost: int, weight: float, hot: float, cold: float, moves: int,
    seed: int,
) -> int:  # fmt: skip
    """Metropolis moves on `again` over the ops `free`; the cheapest set within the budget goes to `best`.

    `weight` is the price of a byte over the budget for a step, `hot` and `cold` are temperatures, all in ns. Returns
    the best cost.
    """
    np.random.seed(seed)
    cost, _, over = _evaluate(a, again)
    if over == 0 and cost < best_cost:
        best_cost = cost
        best[:] = again
    before = again.copy()
    energy = cost + weight * over
    for number in range(moves):
        temperature = hot * (cold / hot) ** (number / moves)
        _move(free, again)
        cost, _, over = _evaluate(a, again)
        new = cost + weight * over
        if new <= energy or np.random.random() < np.exp((energy - new) / temperature):
            energy = new
            before[:] = again
            if over == 0 and cost < best_cost:
                best_cost = cost
                best[:] = again
        else:
            again[:] = before
    return best_cost


@kernel()
def enumerate_all(a: Any, free: Any, again: Any, best: Any) -> int:
    """Try every set over the ops `free`; the cheapest within the budget goes to `best`. Its cost, or `FORBIDDEN`."""
    best_cost = FORBIDDEN
    for number in range(1 << free.shape[0]):
        for i in range(free.shape[0]):
            again[free[i]] = (number >> i) & 1
        cost, _, over = _evaluate(a, again)
        if over == 0 and cost < best_cost:
            best_cost = cost
            best[:] = again
    return best_cost
