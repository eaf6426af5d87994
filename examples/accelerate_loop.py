"""An Accelerate loop: enable plans before `prepare`."""

import torch
from accelerate import Accelerator
from torch import nn

import remat


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(1536, 64)), batch_size=512)

    remat.enable(model, budget=remat.Fraction(0.7), optimizer=optimizer)
    accelerator = Accelerator(cpu=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for step, (batch,) in enumerate(data):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
