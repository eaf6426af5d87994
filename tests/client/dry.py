"""The code that Inductor would generate for a function, no kernel compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._inductor.choices import InductorChoices
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from remat._compat.inductor import Generated, dry_run
from remat._compat.inductor.compiling import PlanOrder, fusing


def generated(
    step: Callable[..., Any], *sizes: tuple[int, ...], results: int = 1, choices: InductorChoices | None = None
) -> Generated:
    """What Inductor makes of a function of tensors of these sizes, as the forward pass of a partition."""

    def forward_pass(*given: torch.Tensor) -> Any:
        found = step(*given)
        return found if isinstance(found, tuple) else (found,)

    mode = FakeTensorMode()
    with mode:
        forward = make_fx(forward_pass)(*(torch.empty(size) for size in sizes))
        backward = make_fx(lambda *given: given)(*(torch.empty(1) for _ in range(results)))
    with tracing(TracingContext(mode)), fusing(choices or PlanOrder()):
        return dry_run(forward, backward, results)[0]
