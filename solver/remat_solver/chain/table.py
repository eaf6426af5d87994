"""The persistent optimum of a chain for every memory limit up to a budget, in slots that are rounded up or down."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from remat_ir import Chain, ChainPlan, ChainStep, InvalidPlan, Problem, Verb, verify

from ..deadline import TimeUp, never
from .kernel import NEVER, WIDTH, fill, row_of, spans
from .needs import Needs

MOST_TABLE_BYTES = 480 * 2**20
"""What one table may take; a longer chain gets fewer slots."""

_SUMS = 3 * 10**7
"""Of a table, between two looks at the clock: some hundredths of a second."""

MOST_TRIES = 8
"""Plans that are tried above the limit under which they seem to fit."""


class Table:
    """C(s, t, m) of one chain for every m up to a budget (RR-9302, Theorem 1): one filling answers all smaller budgets.

    Sizes that are saved are in slots of `slot_bytes`. Rounded "up", every plan fits; rounded "down", every cost is a
    bound over persistent schedules; rounded to the "nearest", errors mostly cancel: with as many slots more as all
    sizes together can have been rounded up by, costs are bounds again, far closer ones, and plans are tried from above
    until one fits. Where all these sizes are whole slots anyway the table is `exact`, and the three are the same. Costs
    are whole multiples of `unit_ns`, rounded down, which is 1 unless the sum of all recomputations is large.

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
        rounding: str = "up",
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
        self._rounding = "up" if self.exact else rounding
        # what is left of the budget besides whole slots is there at every moment
        self._rest = available % self.slot_bytes if self._rounding == "up" else 0
        self._activation = self._in_slots(chain.activation_bytes)
        self._tape = self._in_slots((0, *chain.tape_bytes))
        self._excess, self._deficit = self._errors()
        self.slots = self._index(available)
        self._fill(stop)

    def _in_slots(self, sizes: tuple[int, ...]) -> Any:
        add = {"up": self.slot_bytes - 1, "down": 0, "nearest": self.slot_bytes // 2}[self._rounding]
        return ((np.array(sizes, np.int64) + add) // self.slot_bytes).astype(np.int32)

    def _errors(self) -> tuple[int, int]:
        """The bytes by which all that is saved at once can be over- and underestimated: one size a cut."""
        count = self.chain.stages
        over = self._activation.astype(np.int64) * self.slot_bytes - np.array(self.chain.activation_bytes, np.int64)
        over[0] = over[count] = 0  # a^0 is not in the slots, and a^L is never saved without its tape
        tape = self._tape.astype(np.int64) * self.slot_bytes - np.array((0, *self.chain.tape_bytes), np.int64)
        tape *= self.tapes
        return int(np.maximum(0, np.maximum(over, tape)).sum()), int(np.maximum(0, np.maximum(-over, -tape)).sum())

    def _index(self, available: int) -> int:
        if self._rounding == "up":
            return max(-1, (available - self._rest) // self.slot_bytes)
        return -(-(available + self._excess) // self.slot_bytes)

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
                if stop():
                    raise TimeUp
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

    def cheapest_plan(self, budget_bytes: int) -> ChainPlan | None:
        """The cheapest plan found that fits a budget no larger than the table's, or None.

        Rounded up that is the plan for `slots_within`. Otherwise plans for more memory are tried, down to the limit
        under which all plans fit; one for each different cost, from the fewest slots that reach it.
        """
        if self._rounding == "up":
            return self.plan(self.slots_within(budget_bytes))
        sure = (budget_bytes - self.chain.fixed_bytes - self._deficit) // self.slot_bytes
        top = row_of(1, self.chain.stages, self.chain.stages)
        costs = self._table[top, : self.slots_within(budget_bytes) + 1]
        firsts = [int(m) for m in np.unique(costs, return_index=True)[1] if costs[m] < NEVER]
        low, high = 0, next((i for i, m in enumerate(firsts) if m <= sure), len(firsts))
        best = self.plan(firsts[high]) if high < len(firsts) else None
        problem = Problem(self.chain, budget_bytes)
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
        steps: list[ChainStep] = []
        todo: list[tuple[int, int, int] | ChainStep] = [(1, self.chain.stages, slots)]
        while todo:
            item = todo.pop()
            if isinstance(item, ChainStep):
                steps.append(item)
                continue
            s, t, m = item
            split = 0 if s == t else self._split(s, t, m)
            if s == t:
                steps += (ChainStep(Verb.F_ALL, s), ChainStep(Verb.B, s))
            elif split == s:
                steps.append(ChainStep(Verb.F_ALL, s))
                todo += (ChainStep(Verb.B, s), (s + 1, t, m - int(self._tape[s])))
            else:
                steps.append(ChainStep(Verb.F_CK, s))
                steps += (ChainStep(Verb.F_NONE, stage) for stage in range(s + 1, split))
                todo += ((s, split - 1, m), (split, t, m - int(self._activation[split - 1])))
        return ChainPlan(tuple(steps))

    def _split(self, s: int, t: int, m: int) -> int:
        """s where F_all^s comes first, otherwise the s' whose input a^(s'−1) is the next value to save."""
        count = self.chain.stages
        value = int(self._table[row_of(s, t, count), m])
        left = m - int(self._tape[s])
        fits = self.tapes and left >= 0 and m >= self._need_all[s, t]
        if fits and int(self._table[row_of(s + 1, t, count), left]) + int(self._pair[s]) == value:
            return s
        for k in range(s + 1, t + 1):
            left = m - int(self._activation[k - 1])
            if left < 0:
                continue
            inner = int(self._table[row_of(k, t, count), left]) + int(self._table[row_of(s, k - 1, count), m])
            if inner + int(self._forward[k - 1] - self._forward[s - 1]) == value:
                return k
        raise AssertionError(f"no step reaches C({s}, {t}, {m})")
