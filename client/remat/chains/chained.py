"""Training a list of stages by a chain plan: Rotor's operations, executed with autograd inside each stage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from remat_ir import Answer, Chain, ChainPlan, InvalidPlan, Verb, readable

from ..capture.refused import untraced
from ..planning.quick import Better, tell_of_better
from ..switch import plans_are_off
from .stages import Action, Schedule, Stage, StageStep, run_by_plan

log = logging.getLogger("remat")

_TRANSFERS = {
    Verb.OFFLOAD: Action.OFFLOAD,
    Verb.WAIT: Action.WAIT,
    Verb.DROP: Action.DROP,
    Verb.PREFETCH: Action.PREFETCH,
}


class ChainedModule(nn.Module):
    """Stages that run one after the other and train by a chain plan.

    A stage may be any module of one tensor that gives one tensor: any Python inside it, dropout, batch normalization,
    hooks. When it runs again it draws the same random numbers and sees buffers and attributes of its modules as they
    were; what it would write to them is thrown away. Gradients of parameters appear once, in the nested backward pass
    of their stage, or of the last of several that share them. A stage must not overwrite its input, nor a tensor that
    is no buffer. Transfers run on CUDA next to the computation, in pinned memory; on a CPU they are plain copies into
    memory that torch's allocator does not hold.

    Args:
        stages: the modules, in order; their parameters are shared, under the names of a ModuleList called `stages`.
        plan: a plan of `chain`, which the verifier has passed.
        needs_grad: stages (from 1) that must run with grad even where no tape is kept, to compute the same bits.

    Attributes:
        reserved_bytes: the most that torch's allocator reserves for training by the plan, where the budget was one of a
            device's bytes; else None.
        better: an answer with a cheaper verified plan of `chain` that is still looked for; its plan takes over at the
            start of a step. A copy of the module has none.
        reserves: what such a plan makes torch's allocator reserve, or None where that is over the budget.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        chain: Chain,
        plan: ChainPlan,
        answer: Answer | None = None,
        needs_grad: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self.reserved_bytes: int | None = None
        if chain.stages != len(stages):
            raise InvalidPlan(f"the plan is one of {chain.stages} stages, and there are {len(stages)}")
        self.stages = nn.ModuleList(stages)
        self.chain, self.plan, self.answer = chain, plan, answer
        self.better: Better[Answer] | None = None
        self.reserves: Callable[[Answer], int | None] | None = None
        self._warned = False
        self._between = [Stage(module, (n,), n + 1, n + 1 in needs_grad) for n, module in enumerate(stages)]
        self.schedule = Schedule(self._between, stage_steps(plan))

    @untraced
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the stages give one after the other, with a backward pass by the plan."""
        self.schedule.check(list(self.stages))
        if plans_are_off() or not torch.is_grad_enabled() or not self.schedule.trains((x,)):
            for stage in self.stages:
                x = stage(x)
            return x
        self._take_over()
        planned = self.chain.activation_bytes[0]
        if self.answer is not None and x.nbytes > planned and not self._warned:
            self._warned = True
            log.warning(
                "the input takes %s, and the plan was made for one of %s: the budget may be exceeded; "
                "remat.optimize(..., mode='chain') plans each size",
                readable(x.nbytes),
                readable(planned),
            )
        return run_by_plan(self.schedule, (0,), (x,))

    def _take_over(self) -> None:
        """Go on by the better plan once it is there; a step that has begun ends by the schedule that it began with."""
        if self.better is None:
            return
        found, reserves = self.better.take(), self.reserves
        if not self.better.over:
            return
        self.better = self.reserves = None
        if found is None or not isinstance(found.plan, ChainPlan):
            return
        if reserves is not None:
            reserved = reserves(found)
            if reserved is None:
                return
            self.reserved_bytes = reserved
        if self.answer is not None:
            tell_of_better(found, self.answer)
        self.plan, self.answer = found.plan, found
        self.schedule = Schedule(self._between, stage_steps(found.plan), self.schedule.modes)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "better": None, "reserves": None}


def stage_steps(plan: ChainPlan) -> list[StageStep]:
    """The plan's steps with all that they free; stage l of the plan is stage l − 1, between cuts l − 1 and l."""
    steps: list[StageStep] = []
    taped: set[int] = set()
    for verb, at in plan.steps:
        if verb is Verb.B:
            taped.discard(at)
            steps.append(StageStep(Action.BACKWARD, at - 1))
            if at > 1 and at - 1 not in taped:
                steps.append(StageStep(Action.FREE, at - 1))
        elif verb is Verb.FREE:
            steps.append(StageStep(Action.FREE, at))
        elif verb in _TRANSFERS:
            steps.append(StageStep(_TRANSFERS[verb], at))
        else:
            steps.append(StageStep(Action.TAPE if verb is Verb.F_ALL else Action.FORWARD, at - 1))
            if verb is Verb.F_ALL:
                taped.add(at)
            elif verb is Verb.F_NONE:
                steps.append(StageStep(Action.FREE, at - 1))
    return steps
