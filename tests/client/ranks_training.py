"""What the cases of two ranks train, and how."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transferring import traced_peak

import remat
from remat.profiling import measure
from remat.training.enable import backend_of, plans_of
from remat_ir import RematError, host_peak

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
    model: nn.Module,
    call: nn.Module,
    steps: int = 3,
    accumulate: bool = False,
    rows: int = 64,
    width: int = 32,
    inputs: int = 1,
) -> list[float]:
    """Losses and the norm of all that was learned, after a few steps of SGD; with `no_sync` every other step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        alone = accumulate and step % 2 == 0
        with call.no_sync() if alone else nullcontext():
            loss = call(*(data(step + 7 * at, rows, width) for at in range(inputs))).square().mean()
            loss.backward()
        found.append(loss.item())
        if not alone:
            optimizer.step()
            optimizer.zero_grad()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found.append(float(whole.detach().double().square().sum()))
    return found


def compared(plain: nn.Module, planned: nn.Module, train: Callable[[nn.Module], list[float]]) -> dict[str, Any]:
    """What a module trains without a plan and by one, which is that of planned stages or of an enabled module."""
    found = {"plain": train(plain), "planned": train(planned)}
    answer = planned.answer if hasattr(planned, "answer") else next(iter(plans_of(planned).plans)).answer
    return {**found, "overhead": answer.overhead, "digest": answer.digest}


def message(run: Callable[[], Any]) -> str:
    """The name and the message of what a call raises."""
    try:
        run()
    except (RematError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def unreduced() -> dict[str, Any]:
    """Two micro-steps of sharded blocks without a reduction: the bytes of gradients that their plans count."""
    model = blocks()
    for block in model:
        remat.enable(block, budget="1MiB", planner="greedy", ranks=True, self_check=False)
        fully_shard(block)
    fully_shard(model)
    whole = [sum(p.numel() * p.element_size() for p in block.parameters()) for block in model]
    model.set_requires_gradient_sync(False)
    for step in range(2):
        model(data(step)).square().mean().backward()
    plans = [[p.step.fixed["gradients"] for p in plans_of(block).plans if p] for block in model]
    return {"whole": whole, "counted": plans}


def buckets() -> dict[str, Any]:
    """What a plan inside DDP counts for its buckets, for gradients apart from them and for views."""
    found: dict[str, Any] = {}
    for views in (False, True):
        model = blocks()
        remat.enable(model, budget="2MiB", planner="greedy", ranks=True, self_check=False)
        call = DistributedDataParallel(model, gradient_as_bucket_view=views)
        for step in range(3):
            call(data(step)).square().mean().backward()
        found[str(views)] = [dict(p.step.fixed) for p in plans_of(model).plans if p]
        found["size"] = sum(p.numel() * p.element_size() for p in model.parameters())
    return found


def sharded_budget(planner: Any = "greedy", share: float = 0.7, **fields: Any) -> dict[str, Any]:
    """One budget for four units of two kinds, divided over sharded blocks; a real step's peak next to it."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        made = nn.Sequential(*(Block() for _ in range(3)), nn.Sequential(nn.Linear(32, 64), nn.Tanh()))
        for unit in made:
            fully_shard(unit)
        fully_shard(made)
        return made

    plain, planned = model(), model()
    step = measure.forward_backward(plain, (data(0, 512),), loss=lambda y: y.square().mean())
    needs = [measure.peak_memory(step).peak_bytes for _ in range(2)][-1]
    plain.zero_grad()
    remat.enable(nn.ModuleList(planned), budget=remat.Fraction(share), planner=planner, ranks=True, **fields)
    step = measure.forward_backward(planned, (data(0, 512),), loss=lambda y: y.square().mean())
    for _ in range(4):
        step()
        planned.zero_grad()
    peak = measure.peak_memory(step).peak_bytes
    host = traced_peak(step)
    planned.zero_grad()
    division = backend_of(planned[0]).division
    chosen = backend_of(planned[0]).shared.chosen()
    return {
        "plain": trained(plain, plain, rows=512),
        "planned": trained(planned, planned, rows=512),
        "overhead": division.overhead,
        "calls": division.calls,
        "digest": [str(division), *(str(plan.to_json()) for _, plan in chosen)],
        "share": peak / needs,
        "over": peak - division.allowed_bytes,
        "host": [host, sum(host_peak(each.graph, plan) for each, plan in chosen)],
    }
