"""What single steps of a chain need, and the least memory in which a persistent schedule exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from remat_ir import Chain, ChainPlan, ChainStep, Verb

from ..deadline import TimeUp, never
from .kernel import fill_least, spans

_SUMS = 10**7
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
        for high, low in spans(chain.stages, 1, _SUMS):
            if stop():
                raise TimeUp
            fill_least(chain.stages, tapes, activation, tape, needs.none, needs.all, self._table, high, low)

    @property
    def budget_bytes(self) -> int:
        """The least budget for which a persistent schedule exists."""
        return self.chain.fixed_bytes + int(self._table[1, self.chain.stages])

    def plan(self) -> ChainPlan:
        """A schedule with that peak."""
        chain, least, needs = self.chain, self._table, self.needs
        steps: list[ChainStep] = []
        todo: list[tuple[int, int] | ChainStep] = [(1, chain.stages)]
        while todo:
            item = todo.pop()
            if isinstance(item, ChainStep):
                steps.append(item)
                continue
            s, t = item
            if s == t:
                steps += (ChainStep(Verb.F_ALL, s), ChainStep(Verb.B, s))
            elif self._tapes and max(needs.all[s, t], chain.tape_bytes[s - 1] + least[s + 1, t]) == least[s, t]:
                steps.append(ChainStep(Verb.F_ALL, s))
                todo += (ChainStep(Verb.B, s), (s + 1, t))
            else:
                split = next(
                    k
                    for k in range(s + 1, t + 1)
                    if max(needs.none[s, t], chain.activation_bytes[k - 1] + least[k, t], least[s, k - 1])
                    == least[s, t]
                )
                steps.append(ChainStep(Verb.F_CK, s))
                steps += (ChainStep(Verb.F_NONE, stage) for stage in range(s + 1, split))
                todo += ((s, split - 1), (split, t))
        return ChainPlan(tuple(steps))
