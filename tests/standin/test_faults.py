"""Faults that a device has and the CPU has not, injected: what the client does then."""

from __future__ import annotations

import copy
import logging
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.profiling import inputs, measure
from remat.training.step import training_step
from standin import device
from standin.attention import SegmentationFault
from standin.movable import DEVICE, MIB, subject

pytestmark = pytest.mark.standin


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
    case = subject("attention_with_dropout")
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
    planned = remat.optimize(copy.deepcopy(model), (x,), budget=remat.Fraction(0.7), planner="greedy")
    plain = measure.outcome(model, measure.forward_backward(model, (x,)))
    found = measure.outcome(planned, measure.forward_backward(planned, (x,)))
    assert measure.differences(plain, found) == []
    (peak,) = remat.plans_of(planned).peaks.values()
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


class Words(nn.Module):
    """Sums of many gradients for each row of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(4, 64), nn.Linear(64, 64)
        self.register_buffer("targets", torch.randn(4096, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (nn.functional.gelu(self.head(self.table(x))) - self.targets).square().mean()


def test_sums_of_atomic_additions_differ_from_run_to_run(patched_kernels: torch.library.Library) -> None:
    """As without a plan; under deterministic algorithms bits are equal, the plan's too."""

    def backward(gradient: Any, indices: Any, rows: int, padding: int, scale: bool) -> Any:
        gradient, indices = gradient.cpu().flatten(0, -2), indices.cpu().flatten()
        if not torch.are_deterministic_algorithms_enabled():
            order = random.sample(range(len(indices)), len(indices))
            gradient, indices = gradient[order], indices[order]
        return torch.zeros(rows, gradient.shape[-1]).index_add_(0, indices, gradient).to(DEVICE)

    patched_kernels.impl("embedding_dense_backward", backward, "CUDA")
    torch.manual_seed(0)
    model, x = Words().to(DEVICE), torch.randint(4, (4096,)).to(DEVICE)
    planned = remat.optimize(copy.deepcopy(model), (x,), budget=remat.Fraction(0.7), planner="greedy")

    def table(run: Any) -> torch.Tensor:
        found = measure.outcome(run, measure.forward_backward(run, (x,))).gradients["table.weight"]
        assert found is not None
        return found

    several = [table(model) for _ in range(5)]
    spread = max(float((one - several[0]).abs().max()) for one in several)
    assert spread > 0
    assert float((table(planned) - several[0]).abs().max()) <= 2 * spread
    torch.use_deterministic_algorithms(True)
    try:
        plain = table(model)
        assert torch.equal(plain, table(model))
        assert torch.equal(plain, table(planned))
    finally:
        torch.use_deterministic_algorithms(False)


TRIED = 24 * MIB
"""What the largest of the algorithms that are tried out takes."""


def test_each_thread_tries_convolutions_out_by_itself(
    patched_kernels: torch.library.Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller's while kernels are measured, autograd's in the first step: that is over what the plan comes to."""
    tried = set[Any]()

    def algorithm(kind: str, x: torch.Tensor) -> None:
        key = kind, threading.get_ident(), tuple(x.shape)
        if torch.backends.cudnn.benchmark and key not in tried:
            tried.add(key)
            torch.empty(TRIED, dtype=torch.uint8, device=DEVICE)

    def forward(x: Any, w: Any, b: Any, *how: Any) -> Any:
        algorithm("forward", x)
        return torch.ops.aten.convolution(x.cpu(), w.cpu(), None if b is None else b.cpu(), *how).to(DEVICE)

    def backward(g: Any, x: Any, w: Any, *how: Any) -> Any:
        algorithm("backward", x)
        found = torch.ops.aten.convolution_backward(g.cpu(), x.cpu(), w.cpu(), *how)
        return tuple(None if t is None else t.to(DEVICE) for t in found)

    patched_kernels.impl("convolution", forward, "CUDA")
    patched_kernels.impl("convolution_backward", backward, "CUDA")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU()) for _ in range(3))).to(DEVICE)
    x = torch.randn(4, 8, 32, 32, device=DEVICE)
    with caplog.at_level(logging.WARNING, "remat"):
        planned = remat.optimize(model, (x,), budget=remat.Fraction(0.9), planner="greedy", self_check=False)
    assert "cudnn.benchmark is on" in caplog.text
    (made,) = remat.plans_of(planned).plans
    step = measure.forward_backward(planned, (x,), loss=lambda y: y.square().mean())
    first, second = (measure.peak_memory(step, DEVICE).peak_bytes for _ in range(2))
    assert first > made.activation_bytes + TRIED // 2
    assert second < first - TRIED // 2
