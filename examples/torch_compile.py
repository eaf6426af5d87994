"""torch.compile with remat's backend: Dynamo's guards, remat's plans."""

import torch
from torch import nn

import remat


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)))
    backend = remat.backend(budget=remat.Fraction(0.6))
    compiled = torch.compile(model, backend=backend)
    for step in range(3):
        loss = compiled(torch.randn(512, 256)).square().mean()
        loss.backward()
        print(f"step {step}: loss {loss.item():.4f}")
    for answer in backend.answers:
        print(f"planned: overhead {answer.overhead:.2%}, gap {answer.gap:.2%}")


if __name__ == "__main__":
    main()
