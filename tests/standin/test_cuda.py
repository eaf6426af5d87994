"""What CUDA does otherwise than the CPU, and what the client does about it: rows of docs/device.md."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from client.small_models import numbers
from gpu.parts import Everything
from remat.batch.largest import LargestBatch
from remat.chains import saved_state
from remat.chains.profile import chain_of
from remat.chains.training import carry_out_chain, segments_plan
from remat.device import of
from remat.lowering.link import link_of, storable
from remat.planning.budget import Budget
from remat.profiling import measure, timing
from remat.profiling.optimizers import update_memory
from remat_ir import Answer, Problem
from standin import device
from standin.movable import DEVICE, MIB, subject
from standin.test_faults import Wide

pytestmark = pytest.mark.standin


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
