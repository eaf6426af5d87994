"""Fusion under plans: kernels run where the plan has them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.choices import InductorChoices

from client.dry import generated
from remat._compat.inductor import Generated
from remat._compat.inductor.compiling import PlanOrder


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
