"""Training a list of stages by a chain plan: Rotor's operations, executed with autograd inside each stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from remat_ir import Answer, Chain, ChainPlan, InvalidPlan
from remat_ir.chain_plan import Verb

from ..capture.trace import untraced
from .stages import Action, Schedule, Stage, StageStep, run_by_plan

_TRANSFERS = {
    Verb.OFFLOAD: Action.OFFLOAD,
    Verb.WAIT: Action.WAIT,
    Verb.DROP: Action.DROP,
    Verb.PREFETCH: Action.PREFETCH,
}


class ChainedModule(nn.Module):
    """Stages that run one after the other and train by a chain plan.

    A stage may be any module of one tensor that gives one tensor: any Python inside it, dropout, batch normalization,
    hooks. When it runs again it draws the same random numbers and sees the buffers as they were; what it would write to
    them is thrown away. Gradients of parameters appear once, in the nested backward pass of their stage, or of the last
    of several that share them. A stage must not overwrite its input. Transfers run on CUDA next to the computation, in
    pinned memory; on a CPU they are plain copies into memory that torch's allocator does not hold.

    Args:
        stages: the modules, in order; their parameters are shared, under the names of a ModuleList called `stages`.
        plan: a plan of `chain`, which the verifier has passed.
        needs_grad: stages (from 1) that must run with grad even where no tape is kept, to compute the same bits.

    Attributes:
        reserved_bytes: the most that torch's allocator reserves for training by the plan, where the budget was one of a
            device's bytes; else None.
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
        between = [Stage(module, (n,), n + 1, n + 1 in needs_grad) for n, module in enumerate(stages)]
        self.schedule = Schedule(between, stage_steps(plan))

    @untraced
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the stages give one after the other, with a backward pass by the plan."""
        if not torch.is_grad_enabled():
            for stage in self.stages:
                x = stage(x)
            return x
        return run_by_plan(self.schedule, (0,), (x,))


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
