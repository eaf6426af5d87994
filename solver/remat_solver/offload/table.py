"""The offload-and-recompute program of a chain with a link (POFO supplement, Theorem 1, B.1 to B.3), in memory slots.

Its recursions are compiled: sizes are in slots, times in ns, β in slots per ns. A step's rest of a transfer is rounded
up to whole slots, so that no plan counts on a transfer that has not ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from remat_ir import Chain, ChainStep, Verb

from .._numba import inner, kernel
from ..chain.table import scheduled
from ..deadline import look, never

FOREVER = np.inf
NEEDED = -1.0
_spliced = partial(inner, inline="always")
Array = Any


@_spliced
def _row_of(i: int, j: int, stages: int) -> int:
    """The row of the table that holds C_Δ(i, j, ·, ·), 1 ≤ i ≤ j ≤ stages."""
    return (i - 1) * stages - ((i - 1) * (i - 2)) // 2 + j - i


@_spliced
def _rest_of(amount: int, time: float, beta: float) -> int:
    """What remains of so many slots after a time on the link, in whole slots."""
    moved = time * beta
    return 0 if moved >= amount else amount - int(moved + 1e-9)


@kernel()
def backward_best(
    i: int, j: int, held: int, due: int, memory: int, beta: float,
    forward: Array, backward: Array, activation: Array, tape: Array, delta: Array, over_f: Array, over_n: Array,
    over_b: Array, table: Array,
) -> tuple[float, int, int]:  # fmt: skip
    """C_Δ(i, j, A, Δ) and how it is reached: 0 by F_all^i first, otherwise the i' whose a^(i') is saved next.

    And Δ of the stages behind. `held` is A, the input I_i included; `due` is Δ, what must have been prefetched by the
    end (B.3).
    """
    stages = forward.shape[0] - 1
    best, choice, due_after = FOREVER, -1, 0
    need_f = delta[j] + tape[i] + over_f[i]
    need_b = delta[i] + tape[i] + delta[i - 1] + over_b[i]
    spare = memory - held
    if need_f <= spare and need_b <= spare:
        if i == j:
            late = max(need_f - beta * backward[i], need_b) - spare + due
            return forward[i] + backward[i] + max(0.0, late / beta), 0, 0
        idle_b = max(0.0, (need_b - spare + due) / beta)
        due_1 = _rest_of(due, backward[i] + idle_b, beta)
        if held + tape[i] + due_1 <= memory:
            inner = table[_row_of(i + 1, j, stages), held + tape[i], due_1]
            if inner < FOREVER:
                due_2 = _rest_of(due_1, inner, beta)
                best = forward[i] + inner + backward[i] + idle_b + max(0.0, (need_f - spare + due_2) / beta)
                choice, due_after = 0, due_1
    steps, late, most = 0.0, -FOREVER, 0
    for k in range(i, j):
        need = delta[j] + activation[k] + over_n[k] + (activation[k - 1] if k > i else 0)
        most = max(most, need)
        if most > spare:
            break
        steps += forward[k]
        late = max(late - beta * forward[k], need)
        tail = table[_row_of(i, k, stages), held, due]
        if tail == FOREVER:
            continue
        due_2 = _rest_of(due, tail, beta)
        if held + activation[k] + due_2 > memory:
            continue
        inner = table[_row_of(k + 1, j, stages), held + activation[k], due_2]
        if inner == FOREVER:
            continue
        due_3 = _rest_of(due_2, inner, beta)
        value = steps + inner + tail + max(0.0, (late - spare + due_3) / beta)
        if value < best:
            best, choice, due_after = value, k, due_2
    return best, choice, due_after


@kernel(nogil=True)
def fill_backward(
    i: int, j: int, memory: int, beta: float,
    forward: Array, backward: Array, activation: Array, tape: Array, delta: Array, over_f: Array, over_n: Array,
    over_b: Array, table: Array,
) -> None:  # fmt: skip
    """Fill C_Δ of two stages i ≤ j, for all A + Δ within the memory; those between i and j must be there."""
    row = _row_of(i, j, forward.shape[0] - 1)
    for held in range(memory + 1):
        for due in range(memory - held, -1, -1):
            best, _, _ = backward_best(
                i, j, held, due, memory, beta, forward, backward, activation, tape, delta, over_f, over_n, over_b,
                table,
            )  # fmt: skip
            table[row, held, due] = best


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
) -> tuple[float, int, int, int]:  # fmt: skip
    """The best of F_all^i first, whether its input, of `own` slots, is offloaded, and Δ_F and Δ_B after it."""
    stages = forward.shape[0] - 1
    best, moved, left_after, due_after = FOREVER, 0, 0, 0
    spare = memory - held - own
    need_f = tape[i] + over_f[i]
    need_b = delta[i] + tape[i] + delta[i - 1] + over_b[i]
    if need_f > spare or need_b > spare:
        return best, moved, left_after, due_after
    idle_f = max(0.0, (need_f - spare + left) / beta)
    idle_b = max(0.0, (need_b - spare + due) / beta)
    once = forward[i] + backward[i] + idle_f + idle_b
    if i == stages:
        # between the phases both transfers must come to an end
        rest = max(0.0, left - (forward[i] + idle_f) * beta) + max(0.0, due - (backward[i] + idle_b) * beta)
        return once + rest / beta, moved, left_after, due_after
    for v in range(2 if own > 0 else 1):
        go, come = v * own, _rest_of(due, backward[i] + idle_b, beta) + v * own
        go = _rest_of(left + go, forward[i] + idle_f, beta)
        keep = held + (0 if v else own)
        if keep + go <= memory and keep + come <= memory:
            value = once + price * v * own + _onward(table, 1, i + 1, _state(keep, go, come, memory), mark)
            if value < best:
                best, moved, left_after, due_after = value, v, go, come
    return best, moved, left_after, due_after


@inner
def _without_tape(
    i: int, own: int, held: int, left: int, due: int, memory: int, beta: float,
    forward: Array, activation: Array, over_n: Array, tails: Array, table: Array, price: float, mark: bool,
) -> tuple[float, int, int, int, int]:  # fmt: skip
    """The best of F_ck^i first and F_none up to some stage before the last, that stage, and then as `_with_tape`."""
    best, last, moved, left_after, due_after = FOREVER, -1, 0, 0, 0
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
        tail = tails[_row_of(i, j, stages), held + own, due]
        if tail == FOREVER:
            continue
        idle = max(0.0, (late - spare + left) / beta)
        for v in range(2 if own > 0 else 1):
            if v == 0 and after > spare:
                continue
            come = _rest_of(due, tail, beta) + v * own
            go = _rest_of(left + v * own, steps + idle, beta)
            keep = held + (0 if v else own)
            if keep + go <= memory and keep + come <= memory:
                onward = _onward(table, 0, j + 1, _state(keep, go, come, memory), mark)
                value = steps + tail + idle + price * v * own + onward
                if value < best:
                    best, last, moved, left_after, due_after = value, j, v, go, come
    return best, last, moved, left_after, due_after


@kernel()
def forward_best(
    x: int, i: int, held: int, left: int, due: int, memory: int, beta: float,
    forward: Array, backward: Array, activation: Array, tape: Array, delta: Array, over_f: Array, over_n: Array,
    over_b: Array, tails: Array, table: Array, price: float, mark: bool,
) -> tuple[float, int, int, int, int]:  # fmt: skip
    """OC_x(i, A, Δ_F, Δ_B), the last stage of the first step, 0 for F_all^i alone, and whether its input is offloaded.

    And Δ_F and Δ_B after that step. `held` is A, without the input I_i; `left` is Δ_F, what is still to be offloaded;
    `due` is Δ_B, what must have been prefetched by the end of B^i (B.1, B.2). The input of stage 1 has no slots where
    it stays on the device. `price` is what a slot on the host costs, in ns.
    """
    own = tape[i - 1] if x else activation[i - 1]
    if memory - held - own < 0:
        return FOREVER, -1, 0, 0, 0
    best, moved, left_after, due_after = _with_tape(
        i, own, held, left, due, memory, beta, forward, backward, tape, delta, over_f, over_b, table, price, mark
    )
    last = 0 if best < FOREVER else -1
    value, end, goes, left_then, due_then = _without_tape(
        i, own, held, left, due, memory, beta, forward, activation, over_n, tails, table, price, mark
    )
    if value < best:
        return value, end, goes, left_then, due_then
    return best, last, moved, left_after, due_after


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
                    best, _, _, _, _ = forward_best(
                        x, i, held, left, due, memory, beta, forward, backward, activation, tape, delta, over_f,
                        over_n, over_b, tails, table, price, mark,
                    )  # fmt: skip
                    if not mark:
                        table[x, i, state] = best


_HELD = 16
"""Values of A whose states are filled between two looks at the clock."""


@dataclass(frozen=True)
class Schedule:
    """What the program decides (POFO supplement, Appendix B).

    Attributes:
        forward: the forward phase, up to F_all^L.
        backward: the backward phase, from B^L on, recomputations included.
        moved: cuts l whose saved value, ā^l or a^l, is offloaded from the forward step l + 1 on, and comes back for the
            first step of the backward phase that reads it.
    """

    forward: tuple[ChainStep, ...]
    backward: tuple[ChainStep, ...]
    moved: frozenset[int]


def moved_bytes(chain: Chain, schedule: Schedule) -> int:
    """What the host holds between the phases, when all that is moved is there."""
    taped = {step.stage for step in schedule.forward if step.verb is Verb.F_ALL}
    return sum(chain.tape_bytes[cut - 1] if cut in taped else chain.activation_bytes[cut] for cut in schedule.moved)


class OffloadTable:
    """OC_x(i, A, Δ_F, Δ_B) and C_Δ(i, j, A, Δ) of one chain and budget, sizes rounded up to slots, or to the nearest.

    Rounded up, a schedule fits the fluid model; rounded to the nearest, errors mostly cancel, but it need not.
    Time grows as L²N³ + L³N², space as LN³ + L²N² (B.4), for L stages and N slots.

    The program has no state for the host. `price`, in ns a byte that is moved, is the multiplier of a limit there: the
    schedule is then the best one of those that move no more than it does.

    Attributes:
        slots, slot_bytes: N, and the size of a slot; one byte where that many slots hold the budget.

    Raises:
        TimeUp: `stop`, which is asked all the time, said so.
    """

    def __init__(
        self,
        chain: Chain,
        budget_bytes: int,
        slots: int = 50,
        *,
        nearest: bool = False,
        price: float = 0.0,
        stop: Callable[[], bool] = never,
    ) -> None:
        if chain.link_bytes_per_s is None:
            raise ValueError("the chain has no link to the host")
        self.chain = chain
        available = max(0, budget_bytes - chain.staying_bytes)
        # an input that stays takes no room: it is out of the budget already
        activation = (chain.fixed_bytes - chain.staying_bytes, *chain.activation_bytes[1:])
        sizes = (*activation, *chain.tape_bytes, *chain.gradient_bytes[:-1])
        sizes += (*chain.forward_workspace_bytes, *chain.untaped_workspaces, *chain.backward_workspace_bytes)
        sizes += (chain.gradient_bytes[-1],)
        grain = math.gcd(*sizes) or 1
        self.slot_bytes = grain if available // grain <= slots else -(-available // slots)
        self.slots = available // self.slot_bytes
        self._price = float(price * self.slot_bytes)  # of one type, so that the kernels are compiled once
        self._add = self.slot_bytes // 2 if nearest else self.slot_bytes - 1
        count = chain.stages
        beta = chain.link_bytes_per_s / 1e9 / self.slot_bytes
        delta = self._in_slots(chain.gradient_bytes)
        self._arguments: tuple[Any, ...] = (
            self.slots, beta,
            np.array((0, *chain.forward_ns), np.float64), np.array((0, *chain.backward_ns), np.float64),
            self._in_slots(activation), self._in_slots((0, *chain.tape_bytes)), delta,
            self._in_slots((0, *chain.forward_workspace_bytes)), self._in_slots((0, *chain.untaped_workspaces)),
            self._in_slots((0, *chain.backward_workspace_bytes)),
        )  # fmt: skip
        width = self.slots + 1
        self._tails = np.full((count * (count + 1) // 2, width, width), FOREVER)
        self._table = np.full((2, count + 1, states(self.slots)), FOREVER)
        self._fill(count, stop)

    def _fill(self, count: int, stop: Callable[[], bool]) -> None:
        for i in range(count, 0, -1):
            for j in range(i, count):
                look(stop)
                fill_backward(i, j, *self._arguments, self._tails)
        # the states that the first one can lead to are marked, then filled from the last stage
        self._table[0, 1, 0] = NEEDED
        for mark, stages in ((True, range(1, count + 1)), (False, range(count, 0, -1))):
            for i in stages:
                for first in range(0, self.slots + 1, _HELD):
                    look(stop)
                    end = min(first + _HELD, self.slots + 1)
                    fill_forward(i, first, end, mark, *self._arguments, self._tails, self._table, self._price)

    def _in_slots(self, sizes: tuple[int, ...]) -> Any:
        return (np.array(sizes, np.int64) + self._add) // self.slot_bytes

    @property
    def makespan_ns(self) -> float:
        """The makespan of the best schedule in the rounded fluid model, what it pays for moves included; infinite where
        nothing fits.
        """
        return float(self._table[0, 1, 0])

    def schedule(self) -> Schedule | None:
        """The best schedule, or None where nothing fits."""
        if self.makespan_ns == FOREVER:
            return None
        forward: list[ChainStep] = []
        unwound: list[tuple[ChainStep, ...]] = []
        moved: set[int] = set()
        x, i, held, left, due = 0, 1, 0, 0, 0
        activation, tape = self._arguments[4:6]
        while i <= self.chain.stages:
            _, last, away, left_after, due_after = forward_best(
                x, i, held, left, due, *self._arguments, self._tails, self._table, self._price, False
            )
            own = int(tape[i - 1] if x else activation[i - 1])
            if away:
                moved.add(i - 1)
            if last:
                forward.append(ChainStep(Verb.F_CK, i))
                forward += (ChainStep(Verb.F_NONE, stage) for stage in range(i + 1, last + 1))
                unwound.append(self.tail(i, last, held + own, due))
            else:
                forward.append(ChainStep(Verb.F_ALL, i))
                unwound.append((ChainStep(Verb.B, i),))
            left, due = left_after, due_after
            held += 0 if away else own
            x, i = (0 if last else 1), (last or i) + 1
        backward = (step for steps in reversed(unwound) for step in steps)
        return Schedule(tuple(forward), tuple(backward), frozenset(moved))

    def tail(self, i: int, j: int, held: int, due: int) -> tuple[ChainStep, ...]:
        """The recomputation of stages i … j (B.3), with A and Δ in slots as in `backward_best`."""
        activation, tape = self._arguments[4:6]

        def split(i: int, j: int, left: tuple[int, int]) -> tuple[int, tuple[int, int]]:
            held, due = left
            _, choice, due_after = backward_best(i, j, held, due, *self._arguments, self._tails)
            if choice == 0:
                return i, (held + int(tape[i]), due_after)
            return choice + 1, (held + int(activation[choice]), due_after)

        return scheduled(i, j, split, (held, due))
