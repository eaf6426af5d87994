"""The client's cases and models of the zoo, moved to a device, and what their steps take there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from benchmarks.models.zoo import build
from torch.utils._pytree import tree_map

from client.small_models import CASES, Case
from client.test_exact import WithLoss, callable_of
from remat.profiling import measure
from remat.training.step import TrainingStep, running_peak
from remat_ir import Plan

DEVICE = torch.device("cuda:0")
MIB = 2**20
ON_THE_HOST = ("tensors_that_are_no_buffers",)
"""Makes a tensor on the CPU within its forward, and adds it to another: no case for a device."""
ALL = [*sorted(CASES.keys() - set(ON_THE_HOST)), "vgg", "gpt2", "resnet_basic"]


def _moved(case: Case) -> Case:
    """The case on the first device: parameters, buffers, inputs, and tensors that are attributes of a module."""

    def move(thing: Any) -> Any:
        if not isinstance(thing, torch.Tensor):
            return thing
        return thing.detach().to(DEVICE).requires_grad_(thing.requires_grad)

    module = case.module.to(DEVICE)
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, torch.Tensor):
                setattr(part, name, move(value))
    return case._replace(module=module, args=tree_map(move, case.args), kwargs=tree_map(move, case.kwargs))


def subject(name: str) -> Case:
    """A case or a model of the zoo on the first device, the same each time."""
    torch.manual_seed(0)
    if name in CASES:
        return _moved(CASES[name]())
    made = build(name)
    return _moved(Case(made.model, (), dict(made.inputs), None))


def with_loss(case: Case) -> Case:
    """The case with its loss inside of the module."""
    return Case(WithLoss(case), case.args, case.kwargs, None)


def peaks_off(case: Case, step: TrainingStep, plans: Iterable[Plan]) -> list[tuple[int, int]]:
    """The measured and the predicted peak of each plan that has another than is predicted, to the granule.

    A prediction that does not round as the allocator does is off by more.
    """
    found = []
    for plan in plans:
        predicted = running_peak(step, plan) - step.graph.fixed_bytes
        run = measure.forward_backward(callable_of(case, step, plan), case.args, case.kwargs, case.loss)
        for _ in range(2):
            case.module.zero_grad()
            seen = measure.peak_memory(run, DEVICE).allocated_bytes
        if seen != pytest.approx(predicted, rel=0.01, abs=2048):
            found.append((seen, predicted))
    return found
