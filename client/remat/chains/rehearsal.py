"""The room that a budget leaves stages; on an accelerator their plan is rehearsed, which tells what it reserves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from remat_ir import Chain, Graph, InvalidData, Problem, budget_at

from .. import generators
from .._compat import buffers_of, parameters_of
from ..device import storage_bytes
from ..planning.budget import ActivationBytes, Budget, Fraction, UnitBytes, bytes_of, device_budget
from ..planning.coordinator import Coordinator
from ..profiling.fixed import bucket_bytes, bytes_beside, existing_gradients
from ..profiling.optimizers import update_blocks, update_memory
from ..profiling.room import Room, rehearsed


class StagesRoom(Room):
    """The room of stages: a budget, less what is there throughout their training.

    That is, in bytes, their parameters and buffers, a gradient for each parameter, the optimizer's state and averages;
    on an accelerator also what others have allocated there.

    Args:
        budget: as `stages_budget` gives it.
        optimizer, ema: as for `remat.optimize`.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        inputs: Sequence[torch.Tensor],
        budget: Budget,
        coordinator: Coordinator,
        optimizer: Any = None,
        ema: Any = None,
    ) -> None:
        super().__init__(inputs[0].device, budget, 1.0, coordinator)
        self._inputs, self._asked = inputs, budget
        whole = nn.ModuleList(modules)
        update = update_memory(optimizer)
        self._blocks = update_blocks(optimizer, update)
        held = sum(t.numel() * t.element_size() for t in (*whole.parameters(), *whole.buffers()))
        held += bucket_bytes(whole)[0] + (0 if ema is None else bytes_beside(ema, whole)) + update.state_bytes
        new = sum(p.numel() * p.element_size() for p in whole.parameters() if p.requires_grad)
        gradients = existing_gradients(whole)
        self._fixed = held + max(new, gradients) + update.beside_passes_bytes
        self._present = held + gradients - sum(self._blocks.state) + sum(map(storage_bytes, inputs))

    def problem(self, subject: Chain | Graph) -> Problem:
        """What is asked: the budget in bytes of activations, the inputs' included."""
        if isinstance(self._asked, Fraction):
            return Problem(subject, budget_at(subject, self._asked.fraction))
        if isinstance(self._asked, ActivationBytes):
            return Problem(subject, subject.fixed_bytes + bytes_of(self._asked.size))
        assert not isinstance(self._asked, UnitBytes), "see stages_budget"
        return Problem(subject, max(0, self.left(bytes_of(self._asked), self._present) - self._fixed))

    def reserved(self, made: nn.Module) -> int:
        """The reserved bytes of some steps of stages that train by a plan, whose gradients stay from step to step."""
        assert self.device is not None
        xs = [x.detach().requires_grad_(x.requires_grad) for x in self._inputs]

        def step() -> None:
            y = made(*xs)
            torch.autograd.backward((y,), (torch.ones_like(y),))
            for x in xs:
                x.grad = None

        with torch.enable_grad(), _apart(made), generators.Own():
            return rehearsed(self.device, step, self._blocks)


@contextlib.contextmanager
def _apart(module: nn.Module) -> Iterator[None]:
    """Inside, a module has other parameters over the same memory, and copies of its buffers.

    So its own gradients and buffers stay as they are, and hooks of its parameters do not run.
    """
    parts = [(parameters_of(m), buffers_of(m)) for m in module.modules()]
    before = [(dict(p), dict(b)) for p, b in parts]
    others: dict[int, nn.Parameter] = {}
    for parameters, buffers in parts:
        for name, own in parameters.items():
            if own is not None:
                made = others.setdefault(id(own), nn.Parameter(own.detach(), own.requires_grad))
                parameters[name] = made
        buffers.update({name: own.clone() for name, own in buffers.items() if own is not None})
    try:
        yield
    finally:
        for (parameters, buffers), (own_parameters, own_buffers) in zip(parts, before, strict=True):
            parameters.update(own_parameters)
            buffers.update(own_buffers)


def stages_budget(budget: Budget, slack: float) -> Budget:
    """A budget of stages, bytes of a device less the allocator's share.

    Raises:
        InvalidData: not a budget, or one of a unit.
    """
    if isinstance(budget, UnitBytes):
        raise InvalidData("stages have one budget for all of them: give bytes, not remat.UnitBytes")
    return device_budget(budget, slack)
