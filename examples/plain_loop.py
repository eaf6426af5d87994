"""A plain training loop inside a memory budget."""

import torch
from torch import nn

import remat


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)), nn.Linear(256, 10))
    batch, target = torch.randn(512, 256), torch.randint(0, 10, (512,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    remat.optimize(model, (batch,), budget=remat.Fraction(0.6), optimizer=optimizer)
    for step in range(3):
        loss = nn.functional.cross_entropy(model(batch), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
