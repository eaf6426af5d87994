"""Faults that a device has and the CPU has not, injected: what the client does then."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import remat
from client.small_models import CASES
from remat.profiling import inputs, measure
from remat.training.step import training_step
from standin import device
from standin.attention import SegmentationFault
from standin.movable import moved

pytestmark = pytest.mark.standin
DEVICE = torch.device("cuda:0")
MIB = 2**20


class Wide(nn.Module):
    def __init__(self, blocks: int = 3, width: int = 256, hidden: int = 1024) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@pytest.fixture
def patched_kernels() -> Iterator[torch.library.Library]:
    library = torch.library.Library("aten", "IMPL")
    yield library
    library._destroy()


def test_seeds_that_lie_on_the_host_are_profiled_there(monkeypatch: pytest.MonkeyPatch) -> None:
    case = moved(CASES["attention_with_dropout"](), DEVICE)
    step = training_step(case.module, case.args, case.kwargs)
    targets = {str(node.target) for node in step.operations.flow.kernels}
    assert "aten._scaled_dot_product_efficient_attention_backward.default" in targets
    monkeypatch.setattr(inputs, "_on_host", lambda node: False)
    with pytest.raises(SegmentationFault, match="the host reads both"):
        training_step(case.module, case.args, case.kwargs)


def test_a_plan_on_the_second_device_is_measured_there() -> None:
    there = torch.device("cuda:1")
    model, x = Wide().to(there), torch.randn(512, 256).to(there)
    device.forget_peaks(0)
    first = device.figures(0)
    planned = remat.optimize(model, (x,), budget=remat.Fraction(0.7), planner="greedy")
    plain = measure.outcome(model, measure.forward_backward(model, (x,)))
    found = measure.outcome(planned, measure.forward_backward(planned, (x,)))
    assert measure.differences(plain, found) == []
    (peak,) = planned.peaks.values()
    assert peak.as_predicted
    assert device.figures(0) == first, "nothing was allocated on the current device"


def test_batch_normalization_of_cudnn_is_not_in_a_plan(patched_kernels: torch.library.Library) -> None:
    """Eager batch normalization is cuDNN's; the captured step has ATen's own, as aot_eager has."""
    calls: Counter[str] = Counter()

    def forward(x: Any, w: Any, b: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float) -> Any:
        calls["forward"] += 1
        found = torch.ops.aten.native_batch_norm(x, w, b, mean, var, training, momentum, eps)
        return (*found, torch.empty(0, dtype=torch.uint8, device=x.device))

    def backward(x: Any, g: Any, w: Any, mean: Any, var: Any, sm: Any, si: Any, eps: float, _: Any) -> Any:
        calls["backward"] += 1
        return torch.ops.aten.native_batch_norm_backward(g, x, w, mean, var, sm, si, True, eps, [True, True, True])

    patched_kernels.impl("cudnn_batch_norm", forward, "CUDA")
    patched_kernels.impl("cudnn_batch_norm_backward", backward, "CUDA")
    model = nn.Sequential(nn.BatchNorm2d(3), nn.GELU(), nn.Flatten(), nn.Linear(192, 1), nn.Flatten(0)).to(DEVICE)
    x = torch.randn(4, 3, 8, 8, device=DEVICE)
    with device.cudnn():
        model(x).sum().backward()
        assert calls == {"forward": 1, "backward": 1}
        calls.clear()
        planned = remat.optimize(copy.deepcopy(model), (x,), budget=remat.Fraction(1), planner="greedy")
        planned(x).sum().backward()
        compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
        compiled(x).sum().backward()
        assert not calls, "neither the plan nor aot_eager runs cuDNN's"
