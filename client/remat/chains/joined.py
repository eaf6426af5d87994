"""Training branches that meet in a head by a plan of their graph: the chain's operations, on several chains at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from remat_ir import Answer, Plan

from ..capture.refused import untraced
from ..switch import plans_are_off
from .join_profile import ProfiledJoin, backward_stages
from .stages import Action, Schedule, Stage, StageStep, run_by_plan


class JoinedModule(nn.Module):
    """Branches of stages that meet in a head: `head(branch_1(x_1), …, branch_k(x_k))`, trained by a plan.

    Stages are as in `ChainedModule`; branches may share modules, and then train as siamese networks do. The head takes
    what each branch gives, in order, and gives one tensor, best the loss.

    Args:
        branches, head: the modules; their parameters are shared, under the names `branches` and `head`.
        profiled: what they cost, and how they hang together.
        backward: the branch of each backward step, in order.
        plan: a plan of `profiled.graph(backward)`, which the verifier has passed.

    Attributes:
        reserved_bytes: as `ChainedModule` has it.
    """

    def __init__(
        self,
        branches: Sequence[Sequence[nn.Module]],
        head: nn.Module,
        profiled: ProfiledJoin,
        backward: Sequence[int],
        plan: Plan,
        answer: Answer | None = None,
    ) -> None:
        super().__init__()
        self.reserved_bytes: int | None = None
        self.branches = nn.ModuleList(nn.ModuleList(branch) for branch in branches)
        self.head = head
        self.graph, self.plan, self.answer = profiled.graph(backward), plan, answer
        steps = join_steps(profiled.stages, backward_stages(profiled.lengths, backward), plan.computes)
        self.schedule = Schedule(profiled.stages, steps)

    @untraced
    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        """What the head gives, with a backward pass by the plan."""
        self.schedule.check([*(m for branch in self.branches for m in branch), self.head])  # type: ignore[attr-defined]
        if torch.is_grad_enabled() and not plans_are_off() and self.schedule.trains(xs):
            return run_by_plan(self.schedule, range(len(xs)), xs)
        ends = []
        for branch, x in zip(self.branches, xs, strict=True):
            y = x
            for stage in branch:  # type: ignore[attr-defined]
                y = stage(y)
            ends.append(y)
        result: torch.Tensor = self.head(*ends)
        return result


def join_steps(stages: Sequence[Stage], backward: Sequence[int], computes: Iterable[int]) -> list[StageStep]:
    """The steps that compute the ops of `ProfiledJoin.graph` in an order that the verifier has passed.

    They need no more memory than the plan: a tape is kept by the last forward step before the backward one that reads
    it, an activation is freed after its last use, and a forward step that nothing reads is left out.
    """
    count = len(stages)
    order = [(op, op) if op < count else (op, backward[op - count - 1]) for op in computes if op != count]
    sources, alive, taped, last = _uses(stages, order)
    steps: list[StageStep] = []
    for position, (op, n) in enumerate(order):
        if position not in alive:
            continue
        do = Action.BACKWARD if op > count else Action.TAPE if position in taped else Action.FORWARD
        steps.append(StageStep(do, n))
        for source in sources[position]:
            read, (_, maker) = last[source], order[source]
            if read == position and maker != n:
                steps.append(StageStep(Action.FREE, stages[maker].makes))
    return steps


def _uses(
    stages: Sequence[Stage], order: Sequence[tuple[int, int]]
) -> tuple[list[list[int]], set[int], set[int], dict[int, int]]:
    """For each position those that made what it reads; which are needed; which need a tape; the last use of each."""
    count = len(stages)
    maker = {stage.makes: n for n, stage in enumerate(stages)}
    made: dict[int, int] = {}  # stage -> the position of its latest forward step
    sources: list[list[int]] = []
    for position, (op, n) in enumerate(order):
        read = [made[maker[cut]] for cut in stages[n].reads if cut in maker]
        if op < count:
            made[n] = position
        else:
            read.append(made[n])
        sources.append(read)
    alive = {position for position, (op, _) in enumerate(order) if op > count}
    for position in reversed(range(len(order))):
        if position in alive:
            alive.update(sources[position])
    last: dict[int, int] = {}
    taped: set[int] = set()
    for position in sorted(alive):
        for source in sources[position]:
            last[source] = position
        if order[position][0] > count:
            taped.add(sources[position][-1])
    return sources, alive, taped, last
