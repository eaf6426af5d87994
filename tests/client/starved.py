"""Run in a process of its own: a step that does not fit the address space that is left, without a plan and by a plan.

Prints the gradients' hash, or the reason why there are none. Arguments: "plain" or "planned"; MiB left, 0: no limit.
"""

from __future__ import annotations

import hashlib
import resource
import sys

import torch
from torch import nn

import remat

MIB = 2**20


class Deep(nn.Module):
    """Activations of 8 MiB a layer and a nonlinearity, twenty of each: 320 MiB that plain training keeps."""

    def __init__(self, layers: int = 20) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.square().mean()


def main(how: str, left: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    small = torch.randn(32, 128)
    warm = remat.optimize(Deep(2), (small,), budget=remat.Fraction(1), planner="greedy")
    warm(small).backward()  # libraries are loaded before the limit is set
    module, x = Deep(), torch.randn(16384, 128)
    if left:
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + left * MIB, now + left * MIB))
    run: nn.Module = module
    if how == "planned":
        run = remat.optimize(module, (x,), budget=remat.ActivationBytes(f"{left // 2}MiB"), planner="greedy")
    for _ in range(2):
        run(x).backward()
    found = hashlib.sha256(b"".join(p.grad.numpy().tobytes() for p in module.parameters() if p.grad is not None))
    print(found.hexdigest())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
