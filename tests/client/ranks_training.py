"""What the cases of two ranks train, and how."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import remat
from remat_ir import RematError

FRACTION = remat.Fraction(0.85)
WIDE = 288  # six such layers are beyond the MiB of DDP's first bucket


class Block(nn.Module):
    """Three layers with dropout."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + x


def blocks(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


def data(step: int, rows: int = 64, width: int = 32) -> torch.Tensor:
    """Every rank has its own."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def trained(
    model: nn.Module, call: nn.Module, steps: int = 3, accumulate: bool = False, rows: int = 64, width: int = 32
) -> list[float]:
    """Losses and the norm of all that was learned, after a few steps of SGD; with `no_sync` every other step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        alone = accumulate and step % 2 == 0
        with call.no_sync() if alone else nullcontext():  # type: ignore[operator]
            loss = call(data(step, rows, width)).square().mean()
            loss.backward()
        found.append(loss.item())
        if not alone:
            optimizer.step()
            optimizer.zero_grad()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found.append(float(whole.detach().double().square().sum()))
    return found


def message(run: Callable[[], Any]) -> str:
    """The name and the message of what a call raises."""
    try:
        run()
    except (RematError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
