"""An Accelerate loop: enable plans before `prepare`."""

import torch
from accelerate import Accelerator
from torch import nn

import remat


def train(budget: "remat.Fraction | None") -> list[float]:
    """Losses of three steps, without a plan or by one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1)) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(1536, 64)), batch_size=512)

    if budget is not None:
        remat.enable(model, budget=budget, optimizer=optimizer)
    accelerator = Accelerator(cpu=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for (batch,) in data:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    plain, planned = train(None), train(remat.Fraction(0.7))
    print("plain  ", plain)
    print("planned", planned)
    assert plain == planned, "the losses must be equal"


if __name__ == "__main__":
    main()
