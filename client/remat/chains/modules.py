"""Modules that train stages by a plan: one after the other, in branches that meet, or a Sequential for each input."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from remat_ir import Answer, Chain, ChainPlan, InvalidPlan, Plan, Verb, readable

from ..capture.call import state_of
from ..capture.refused import untraced
from ..errors import CaptureError
from ..planning.options import SolveOptions
from ..planning.quick import Better, tell_of_better
from ..switch import plans_are_off
from .profile import ProfiledJoin, backward_stages
from .stages import FORWARD, Schedule, Stage, StageStep, run_by_plan

log = logging.getLogger("remat")


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
            steps.append(StageStep(verb, at - 1))
            if at > 1 and at - 1 not in taped:
                steps.append(StageStep(Verb.FREE, at - 1))
        elif verb is Verb.F_NONE:
            steps += StageStep(Verb.F_CK, at - 1), StageStep(Verb.FREE, at - 1)
        elif verb in FORWARD:
            steps.append(StageStep(verb, at - 1))
            if verb is Verb.F_ALL:
                taped.add(at)
        else:
            steps.append(StageStep(verb, at))
    return steps


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
        branches = [list(branch) for branch in self.branches if isinstance(branch, nn.ModuleList)]
        self.schedule.check([*(m for branch in branches for m in branch), self.head])
        if torch.is_grad_enabled() and not plans_are_off() and self.schedule.trains(xs):
            return run_by_plan(self.schedule, range(len(xs)), xs)
        ends = []
        for branch, x in zip(branches, xs, strict=True):
            y = x
            for stage in branch:
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
        verb = Verb.B if op > count else Verb.F_ALL if position in taped else Verb.F_CK
        steps.append(StageStep(verb, n))
        for source in sources[position]:
            read, (_, maker) = last[source], order[source]
            if read == position and maker != n:
                steps.append(StageStep(Verb.FREE, stages[maker].makes))
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


class ChainPlans:
    """What runs the calls of a module by chain plans; at most `most_plans` of them, the ones used last.

    Args:
        make: plans the stages for a call with a tensor, given the plans of other calls.
        asking: of which `on_failure` and `most_plans` are followed here.
    """

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[nn.Module, torch.Tensor, Sequence[ChainedModule]], ChainedModule],
        asking: SolveOptions,
    ) -> None:
        self._model, self._make, self._asking = model, make, asking
        self._made: OrderedDict[tuple[Any, ...], ChainedModule | None] = OrderedDict()

    @property
    def plans(self) -> tuple[ChainedModule, ...]:
        """What has a plan now."""
        return tuple(made for made in self._made.values() if made is not None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One call by its plan.

        Raises:
            CaptureError: it is no call of stages, and `on_failure` is "raise".
            PlanningError: there is no plan.
        """
        made = self._found(args, kwargs)
        return type(self._model).forward(self._model, *args, **kwargs) if made is None else made(*args)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Make the plan of a call, without running it; it raises as a call does."""
        self._found(args, kwargs)

    def _found(self, args: Sequence[Any], kwargs: Any) -> ChainedModule | None:
        given = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in args if isinstance(t, torch.Tensor)]
        key = (*given, len(args), *kwargs, state_of(self._model))
        if key not in self._made:
            self._made[key] = self._planned(args, kwargs)
            if len(self._made) > self._asking.most_plans:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return self._made[key]

    def _planned(self, args: Sequence[Any], kwargs: Any) -> ChainedModule | None:
        model = self._model
        try:
            if kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor):
                given = f"{len(args) + len(kwargs)} arguments"
                raise CaptureError(f"mode='chain' takes an nn.Sequential and one tensor, not a Sequential and {given}")
            return self._make(model, args[0], self.plans)
        except CaptureError as error:
            if self._asking.on_failure != "plain":
                raise
            log.warning("training runs without a plan: %s", error)
            return None


def is_sequential(model: nn.Module) -> bool:
    """Whether a module runs stages one after the other, and does nothing else."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
