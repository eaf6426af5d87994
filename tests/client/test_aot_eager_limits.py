"""Where stock aot_eager itself fails or differs from eager: refused by name or trained without a plan, and said so."""

from __future__ import annotations

import copy
import gc
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
from client.comparing import step_differences
from client.small_models import Case, module_of, numbers
from client.test_chain_training import MeanSquare
from client.test_exact import callable_of, everything_again, outcome
from client.test_zoo import stock_of
from remat._compat.versions import version
from remat.compile.alone import capture
from remat.errors import CaptureError
from remat.profiling import measure
from remat.training.step import training_step


def test_batch_norm_without_a_momentum_trains_as_without_a_plan() -> None:
    """Its cumulative average divides by a number that only the data know."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).relu().square().mean()

    plain = module_of(forward, conv=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(8, momentum=None))
    model, x = copy.deepcopy(plain), numbers(4, 3, 8, 8)
    remat.optimize(model, x, budget=remat.Fraction(1), planner="greedy")
    assert step_differences(plain, model, (x,)) == []


@pytest.mark.thorough
def test_other_strides_than_traced_are_refused_or_trained_plainly(caplog: pytest.LogCaptureFixture) -> None:
    """A U-Net, whose convolutions lay out an image of one differently than fake ones do before torch 2.15."""
    from diffusers import UNet2DModel

    def forward(self: Any, noisy: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.inner(noisy, when).sample, noisy)

    torch.manual_seed(0)
    inner = UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        attention_head_dim=8,
        dropout=0.1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    module, x = module_of(forward, inner=inner), (numbers(1, 3, 16, 16), torch.tensor([3]))
    stock_module = copy.deepcopy(module)
    trained = remat.optimize(copy.deepcopy(module), x, budget="100%", planner="greedy", on_failure="raise")
    if version() >= (2, 15):  # real tensors are laid out as the fake ones there, and the step is that of stock
        stock = torch.compile(module, backend="aot_eager")
        expected = measure.outcome(module, measure.forward_backward(stock, x))
        assert measure.differences(expected, measure.outcome(trained, measure.forward_backward(trained, x))) == []
        return
    with pytest.raises(CaptureError, match="do not lie in memory as the traced ones"):
        trained(*x)
    plain = remat.optimize(module, x, budget=remat.Fraction(1), planner="greedy")
    expected = measure.outcome(stock_module, measure.forward_backward(stock_module, x))
    with caplog.at_level(logging.WARNING, "remat"):
        found = measure.outcome(plain, measure.forward_backward(plain, x))
        assert measure.differences(expected, found) == []
        measure.outcome(plain, measure.forward_backward(plain, x))
    assert caplog.text.count("training runs without a plan") == 1


def test_autocast_around_a_layer_used_twice_is_that_of_stock() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.layer(self.layer(x).relu())
        return y.float().square().mean()

    torch.manual_seed(0)
    case = Case(module_of(forward, layer=nn.Linear(32, 32)), (numbers(16, 32),), {}, None)
    step = training_step(case.module, case.args, {})
    stock = outcome(case, stock_of(case, step))
    assert measure.differences(stock, outcome(case, callable_of(case, step, everything_again(step)))) == []
    eager = outcome(case, case.module)
    for name, gradient in stock.gradients.items():
        if gradient is not None:
            torch.testing.assert_close(gradient, eager.gradients[name], rtol=0.05, atol=1e-2)


def test_sparse_gradients_and_inputs_without_strides_are_refused_by_name() -> None:
    embedded = module_of(lambda self, x: self.inner(x).sum(), inner=nn.Embedding(8, 4, sparse=True))
    with pytest.raises(CaptureError, match=r"makes a sparse_coo tensor, .*use dense gradients \(sparse=False"):
        training_step(embedded, (torch.tensor([1, 2]),), {})
    sparse = torch.eye(4).to_sparse()
    with pytest.raises(CaptureError, match="argument 0 of this Linear is a sparse_coo tensor"):
        training_step(nn.Linear(4, 4), (sparse,), {})
    jagged = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    with pytest.raises(CaptureError, match="input of this Linear is a jagged tensor"):
        training_step(nn.Linear(4, 4), (), {"input": jagged})


def test_a_refusal_names_the_line_or_the_call() -> None:
    def chosen(self: Any, x: torch.Tensor) -> torch.Tensor:
        """How many numbers it gives only the data know."""
        return torch.masked_select(self.inner(x), x > 0).sum()

    def returned(self: Any, x: torch.Tensor) -> torch.Tensor:
        """Gives away a tensor that was made a leaf inside, which Dynamo refuses where the module returns."""
        made = torch.zeros_like(x).requires_grad_()
        return self.inner(x) + made

    x = (numbers(4, 4),)
    with pytest.raises(
        CaptureError, match=r"\(at client.test_aot_eager_limits.py, line \d+: return torch.masked_select"
    ):
        training_step(module_of(chosen, inner=nn.Linear(4, 4)), x, {})
    with pytest.raises(CaptureError, match=r"that had requires_grad_\(\) called on it"):  # torch has no line of it
        training_step(module_of(returned, inner=nn.Linear(4, 4)), x, {})


def test_memory_is_predicted_to_the_byte() -> None:
    """The seed of the backward pass is held to its end, functional writes to views copy whole storages, and a gradient
    of another layout is copied by way of a block."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """The gradient of a matrix comes transposed: it multiplies by its transpose on top of another one."""
        return (x @ torch.cat([self.one.t(), self.other])).square().mean()

    joined = module_of(forward, one=nn.Parameter(numbers(80, 64)), other=nn.Parameter(numbers(8, 80)))
    padded = nn.Sequential(nn.Conv3d(1, 2, 1), nn.CircularPad3d((1, 0, 2, 1, 0, 1)), MeanSquare())
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)), MeanSquare())
    for module, x in ((padded, numbers(2, 1, 4, 5, 6)), (layers, numbers(64, 32)), (joined, numbers(8, 72))):
        trained = remat.optimize(module, x, budget=remat.Fraction(1.0), planner="greedy", mode="graph")
        step = measure.forward_backward(trained, (x,))
        step()
        module.zero_grad()
        (planned,) = remat.plans_of(trained).plans
        assert measure.peak_memory(step).peak_bytes == planned.activation_bytes


@torch.library.custom_op("remat_tests::collecting", mutates_args=())
def collecting(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_the_collector_of_cycles_rests_while_a_step_is_traced_and_is_then_as_it_was() -> None:
    seen: list[bool] = []

    def fake(x: torch.Tensor) -> torch.Tensor:
        seen.append(gc.isenabled())
        return torch.empty_like(x)

    collecting.register_fake(fake)

    class Net(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            found = super().forward(input)
            return (found + collecting(found.detach())).sum()

    capture(Net(4, 4), (numbers(2, 4),), {})
    assert seen
    assert not any(seen)
    assert gc.isenabled()
    with pytest.raises(CaptureError):
        capture(Net(4, 4), (numbers(2, 3),), {})
    assert gc.isenabled()
    gc.disable()
    try:
        capture(Net(4, 4), (numbers(2, 4),), {})
        assert not gc.isenabled()
    finally:
        gc.enable()
