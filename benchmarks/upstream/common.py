"""What the programs share: a step under torch's own budget and by a tagged plan, its peak and its gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch
from torch import nn

from benchmarks.models.subject import Around
from benchmarks.tags.models import tagged
from remat.profiling.measure import peak_memory

logging.getLogger("torch").setLevel(logging.ERROR)
NEEDS_CUDA = "needs CUDA, not run"


class Step(NamedTuple):
    """What a step leaves: the gradients of the input and of all parameters, and its peak above what was there."""

    gradients: tuple[torch.Tensor, ...]
    peak_bytes: int


class WithLoss(Around):
    """A model with its loss, the mean square of its output, so that a plan is for all of the step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        loss: torch.Tensor = self.inner(x).square().mean()
        return loss


def step(model: nn.Module, call: Callable[..., Any] | None, x: torch.Tensor, seed: int = 0) -> Step:
    """Run a step twice from one seed: for its gradients, and for its peak; `call` gives the loss, None: plainly."""
    run = WithLoss(model) if call is None else call

    def given() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        return x.detach().clone().requires_grad_()

    first = given()
    run(first).backward()
    found = tuple(t.grad.clone() for t in (first, *model.parameters()) if t.grad is not None)
    second = given()
    return Step(found, peak_memory(lambda: run(second).backward()).peak_bytes)


def by_torch(model: nn.Module, x: torch.Tensor, budget: float, **settings: Any) -> Step:
    """A step under `activation_memory_budget`, with torch's kernels."""
    torch._dynamo.reset()
    with functorch.patch(activation_memory_budget=budget, **settings):
        return step(model, torch.compile(WithLoss(model), backend="aot_eager_decomp_partition", dynamic=False), x)


def by_tags(model: nn.Module, x: torch.Tensor, peak_bytes: int) -> Step:
    """A step by a tagged plan within a peak above parameters and inputs."""
    torch._dynamo.reset()
    return step(model, tagged(WithLoss(model), peak_bytes, 5)[0], x)


def error(one: Step, other: Step) -> float:
    """The largest difference of a gradient, over the norm of that gradient."""
    pairs = zip(one.gradients, other.gradients, strict=True)
    return max(float((a - b).norm() / a.norm().clamp_min(1e-30)) for a, b in pairs)


def mib(size: int) -> str:
    """Bytes in MiB."""
    return f"{size / 2**20:.2f} MiB"


def concluded(torch_fails: bool, ours_holds: bool) -> int:
    """The last line of a program, and its exit code."""
    told = f"torch {torch.__version__}: the report is {'open' if torch_fails else 'no longer true'}"
    print(f"{told}; the tagged plan {'is right' if ours_holds else 'FAILS'}")
    return 0 if torch_fails and ours_holds else 1
