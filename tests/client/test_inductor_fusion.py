"""Fusion under plans: kernels run where the plan has them, and regions know the kernels that they run in."""

from __future__ import annotations

import torch
from torch._guards import TracingContext, tracing
from torch._inductor.choices import InductorChoices
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from remat._compat_inductor import Generated, dry_run
from remat._compat_inductor.fusion import PlanOrder, fusing


def step(mask: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two kernels that read the same, and between them what only the second waits for."""
    early = (mask * 2).sum(0)
    awaited = x @ x @ x
    return early, (mask * awaited).sum(0)


def generated(choices: InductorChoices) -> Generated:
    """What Inductor makes of the step by these choices, as the forward pass of a partition."""
    mode = FakeTensorMode()
    with mode:
        given = torch.empty(64, 64), torch.empty(64, 64)
        forward = make_fx(step)(*given)
        backward = make_fx(lambda a, b: (a + b,))(torch.empty(64), torch.empty(64))
    with tracing(TracingContext(mode)), fusing(choices):
        return dry_run(forward, backward, 2)[0]


def order(code: Generated) -> list[str]:
    """The operator that each allocation is made for, in the order of the code."""
    last = [event.origins[-1].target for event in code.events if event.kind == "alloc"]
    return [str(target).split(".")[1] for target in last]


def test_a_fusion_does_not_pull_others_out_of_the_plans_order() -> None:
    """Inductor itself would run both products first, and hold what is awaited in vain until then."""
    assert order(generated(InductorChoices())) == ["mm", "mm", "sum", "sum"], "Inductor's own choice has changed"
    assert order(generated(PlanOrder())) == ["sum", "mm", "mm", "sum"]
