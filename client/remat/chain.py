"""Training a list of stages by a chain plan: Rotor's operations, executed with autograd inside each stage."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from remat_ir import Answer, Chain, ChainPlan, InvalidPlan
from remat_ir.chain_plan import Verb

from .errors import CaptureError

_FORWARD = (Verb.F_ALL, Verb.F_CK, Verb.F_NONE)


class ChainedModule(nn.Module):
    """Stages that run one after the other and train by a chain plan.

    A stage may be any module of one tensor that gives one tensor: any Python inside it, dropout, batch normalization,
    hooks. When it runs again it draws the same random numbers and sees the buffers as they were; what it would write to
    them is thrown away. Gradients of parameters appear once, in the nested backward pass of their stage. A stage must
    not overwrite its input.

    Args:
        stages: the modules, in order; their parameters are shared, under the names of a ModuleList called `stages`.
        plan: a plan of `chain`, which the judge has passed.
        graded: stages (from 1) that must run with grad even where no tape is kept, to compute the same bits.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        chain: Chain,
        plan: ChainPlan,
        answer: Answer | None = None,
        graded: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        if chain.stages != len(stages):
            raise InvalidPlan(f"the plan is one of {chain.stages} stages, and there are {len(stages)}")
        wrong = next((s for s in plan.steps if s.verb not in (*_FORWARD, Verb.B, Verb.FREE)), None)
        if wrong is not None:
            raise InvalidPlan(f"{wrong.verb.value} {wrong.stage}: transfers are not executed here")
        self.stages = nn.ModuleList(stages)
        self.chain, self.plan, self.answer, self.graded = chain, plan, answer, graded
        turn = next(i for i, s in enumerate(plan.steps) if s.verb is Verb.B)
        self._forward_steps, self._backward_steps = plan.steps[:turn], plan.steps[turn:]
        self._times = Counter(s.stage for s in plan.steps if s.verb in _FORWARD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the stages give one after the other, with a backward pass by the plan."""
        if not torch.is_grad_enabled():
            for stage in self.stages:
                x = stage(x)
            return x
        # the function must have an input that requires gradients, or autograd never calls its backward pass
        anchor = torch.empty(0, device=x.device).requires_grad_()
        result: torch.Tensor = _Chained.apply(self, x, anchor)  # type: ignore[no-untyped-call]
        return result

    def _run(self, steps: Any, state: _State) -> None:
        for step in steps:
            if step.verb is Verb.B:
                state.backward(step.stage)
            elif step.verb is Verb.FREE:
                state.stored.pop(step.stage)
            else:
                state.forward(self.stages[step.stage - 1], step.stage, step.verb, self._times[step.stage] > 1)


@dataclass
class _State:
    """What one pass through the chain holds."""

    stored: dict[int, torch.Tensor]
    autocast: Any
    graded: frozenset[int]
    tapes: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    first: dict[int, _Circumstances] = field(default_factory=dict)
    gradient: torch.Tensor | None = None

    def forward(self, module: nn.Module, stage: int, verb: Verb, comes_again: bool) -> None:
        """F_all, F_ck or F_none of a stage."""
        x = self.stored[stage - 1]
        again = stage in self.first
        if not again and comes_again:
            self.first[stage] = _Circumstances(module, x.device)
        with self.first[stage].restored() if again else contextlib.nullcontext(), self.autocast():
            if verb is Verb.F_ALL:
                self.tapes[stage] = self._with_grad(module, stage, x)
                self.stored[stage] = self.tapes[stage][1].detach()
            elif stage in self.graded:
                self.stored[stage] = self._with_grad(module, stage, x)[1].detach()
            else:
                with torch.no_grad():
                    self.stored[stage] = module(x)
        if verb is Verb.F_NONE:
            del self.stored[stage - 1]

    def _with_grad(self, module: nn.Module, stage: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_((stage > 1 or x.requires_grad) and x.is_floating_point())
            return leaf, module(leaf)

    def backward(self, stage: int) -> None:
        """B of a stage: from the gradient of its output to that of its input, and its parameters' on the way."""
        leaf, y = self.tapes.pop(stage)
        self.stored.pop(stage, None)
        if stage - 1 not in self.tapes and stage > 1:
            self.stored.pop(stage - 1, None)
        given, self.gradient = self.gradient, None
        if y.requires_grad and given is not None:
            torch.autograd.backward(y, given)
            self.gradient = leaf.grad


class _Circumstances:
    """The generators' states and the buffers before a stage first runs."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self.buffers = [(m, n, b.clone()) for m in module.modules() for n, b in m._buffers.items() if b is not None]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Everything as it was; afterwards, everything as it is now."""
        cpu = torch.get_rng_state()
        cuda = torch.cuda.get_rng_state(self.device) if self.cuda is not None else None
        now = [(m, n, m._buffers[n]) for m, n, _ in self.buffers]
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
        for module, name, value in self.buffers:
            module._buffers[name] = value.clone()
        try:
            yield
        finally:
            for module, name, buffer in now:
                module._buffers[name] = buffer
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, self.device)


class _Chained(torch.autograd.Function):
    boxed_grads_call = True  # where torch knows it, the incoming gradient comes in a list, and can be freed on the way

    @staticmethod
    def forward(ctx: Any, module: ChainedModule, x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        state = _State({0: x.detach().requires_grad_(x.requires_grad)}, _autocast(x.device), module.graded)
        module._run(module._forward_steps, state)
        ctx.module, ctx.state = module, state
        return state.stored[module.chain.stages].view_as(state.stored[module.chain.stages])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        state, ctx.state = ctx.state, None
        if state is None:
            raise RuntimeError("a chain's backward pass runs once: retain_graph and double backward are not supported")
        state.gradient = gradients[0].pop() if isinstance(gradients[0], list) else gradients[0]
        del gradients
        ctx.module._run(ctx.module._backward_steps, state)
        return None, state.gradient, None


def _autocast(device: torch.device) -> Any:
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    cached = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=cached)


def check_stage(module: nn.Module, position: int, x: torch.Tensor, y: object, version: int) -> None:
    """Refuse what the executor cannot run exactly.

    Raises:
        CaptureError: a stage that gives something other than one tensor, or overwrites its input.
    """
    if not isinstance(y, torch.Tensor):
        raise CaptureError(f"stage {position} ({type(module).__name__}) gives {type(y).__name__}, not one tensor")
    if x._version != version:
        raise CaptureError(f"stage {position} ({type(module).__name__}) overwrites its input: use inplace=False")
