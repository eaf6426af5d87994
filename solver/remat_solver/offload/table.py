"""The offload-and-recompute program of a chain with a link (POFO supplement, Theorem 1), in memory slots."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from remat_ir import Chain, ChainStep, Verb

from ..deadline import look, never
from . import kernel
from .kernel import FOREVER, NEEDED, fill_backward, fill_forward, states
from .schedule import Schedule

forward_best: Any = kernel.forward_best
backward_best: Any = kernel.backward_best

_HELD = 16
"""Values of A whose states are filled between two looks at the clock."""


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
        unwound: list[list[ChainStep]] = []
        moved: set[int] = set()
        x, i, held, left, due = 0, 1, 0, 0, 0
        beta, times_f, times_b, activation, tape = self._arguments[1:6]
        while i <= self.chain.stages:
            _, last, away = forward_best(
                x, i, held, left, due, *self._arguments, self._tails, self._table, self._price, False
            )
            own = int(tape[i - 1] if x else activation[i - 1])
            if away:
                moved.add(i - 1)
            end = last or i
            if last:
                forward.append(ChainStep(Verb.F_CK, i))
                forward += (ChainStep(Verb.F_NONE, stage) for stage in range(i + 1, last + 1))
                unwound.append(self._tail(i, last, held + own, due))
                back = float(self._tails[self._row(i, last), held + own, due])
            else:
                forward.append(ChainStep(Verb.F_ALL, i))
                unwound.append([ChainStep(Verb.B, i)])
                back = float(times_b[i]) + self._idle_backward(i, held + own, due)
            ahead = float(times_f[i : end + 1].sum()) + self._idle_forward(i, last, held + own, left)
            left, due = _rest(left + away * own, ahead * beta), _rest(due, back * beta) + away * own
            held += 0 if away else own
            x, i = (0 if last else 1), end + 1
        backward = (step for steps in reversed(unwound) for step in steps)
        return Schedule(tuple(forward), tuple(backward), frozenset(moved))

    def _row(self, i: int, j: int) -> int:
        return (i - 1) * self.chain.stages - ((i - 1) * (i - 2)) // 2 + j - i

    def _idle_backward(self, i: int, held: int, due: int) -> float:
        memory, beta, _, _, _, tape, delta, _, _, over = self._arguments
        late = float(delta[i] + tape[i] + delta[i - 1] + over[i] - (memory - held) + due)
        return max(0.0, late / float(beta))

    def _idle_forward(self, i: int, last: int, held: int, left: int) -> float:
        memory, beta, times, _, activation, tape, _, over, untaped, _ = self._arguments
        late = float(tape[i] + over[i])
        if last:
            needs = [activation[k] + untaped[k] + (activation[k - 1] if k > i else 0) for k in range(i, last + 1)]
            late = max(float(need) - beta * float(times[i:k].sum()) for k, need in enumerate(needs, i))
        return max(0.0, (late - float(memory - held) + left) / float(beta))

    def _tail(self, i: int, j: int, held: int, due: int) -> list[ChainStep]:
        """The recomputation of stages i … j (B.3)."""
        _, beta, _, times_b, activation, tape, *_ = self._arguments
        steps: list[ChainStep] = []
        todo: list[tuple[int, int, int, int] | ChainStep] = [(i, j, held, due)]
        while todo:
            item = todo.pop()
            if isinstance(item, ChainStep):
                steps.append(item)
                continue
            i, j, held, due = item
            _, choice = backward_best(i, j, held, due, *self._arguments, self._tails)
            if choice == 0:
                steps.append(ChainStep(Verb.F_ALL, i))
                todo.append(ChainStep(Verb.B, i))
                if i < j:
                    rest = _rest(due, (float(times_b[i]) + self._idle_backward(i, held, due)) * beta)
                    todo.append((i + 1, j, held + int(tape[i]), rest))
            else:
                steps.append(ChainStep(Verb.F_CK, i))
                steps += (ChainStep(Verb.F_NONE, stage) for stage in range(i + 1, choice + 1))
                rest = _rest(due, float(self._tails[self._row(i, choice), held, due]) * beta)
                todo += ((i, choice, held, due), (choice + 1, j, held + int(activation[choice]), rest))
        return steps


def _rest(amount: int, moved: float) -> int:
    """As in the kernel: what remains, in whole slots."""
    return 0 if moved >= amount else amount - int(moved + 1e-9)
