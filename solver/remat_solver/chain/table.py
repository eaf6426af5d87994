"""The persistent optimum of a chain for every memory limit up to a budget, in slots of rounded sizes.

Besides the costs there are least peaks: the least memory in which a persistent schedule exists. Both are compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from remat_ir import Chain, ChainPlan, ChainStep, InvalidPlan, Problem, Verb, verify

from .._numba import inner, int32, kernel
from ..deadline import look, never

WIDTH = 64
"""Memory slots that one pass of the table handles: their rows of all (s', t) stay in the last-level cache."""

NEVER = 1 << 29
"""Stands for infinity; two of them and a prefix of costs still fit an int32."""

Array = Any  # numpy arrays, which numba types for itself

Left = TypeVar("Left")
"""What the stages of a schedule have left: slots, for one."""


def row_of(s: int, t: int, stages: int) -> int:
    """The row of the table that holds C(s, t, ·), 1 ≤ s ≤ t ≤ stages."""
    return (s - 1) * stages - ((s - 1) * (s - 2)) // 2 + t - s


_row_of = inner(row_of)


@inner
def _relax_four(best: Array, right: Array, left: Array) -> None:
    r0, r1, r2, r3 = right[0], right[1], right[2], right[3]
    l0, l1, l2, l3 = left[0], left[1], left[2], left[3]
    for j in range(best.size):
        # the casts keep the sums in 32 bits, so that eight fit one vector register
        x = min(int32(r0[j] + l0[j]), int32(r1[j] + l1[j]))
        y = min(int32(r2[j] + l2[j]), int32(r3[j] + l3[j]))
        best[j] = min(best[j], min(x, y))


@inner
def _relax_one(best: Array, right: Array, left: Array) -> None:
    for j in range(best.size):
        best[j] = min(best[j], int32(right[j] + left[j]))


def spans(stages: int, width: int, work: int) -> Iterator[tuple[int, int]]:
    """Ranges of s, from high to low, that take about so many sums each in a table of `width` slots, or one s."""
    high = stages
    while high > 0:
        low, sums = high, 0
        while low > 1 and (sums := sums + (stages - low + 1) ** 2 // 2 * width) < work:
            low -= 1
        yield high, low
        high = low - 1


@kernel(nogil=True)
def fill(
    stages: int, tapes: bool, forward: Array, pair: Array, once: Array, activation: Array, tape: Array,
    need_none: Array, need_all: Array, table: Array, right: Array, left: Array, first: int, high: int, low_s: int,
) -> None:  # fmt: skip
    """Fill the table of C(s, t, m) for s from `high` down to `low_s`, all t from s on and the WIDTH memory slots m from
    `first` on (RR-9302, Theorem 1, Algorithm 1); greater s and smaller m come before, with the same `right` and `left`.

    `forward` [L+1] is the prefix sum of u_f, `once` that of u_f + u_b, `pair` [L+1] is u_f + u_b; `activation` [L+1]
    and `tape` [L+1] are in slots; `need_none` and `need_all` [L+1, L+1] are the slots below which the forward steps
    s … t−1 without saving, or F_all^s and B^s, do not fit. Without `tapes`, F_all is used only right before its
    backward step. The table has `row_of` rows and a multiple of WIDTH slots.

    C(s', t, m − ω_a^(s'−1)) is laid out as `right` [t, s'], C(s, s'−1, m) + the forward costs as `left` [s'−1]: the
    minimum over s' runs along contiguous rows.
    """
    best = np.empty(WIDTH, np.int32)
    for s in range(high, low_s - 1, -1):
        for t in range(s, stages + 1):
            row = _row_of(s, t, stages)
            cheapest = once[t] - once[s - 1]
            if first > 0 and table[row, first - 1] == cheapest:
                best[:] = cheapest
            else:
                best[:] = NEVER
                if t > s and need_none[s, t] < first + WIDTH:
                    k = s
                    while k + 4 <= t:
                        _relax_four(best, right[t, k + 1 : k + 5], left[k : k + 4])
                        k += 4
                    while k < t:
                        _relax_one(best, right[t, k + 1], left[k])
                        k += 1
                    for j in range(WIDTH):
                        best[j] -= forward[s - 1]
                        if best[j] > NEVER or first + j < need_none[s, t]:
                            best[j] = NEVER
                low = max(need_all[s, t], first)
                if s == t:
                    for m in range(low, first + WIDTH):
                        best[m - first] = pair[s]
                elif tapes:
                    held, after = tape[s], _row_of(s + 1, t, stages)
                    for m in range(max(low, held), first + WIDTH):
                        best[m - first] = min(best[m - first], int32(table[after, m - held] + pair[s]))
            held, shifted = activation[s - 1], right[t, s]
            for j in range(WIDTH):
                table[row, first + j] = best[j]  # an assignment of slices takes a second to compile
            for j in range(WIDTH):
                left[t, j] = best[j] + forward[t]
                m = first + j - held
                shifted[j] = table[row, m] if m >= 0 else NEVER


@kernel()
def fill_least(
    stages: int, tapes: bool, activation: Array, tape: Array, need_none: Array, need_all: Array, least: Array,
    high: int, low: int,
) -> None:  # fmt: skip
    """The least memory [L+1, L+1] in bytes with which stages s … t can be processed by a persistent schedule.

    For s from `high` down to `low`; greater s come before.
    """
    for s in range(high, low - 1, -1):
        least[s, s] = need_all[s, s]
        for t in range(s + 1, stages + 1):
            best = max(need_all[s, t], tape[s] + least[s + 1, t]) if tapes else np.iinfo(np.int64).max
            for k in range(s + 1, t + 1):
                split = max(max(need_none[s, t], activation[k - 1] + least[k, t]), least[s, k - 1])
                best = min(best, split)
            least[s, t] = best


_LEAST_SUMS = 10**7
"""Of the least peaks, between two looks at the clock: some hundredths of a second."""


class Needs:
    """The bytes that single steps of stages s … t need beyond the chain's input a^(s−1) (RR-9302, Section 4.2).

    With the slips of the paper put right: the memory of F_all^s and B^s counts the tape ω_ā^s, and B^s also makes
    δ^(s−1). δ^t is counted while the forward steps of s … t run, but δ^L, which appears with B^L, is not.

    Attributes:
        none: [L+1, L+1] m_∅: the forward steps s … t−1 without a tape.
        all: [L+1, L+1] m_all: F_all^s and B^s.
    """

    def __init__(self, chain: Chain) -> None:
        count = chain.stages
        a = np.array(chain.activation_bytes, np.int64)
        tape = np.array((0, *chain.tape_bytes), np.int64)
        delta = np.array(chain.gradient_bytes, np.int64)
        forward = np.array((0, *chain.forward_workspace_bytes), np.int64)
        untaped = np.array((0, *chain.untaped_workspaces), np.int64)
        backward = np.array((0, *chain.backward_workspace_bytes), np.int64)
        held = delta.copy()
        held[count] = 0
        self.none: Any = np.zeros((count + 1, count + 1), np.int64)
        self.all: Any = np.zeros((count + 1, count + 1), np.int64)
        step = np.zeros(count + 1, np.int64)
        step[1:] = a[:-1] + a[1:] + untaped[1:]
        for s in range(1, count + 1):
            after = held[s:]
            own = delta[s] + tape[s] + delta[s - 1] + backward[s]
            self.all[s, s:] = np.maximum(after + tape[s] + forward[s], own)
            # entry t of the running maximum covers the steps s … t−1
            steps = np.concatenate(([a[s] + untaped[s]], step[s + 1 : count]))
            self.none[s, s + 1 :] = after[1:] + np.maximum.accumulate(steps)[: count - s]


class Least:
    """The persistent schedule of the least peak, by the recursion of Theorem 1 with peaks in place of costs.

    Without `tapes`, F_all is used only right before its backward step. Where `stop` says so, `TimeUp` is raised.
    """

    def __init__(self, chain: Chain, *, tapes: bool = True, stop: Callable[[], bool] = never) -> None:
        self.chain, self.needs, self._tapes = chain, Needs(chain), tapes
        self._table = np.zeros_like(self.needs.all)
        activation = np.array(chain.activation_bytes, np.int64)
        tape = np.array((0, *chain.tape_bytes), np.int64)
        needs = self.needs
        for high, low in spans(chain.stages, 1, _LEAST_SUMS):
            look(stop)
            fill_least(chain.stages, tapes, activation, tape, needs.none, needs.all, self._table, high, low)

    @property
    def budget_bytes(self) -> int:
        """The least budget for which a persistent schedule exists."""
        return self.chain.fixed_bytes + int(self._table[1, self.chain.stages])

    def plan(self) -> ChainPlan:
        """A schedule with that peak."""
        return ChainPlan(scheduled(1, self.chain.stages, self._split, 0))

    def _split(self, s: int, t: int, _: int) -> tuple[int, int]:
        """As `scheduled` wants it; there are no slots."""
        chain, least, needs = self.chain, self._table, self.needs
        if self._tapes and max(needs.all[s, t], chain.tape_bytes[s - 1] + least[s + 1, t]) == least[s, t]:
            return s, 0
        return next(
            (k, 0)
            for k in range(s + 1, t + 1)
            if max(needs.none[s, t], chain.activation_bytes[k - 1] + least[k, t], least[s, k - 1]) == least[s, t]
        )


def scheduled(
    first: int, last: int, split: Callable[[int, int, Left], tuple[int, Left]], left: Left
) -> tuple[ChainStep, ...]:
    """The steps of a recursion over stages of a chain (RR-9302, Algorithm 2).

    `split` says how stages s < t begin with what they have left: s where F_all^s comes first, otherwise the s' whose
    input a^(s'−1) is the next value to save; and what that leaves for the stages behind.
    """
    steps: list[ChainStep] = []
    todo: list[tuple[int, int, Left] | ChainStep] = [(first, last, left)]
    while todo:
        item = todo.pop()
        if isinstance(item, ChainStep):
            steps.append(item)
            continue
        s, t, m = item
        if s == t:
            steps += (ChainStep(Verb.F_ALL, s), ChainStep(Verb.B, s))
            continue
        k, after = split(s, t, m)
        if k == s:
            steps.append(ChainStep(Verb.F_ALL, s))
            todo += (ChainStep(Verb.B, s), (s + 1, t, after))
        else:
            steps.append(ChainStep(Verb.F_CK, s))
            steps += (ChainStep(Verb.F_NONE, stage) for stage in range(s + 1, k))
            todo += ((s, k - 1, m), (k, t, after))
    return tuple(steps)


MOST_TABLE_BYTES = 480 * 2**20
"""What one table may take; a longer chain gets fewer slots."""

_SUMS = 3 * 10**7
"""Of a table, between two looks at the clock: some hundredths of a second."""

MOST_TRIES = 8
"""Plans that are tried above the limit under which they seem to fit."""


class Table:
    """C(s, t, m) of one chain for every m up to a budget (RR-9302, Theorem 1): one filling answers all smaller budgets.

    Sizes that are saved are in slots of `slot_bytes`. Rounded up, every plan fits. Rounded to the `nearest`, errors
    mostly cancel: with as many slots more as all sizes together can have been rounded up by, costs are bounds over
    persistent schedules, and plans are tried from above until one fits. Where all these sizes are whole slots anyway
    the table is `exact`, and both are the same. Costs are whole multiples of `unit_ns`, rounded down, which is 1 unless
    the sum of all recomputations is large.

    Where `stop` says so, its making is left, by `TimeUp`.

    Attributes:
        chain: what it is about.
        slot_bytes, slots: the size of a slot, and how many the table reaches to.
        exact: whether no size that is saved was rounded.
    """

    def __init__(
        self,
        chain: Chain,
        budget_bytes: int,
        slots: int = 500,
        *,
        nearest: bool = False,
        tapes: bool = True,
        stop: Callable[[], bool] = never,
    ) -> None:
        count = chain.stages
        rows = count * (count + 1) // 2
        slots = max(1, min(slots, MOST_TABLE_BYTES // (4 * rows) - 2 * WIDTH))
        available = max(0, budget_bytes - chain.fixed_bytes)
        saved = chain.activation_bytes[1:count] + (chain.tape_bytes if tapes else ())
        grain = math.gcd(*saved) or 1
        self.exact = available // grain <= slots
        self.slot_bytes = grain if self.exact else -(-available // slots)
        self.chain, self.tapes, self._budget = chain, tapes, budget_bytes
        self._nearest = nearest and not self.exact
        # what is left of the budget besides whole slots is there at every moment
        self._rest = 0 if self._nearest else available % self.slot_bytes
        self._activation = self._in_slots(chain.activation_bytes)
        self._tape = self._in_slots((0, *chain.tape_bytes))
        self._excess, self._deficit = self._errors()
        self.slots = self._index(available)
        self._fill(stop)

    def _in_slots(self, sizes: tuple[int, ...]) -> Any:
        add = self.slot_bytes // 2 if self._nearest else self.slot_bytes - 1
        # of the input, which is not in the slots, there may be more than 32 bits count
        return np.minimum((np.array(sizes, np.int64) + add) // self.slot_bytes, NEVER).astype(np.int32)

    def _errors(self) -> tuple[int, int]:
        """The bytes by which all that is saved at once can be over- and underestimated: one size a cut."""
        count = self.chain.stages
        over = self._activation.astype(np.int64) * self.slot_bytes - np.array(self.chain.activation_bytes, np.int64)
        over[0] = over[count] = 0  # a^0 is not in the slots, and a^L is never saved without its tape
        tape = self._tape.astype(np.int64) * self.slot_bytes - np.array((0, *self.chain.tape_bytes), np.int64)
        tape *= self.tapes
        return int(np.maximum(0, np.maximum(over, tape)).sum()), int(np.maximum(0, np.maximum(-over, -tape)).sum())

    def _index(self, available: int) -> int:
        if self._nearest:
            return -(-(available + self._excess) // self.slot_bytes)
        return max(-1, (available - self._rest) // self.slot_bytes)

    def _fill(self, stop: Callable[[], bool]) -> None:
        chain, count = self.chain, self.chain.stages
        worst = sum(chain.forward_ns) * count + sum(chain.backward_ns)
        self.unit_ns = max(1, -(-worst // (NEVER - 1)))
        forward = np.array((0, *chain.forward_ns), np.int64) // self.unit_ns
        pair = forward + np.array((0, *chain.backward_ns), np.int64) // self.unit_ns
        self._remainder_ns = chain.total_cost_ns - int(pair.sum()) * self.unit_ns
        needs = Needs(chain)
        self._need_none, self._need_all = self._threshold(needs.none), self._threshold(needs.all)
        self._forward, self._pair = np.cumsum(forward).astype(np.int32), pair.astype(np.int32)
        width = -(-(self.slots + 1) // WIDTH) * WIDTH
        self._table = np.empty((count * (count + 1) // 2, width), np.int32)
        once = np.cumsum(pair).astype(np.int32)
        right, left = np.empty((count + 1, count + 2, WIDTH), np.int32), np.empty((count + 1, WIDTH), np.int32)
        for first in range(0, width, WIDTH):
            for high, low in spans(count, WIDTH, _SUMS):
                look(stop)
                fill(
                    count, self.tapes, self._forward, self._pair, once, self._activation, self._tape,
                    self._need_none, self._need_all, self._table, right, left, first, high, low,
                )  # fmt: skip

    def _threshold(self, needs: Any) -> Any:
        slots = -(-(needs - self._rest) // self.slot_bytes)
        return np.clip(slots, 0, np.iinfo(np.int32).max).astype(np.int32)

    @property
    def table_bytes(self) -> int:
        """What the table takes."""
        return int(self._table.nbytes)

    def slots_within(self, budget_bytes: int) -> int:
        """The memory limit m that stands for a budget no larger than the table's; −1 is less than nothing.

        Rounded up, the plan for m fits; otherwise the cost for m is a bound.

        Raises:
            ValueError: the budget is larger than the table's.
        """
        if budget_bytes > self._budget:
            raise ValueError(f"the table reaches a budget of {self._budget} bytes, not {budget_bytes}")
        return self._index(budget_bytes - self.chain.fixed_bytes)

    def cheapest_plan(self) -> ChainPlan | None:
        """The cheapest plan found that fits the budget, or None.

        Rounded up that is the plan for all slots. Otherwise plans for more memory are tried, down to the limit
        under which all plans fit; one for each different cost, from the fewest slots that reach it.
        """
        if not self._nearest:
            return self.plan(self.slots)
        sure = (self._budget - self.chain.fixed_bytes - self._deficit) // self.slot_bytes
        top = row_of(1, self.chain.stages, self.chain.stages)
        costs = self._table[top, : self.slots + 1]
        firsts = [int(m) for m in np.unique(costs, return_index=True)[1] if costs[m] < NEVER]
        low, high = 0, next((i for i, m in enumerate(firsts) if m <= sure), len(firsts))
        best = self.plan(firsts[high]) if high < len(firsts) else None
        problem = Problem(self.chain, self._budget)
        # nearly everything fits from some limit down: find it by halving, then look a little above it
        while low < high:
            middle = (low + high) // 2
            plan = self._fitting(problem, firsts[middle])
            low, high, best = (low, middle, plan) if plan else (middle + 1, high, best)
        for m in firsts[max(0, low - MOST_TRIES) : low]:
            plan = self._fitting(problem, m)
            if plan is not None:
                return plan
        return best

    def _fitting(self, problem: Problem, slots: int) -> ChainPlan | None:
        plan = self.plan(slots)
        try:
            verify(problem, plan or ChainPlan(()))
        except InvalidPlan:
            return None
        return plan

    def bound_ns(self, slots: int) -> int | None:
        """The optimal cost with so many slots, never rounded up; None where nothing fits."""
        value = NEVER if slots < 0 else int(self._table[row_of(1, self.chain.stages, self.chain.stages), slots])
        # each step runs at least once, so what rounding took off one pass is owed in full
        return None if value >= NEVER else value * self.unit_ns + self._remainder_ns

    def plan(self, slots: int) -> ChainPlan | None:
        """The optimal plan with so many slots, or None where nothing fits (RR-9302, Algorithm 2)."""
        if self.bound_ns(slots) is None:
            return None
        return ChainPlan(scheduled(1, self.chain.stages, self._split, slots))

    def _split(self, s: int, t: int, m: int) -> tuple[int, int]:
        """As `scheduled` wants it: how stages s … t begin with so many slots, and what that leaves."""
        count = self.chain.stages
        value = int(self._table[row_of(s, t, count), m])
        left = m - int(self._tape[s])
        fits = self.tapes and left >= 0 and m >= self._need_all[s, t]
        if fits and int(self._table[row_of(s + 1, t, count), left]) + int(self._pair[s]) == value:
            return s, left
        for k in range(s + 1, t + 1):
            left = m - int(self._activation[k - 1])
            if left < 0:
                continue
            inner = int(self._table[row_of(k, t, count), left]) + int(self._table[row_of(s, k - 1, count), m])
            if inner + int(self._forward[k - 1] - self._forward[s - 1]) == value:
                return k, left
        raise AssertionError(f"no step reaches C({s}, {t}, {m})")
