"""Train with gradients that are never all there: each parameter is updated inside the backward pass.

    python examples/release_gradients.py

The loop stays as it is. What it leaves behind is compared with what it leaves behind without a plan.
"""

import copy

import torch
from torch import nn

import remat
from remat.profiling.measure import peak_memory

torch.manual_seed(0)
layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256))]
model = nn.Sequential(*layers, nn.Linear(256, 1))
plain = copy.deepcopy(model)
batches = [torch.randn(32, 256) for _ in range(4)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The bytes that the last step needs at most beyond parameters and optimizer state."""
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)

    def step(x: torch.Tensor) -> None:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    for x in batches[:-1]:
        step(x)
    return peak_memory(lambda: step(batches[-1])).peak_bytes


optimizer = torch.optim.AdamW(model.parameters(), fused=True)
remat.enable(model, budget="60%", optimizer=optimizer, release_gradients=True)
released = train(model, optimizer)
needed = train(plain, torch.optim.AdamW(plain.parameters(), fused=True))

same = all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
gradients = sum(p.numel() * p.element_size() for p in plain.parameters())
print(f"gradients alone {gradients / 2**20:.2f} MiB, a step needs {needed / 2**20:.2f} → {released / 2**20:.2f} MiB")
print(f"the same parameters, bit for bit: {same}")
