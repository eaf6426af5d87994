"""What CUDA does otherwise than the CPU, faults included, and what the client does about it: rows of docs/device.md."""

from __future__ import annotations

import copy
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from client.comparing import step_differences
from client.small_models import numbers
from gpu.parts import Everything
from remat.batch.largest import LargestBatch
from remat.chains import saved_state
from remat.chains.profile import chain_of
from remat.chains.training import carry_out_chain, segments_plan
from remat.device import of
from remat.lowering.link import link_of, storable
from remat.planning.budget import Budget
from remat.profiling import inputs, measure, timing
from remat.profiling.optimizers import update_memory
from remat.training.step import training_step
from remat_ir import Answer, Problem
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


class LibrarysLSTM(nn.LSTM):
    """Dropout between its layers draws from a state of its own, which the generator seeds once that has been set."""

    own = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if device.generator_is_fresh():
            LibrarysLSTM.own = torch.Generator().manual_seed(int(torch.randint(2**40, (), device=x.device)))
        kept = (torch.rand(x.shape, generator=LibrarysLSTM.own) > self.dropout).to(x.device)
        return torch.tanh(x * kept @ self.weight_ih_l0)


class Tells(nn.Module):
    """Tells its input each time that it runs; a list of its own would be put back after a second run."""

    def __init__(self, tell: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.tell = tell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tell(x.detach().clone())
        return x.square()


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


def runs_of_an_lstm() -> list[torch.Tensor]:
    """What its first run gave, and its second one in the backward pass."""
    seen: list[torch.Tensor] = []
    stages = [nn.Sequential(LibrarysLSTM(8, 2, num_layers=2, dropout=0.5), Tells(seen.append)), nn.GELU(), Mean()]
    stages = [stage.to(DEVICE) for stage in stages]
    x = numbers(4, 8).to(DEVICE).requires_grad_()
    chain, needs_grad = chain_of(stages, x)
    problem = Problem(chain, 2**40)
    answer = Answer.of_plan(problem, segments_plan(3, 2), method="given")
    trained = carry_out_chain(stages, problem, answer, needs_grad)
    stages[0](x)  # a step before this one: the state has been seeded, and has moved on
    seen.clear()
    trained(x).backward()
    return seen


def test_dropout_with_a_state_of_its_own_is_seeded_before_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the masks of the second run are others than those of the first: wrong gradients without a word."""
    first, second = runs_of_an_lstm()
    assert torch.equal(first, second)
    monkeypatch.setattr(saved_state, "draws_apart", lambda *_: False)
    first, second = runs_of_an_lstm()
    assert not torch.equal(first, second)


def test_out_of_memory_while_a_kernel_is_measured_is_no_failure_to_capture() -> None:
    model, x = Wide().to(DEVICE), torch.randn(4096, 256).to(DEVICE)
    device.empty_cache()
    with (
        device.limited(device.figures().reserved + 20 * MIB),
        pytest.raises(torch.OutOfMemoryError, match="does not fit into what is left of cuda:0"),
    ):
        remat.optimize(model, (x,), budget=remat.Fraction(0.7), planner="greedy", on_failure="plain")


def largest(budget: Budget) -> LargestBatch:
    torch.manual_seed(0)
    return remat.max_batch(
        lambda: Wide(2, 64, 256).to(DEVICE),
        lambda batch: torch.randn(batch, 64, device=DEVICE),
        budget,
        0.4,
        planner="greedy",
        multiple_of=128,
        limit=4096,
        precision=0.1,
        most_tries=4,
        time_limit_s=1,
    )


def test_the_largest_batch_leaves_room_for_what_libraries_keep_and_ends_at_the_device() -> None:
    """A library's workspace is taken once by each thread, the caller's and autograd's, whatever the batch."""
    plain = largest(remat.ActivationBytes(6 * MIB))
    assert plain.batch >= 512
    with device.library_workspace(8 * MIB):
        found = largest(remat.ActivationBytes(6 * MIB + 16 * MIB))
    assert 16 * MIB < found.measured_bytes <= found.budget_bytes
    assert abs(found.batch - plain.batch) <= 0.15 * plain.batch
    device.empty_cache()
    with device.limited(device.figures().reserved + 16 * MIB):
        found = largest(2**40)
    assert any("ran out of memory" in tried.why for tried in found.tries)
    assert found.batch < 4096


def test_what_is_asked_for_is_told_from_blocks_that_were_not_split() -> None:
    def run() -> torch.Tensor:
        return torch.empty(19 * MIB, dtype=torch.uint8, device=DEVICE)

    device.empty_cache()
    found = measure.peak_memory(run, DEVICE)
    assert (found.peak_bytes, found.left_bytes, found.allocated_bytes) == (19 * MIB, 19 * MIB, 20 * MIB)


def test_times_are_those_of_a_device_that_is_at_work_and_whose_cache_is_full() -> None:
    issued: list[str] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if str(func) == "aten.add_.Tensor":
                assert args[0].device == DEVICE
                issued.append("fill")
            return func(*args, **(kwargs or {}))

    with Noted():
        timing.times({"kernel": lambda: lambda: issued.append("kernel")}, {"kernel": of(DEVICE)})
    one = ["kernel"] * 3 + [*["fill"] * timing.FILLS, "kernel"] * 10
    assert issued in (one * timing.ROUNDS, one * 2 * timing.ROUNDS), "more of them where samples lie apart"


@pytest.mark.parametrize("name", ["mlp_with_dropout", "tied_weights"])
def test_a_graph_of_kernels_is_no_place_for_generators_nor_for_the_first_steps_check(name: str) -> None:
    case = subject(name)
    planned = remat.optimize(case.module, case.args, case.kwargs, budget=2**40, planner=Everything())
    loss = case.loss or measure.loss_of
    with device.capturing():
        found = loss(planned(*case.args, **case.kwargs)).sum()
        if "dropout" in name:
            with pytest.raises(RuntimeError, match=r"computes .* again, and no generator can be set while cuda:0"):
                found.backward()
        else:
            found.backward()
    assert not remat.plans_of(planned).peaks, "nothing was watched"


def test_pinned_blocks_are_counted_as_the_host_gives_them() -> None:
    link = link_of(DEVICE)
    storages = [torch.empty(size, dtype=torch.uint8, device=DEVICE).untyped_storage() for size in (1000, 4096, 5000)]
    copies, token = link.out(storages)
    link.wait(token)
    assert copies.size_bytes == 1024 + 4096 + 8192
    assert storable(DEVICE, 1000) == 500
    assert storable(torch.device("cpu"), 1000) == 1000
    assert storable(DEVICE, None) is None


FOREACH: list[tuple[type[torch.optim.Optimizer], dict[str, object]]] = [
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.AdamW, {"amsgrad": True, "foreach": False}),
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.NAdam, {"weight_decay": 0.1}),
]


@pytest.mark.parametrize(("kind", "settings"), FOREACH)
def test_an_optimizers_own_step_is_foreseen(kind, settings) -> None:  # type: ignore[no-untyped-def]
    """Without a word torch works on all parameters of a device together, and copies them."""
    model = Wide().to(DEVICE)
    optimizer = kind(model.parameters(), lr=1e-3, **settings)
    foreseen = update_memory(optimizer).temporaries_bytes
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = measure.peak_memory(optimizer.step, DEVICE)
    assert found.peak_bytes == pytest.approx(foreseen, rel=0.02, abs=4096)


def test_a_budget_that_the_optimizer_alone_exceeds_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Wide().to(DEVICE), torch.randn(8, 256).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters())
    remat.optimize(model, (x,), budget=remat.ActivationBytes("13MiB"), planner="greedy", optimizer=optimizer)
    assert "the optimizer's own step needs 30." not in caplog.text
    remat.disable(model)
    remat.optimize(model, (x,), budget=remat.ActivationBytes("8MiB"), planner="greedy", optimizer=optimizer)
    assert "the optimizer's own step needs 30." in caplog.text
    assert "fused=True" in caplog.text


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
    assert step_differences(model, planned, (x,)) == []
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
