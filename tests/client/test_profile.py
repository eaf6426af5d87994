"""What a kernel really allocates is what the plan counts for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
from client.small_models import Mlp, numbers
from remat import _compat
from remat.capture.dataflow import dataflow, tensors
from remat.capture.trace import capture
from remat.profiling import profile
from remat.training.step import training_step


class WithLoss(nn.Module):
    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.loss = Mlp(16), loss

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(self.inner(x).sigmoid(), target)


@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.binary_cross_entropy,
        F.soft_margin_loss,
        partial(F.kl_div, reduction="batchmean"),
        F.poisson_nll_loss,
        F.cross_entropy,
    ],
)
def test_a_kernel_allocates_what_is_counted_for_it(loss: Callable[..., torch.Tensor]) -> None:
    captured = capture(WithLoss(loss), (numbers(8, 16), numbers(8, 16).sigmoid()), {})
    flow = dataflow(captured.joint, captured.forward_outputs)
    with _compat.only_real_tensors(), torch.no_grad():
        for node in flow.kernels:
            real = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors(profile._call(node)())}
            assert sorted(real.values()) == sorted(flow.sizes[s] for s in flow.makes[node]), node


@torch.library.custom_op("remat_tests::above_one", mutates_args=())
def above_one(x: torch.Tensor) -> torch.Tensor:
    if not bool((x > 1).all()):
        raise RuntimeError("all of x must be above one")
    return x - 1


@above_one.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_kernel_that_refuses_made_up_numbers_is_named() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mlp(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(above_one(x)).square().mean()

    with pytest.raises(remat.CaptureError, match=r"above_one.*made-up inputs: all of x"):
        training_step(Picky(), (numbers(4, 16).abs() + 2,), {})
