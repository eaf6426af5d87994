"""Layouts under Inductor: what reads memory by strides of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from client.dry import generated
from remat import CaptureError
from remat._compat.inductor import alone, channels_last_cat, stored
from remat._compat.inductor.code import input_strides
from remat.compile.inductor.joint import without_strides


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


@pytest.mark.thorough
def test_strides_that_mean_something_else_are_refused_beside_convolutions() -> None:
    with pytest.raises(CaptureError, match="strides of its own"):
        without_strides(traced([8, 16], [32, 2]))


@pytest.mark.thorough
def test_other_operators_that_know_no_layout_are_refused_too() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        made = F.conv2d(x, w) * 2
        return torch.as_strided_scatter(made, torch.ones(8, 16), [8, 16], [32, 2])

    joint = make_fx(step, tracing_mode="fake")(torch.randn(8, 16, 3, 3), torch.randn(32, 16, 3, 3))
    with pytest.raises(CaptureError, match="strides of its own"):
        without_strides(joint)


SIZE = (2, 8, 16, 16)
CHANNELS_LAST = [16 * 16 * 16, 1, 16 * 16, 16]


@pytest.mark.thorough
@pytest.mark.parametrize(("cat", "largest"), [(torch.ops.aten.cat.default, 2), (channels_last_cat, 1)])
def test_what_is_stored_side_by_side_in_channels_last_is_no_copy(cat: Any, largest: int) -> None:
    """Inductor's own `cat` of what is not in memory yet is contiguous, and stored a second time."""

    def step(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(stored(cat([x.sin(), y.cos()], 1), CHANNELS_LAST), w)

    sizes = [event.size for event in generated(step, SIZE, SIZE, (4, 16, 1, 1)).events if event.kind == "alloc"]
    assert sizes.count(2 * 16 * 16 * 16 * 4) == largest


def test_channels_last_cat_is_cat() -> None:
    x, y = torch.randn(SIZE), torch.randn(SIZE)
    assert torch.equal(channels_last_cat([x, y], 1), torch.cat([x, y], 1))


@pytest.mark.thorough
def test_a_kernel_alone_reads_in_the_layouts_that_it_is_given() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w)

    joint = make_fx(step, tracing_mode="fake")(torch.randn(SIZE), torch.randn(4, 8, 3, 3))
    (kernel,) = (n for n in joint.graph.nodes if n.target is torch.ops.aten.convolution.default)
    given = (8 * 16 * 16, 1, 16 * 8, 8)
    assert input_strides(alone(kernel, (given, None))) == (given, (8 * 3 * 3, 3 * 3, 3, 1))
    assert input_strides(kernel) == ((8 * 16 * 16, 16 * 16, 16, 1), (8 * 3 * 3, 3 * 3, 3, 1))
