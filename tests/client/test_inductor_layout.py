"""Layouts and fusion under Inductor: what reads memory by strides of its own, and kernels where the plan has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._guards import TracingContext, tracing
from torch._inductor.choices import InductorChoices
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from remat import CaptureError
from remat._compat.inductor import Generated, alone, channels_last_cat, dry_run, stored
from remat._compat.inductor.code import input_strides
from remat._compat.inductor.compiling import PlanOrder, fusing
from remat.compile.inductor.joint import without_strides


def generated(
    step: Callable[..., Any], *sizes: tuple[int, ...], results: int = 1, choices: InductorChoices | None = None
) -> Generated:
    """What Inductor makes of a function of tensors of these sizes, as the forward pass of a partition; not compiled."""

    def forward_pass(*given: torch.Tensor) -> Any:
        found = step(*given)
        return found if isinstance(found, tuple) else (found,)

    mode = FakeTensorMode()
    with mode:
        forward = make_fx(forward_pass)(*(torch.empty(size) for size in sizes))
        backward = make_fx(lambda *given: given)(*(torch.empty(1) for _ in range(results)))
    with tracing(TracingContext(mode)), fusing(choices or PlanOrder()):
        return dry_run(forward, backward, results)[0]


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


def step(mask: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two kernels that read the same, and between them what only the second waits for."""
    early = (mask * 2).sum(0)
    awaited = x @ x @ x
    return early, (mask * awaited).sum(0)


def order(code: Generated) -> list[str]:
    """The operator that each allocation is made for, in the order of the code."""
    last = [event.origins[-1].target for event in code.events if event.kind == "alloc"]
    return [str(target).split(".")[1] for target in last]


@pytest.mark.thorough
def test_a_fusion_does_not_pull_others_out_of_the_plans_order() -> None:
    """Inductor itself would run both products first, and hold what is awaited in vain until then."""
    found = [order(generated(step, (64, 64), (64, 64), results=2, choices=c)) for c in (InductorChoices(), PlanOrder())]
    assert found[0] == ["mm", "mm", "sum", "sum"], "Inductor's own choice has changed"
    assert found[1] == ["sum", "mm", "mm", "sum"]


@pytest.mark.thorough
def test_sums_beside_convolutions_stay_together() -> None:
    """Their kernel decides how the rest of a vector is summed: apart they would not be plain Inductor's bit for bit."""

    def beside(mask: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        early = (mask * 2).sum((0, 2, 3))
        return early, (mask * F.conv2d(x, w)).sum((0, 2, 3))

    image = (2, 8, 16, 16)
    found = [
        order(generated(beside, image, image, (8, 8, 1, 1), results=2, choices=choices))
        for choices in (InductorChoices(), PlanOrder())
    ]
    assert found[1] == found[0]
    assert found[1][-2:] == ["sum", "sum"]
