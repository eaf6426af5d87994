"""Layouts under Inductor: what reads memory by strides of its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from remat import CaptureError
from remat.inductor.layout import without_strides


def traced(size: list[int], stride: list[int]) -> fx.GraphModule:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        made = F.conv2d(x, w) * 2
        return torch.as_strided(made, size, stride).exp()

    return make_fx(step, tracing_mode="fake")(torch.randn(8, 16, 3, 3), torch.randn(32, 16, 3, 3))


def test_strides_that_mean_a_view_are_one() -> None:
    """Also where the tensor comes back in another layout, as what the forward pass saves does."""
    joint = traced([8, 32], [32, 1])
    x, w = torch.randn(8, 16, 3, 3), torch.randn(32, 16, 3, 3)
    expected = joint(x, w)
    without_strides(joint)
    assert not any(node.target is torch.ops.aten.as_strided.default for node in joint.graph.nodes)
    assert torch.equal(joint(x, w), expected)


def test_strides_that_mean_something_else_are_refused_beside_convolutions() -> None:
    with pytest.raises(CaptureError, match="strides of its own"):
        without_strides(traced([8, 16], [32, 2]))


def test_other_operators_that_know_no_layout_are_refused_too() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        made = F.conv2d(x, w) * 2
        return torch.as_strided_scatter(made, torch.ones(8, 16), [8, 16], [32, 2])

    joint = make_fx(step, tracing_mode="fake")(torch.randn(8, 16, 3, 3), torch.randn(32, 16, 3, 3))
    with pytest.raises(CaptureError, match="strides of its own"):
        without_strides(joint)
