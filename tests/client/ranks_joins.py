"""Cases of two ranks that train branches which meet in a head: see `ranks_cases`."""

from typing import Any

import torch
import torch.distributed as dist
from ranks_training import FRACTION, compared, data, message
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import remat


class Distance(nn.Module):
    """The mean square of the difference of what two branches give."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x - y).square().mean()


def stages(count: int = 4, width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(count)))


class Plain(nn.Module):
    """Branches and their head without a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.branches, self.head = nn.ModuleList([stages(), stages()]), Distance()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.head(self.branches[0](x), self.branches[1](y))


def steps(model: nn.Module, rows: int = 256) -> list[float]:
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = wrapped(data(step, rows), data(step + 7, rows))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found + [float(p.detach().double().square().sum()) for p in model.parameters()]


def join_in_ddp() -> dict[str, Any]:
    """One graph on both ranks, though each measures its own times; the losses of plain training."""
    plain, planned = Plain(), Plain()
    inputs = [data(0, 256), data(1, 256)]
    joined = remat.optimize_chain(
        [list(b) for b in planned.branches],
        inputs,
        head=planned.head,
        budget=remat.Fraction(0.7),
        planner="local",
        ranks=True,
        time_limit_s=3.0,
    )
    return {
        **compared(plain, joined, steps),
        "costs": joined.graph.op_cost_ns,
        "plan": joined.answer.cost_ns,
    }


def join_refused() -> dict[str, Any]:
    """Ranks whose branches, sizes or budgets differ; the method is the join's own, which fails in no other place."""
    rank = dist.get_rank()

    def joined(count: int = 3, rows: int = 64, budget: Any = FRACTION, method: str = "join") -> Any:
        inputs = [data(0, rows), data(1, rows)]
        branches = [stages(count), stages(count)]
        return remat.optimize_chain(
            branches, inputs, head=Distance(), budget=budget, planner="local", ranks=True, method=method
        )

    return {
        "stages": message(lambda: joined(count=3 + rank)),
        "sizes": message(lambda: joined(rows=64 + 64 * rank)),
        "budgets": message(lambda: joined(budget=10**6 + rank)),
        "budgets, auto": message(lambda: joined(budget=10**6 + rank, method="auto")),
    }
