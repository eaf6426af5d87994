"""Cases of two ranks whose step has collectives, or is a stage of a pipeline: see `ranks_cases`."""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ranks_training import FRACTION, blocks, data, message, trained
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import remat
from remat.distributed.ranks import RankPlanner
from remat.profiling import timing
from remat.settings import settings
from remat.training.enable import plans_of

WIDTH = 32


class Copied(torch.autograd.Function):
    """The same on all ranks; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return summed(gradient)


class Reduced(torch.autograd.Function):
    """The sum of all ranks' tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def summed(x: torch.Tensor) -> torch.Tensor:
    return functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))


class Parallel(nn.Module):
    """A layer that is split by columns, one that is split by rows, and an all-reduce each way."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.gelu(self.up(Copied.apply(self.norm(x))))
        return x + Reduced.apply(x * 0.5) + nn.functional.gelu(Reduced.apply(self.down(inner)))


def parallel() -> nn.Sequential:
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(*(Parallel() for _ in range(3)))


def in_parallel(planner: Any = "greedy") -> dict[str, Any]:
    """Training with and without a plan, and what the plan makes of the collectives."""
    plain, planned = parallel(), parallel()
    remat.enable(planned, budget=remat.Fraction(0.6), planner=planner, mode="graph")
    found = {"plain": trained(plain, plain), "planned": trained(planned, planned)}
    made = next(iter(plans_of(planned).plans.values()))
    assert made is not None
    graph = made.step.graph
    reduced = [op for op in range(graph.ops) if graph.op_label(op).endswith("all_reduce)")]
    return {
        **found,
        "overhead": made.answer.overhead,
        "digest": made.answer.digest,
        "costs": [graph.op_cost_ns[op] for op in reduced],
        "once": [op in graph.once for op in reduced],
        "kernels": [len(made.step.operations.ops[op].nodes) for op in reduced],
    }


def cold_rank() -> dict[str, Any]:
    """Both ranks plan; then the second one has lost what it measured, and measures while the first one trains."""
    first = in_parallel()
    if dist.get_rank() == 1:
        shutil.rmtree(Path(settings().cache_dir))
    return {"first": first, "second": in_parallel()}


def slow_rank() -> dict[str, Any]:
    """The second rank takes fewer samples of each kernel than the first."""
    usual = timing.LONGEST_NS
    if dist.get_rank() == 1:
        timing.LONGEST_NS = 0
    try:
        return in_parallel(RankPlanner("greedy"))
    finally:
        timing.LONGEST_NS = usual


@torch.library.custom_op("remat_ranks::hidden", mutates_args=())
def hidden(x: torch.Tensor) -> torch.Tensor:
    """An operator whose name says nothing of the collective in it."""
    summed = x.clone()
    dist.all_reduce(summed)
    return summed


hidden.register_fake(torch.empty_like)
hidden.register_autograd(lambda ctx, gradient: hidden(gradient))


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + hidden(self.down(nn.functional.gelu(self.up(x))))


def hiding() -> nn.Sequential:
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(*(Hiding() for _ in range(3)))


def hidden_collective() -> dict[str, Any]:
    """One rank measures what the other knows; then each way in which the operator would be run to be measured."""
    plain, planned = hiding(), hiding()
    if dist.get_rank() == 1:
        shutil.rmtree(Path(settings().cache_dir), ignore_errors=True)
    remat.enable(planned, budget=remat.Fraction(0.75), planner="greedy", mode="graph")
    found = {"plain": trained(plain, plain), "planned": trained(planned, planned)}
    answer = next(iter(plans_of(planned).plans.values())).answer  # type: ignore[union-attr]
    budget, x = remat.Fraction(0.6), torch.randn(8, WIDTH)
    taken = remat.enable(hiding(), budget=budget, planner="greedy", functional_ops=("remat_ranks::hidden",))
    return {
        **found,
        "overhead": answer.overhead,
        "chain": message(lambda: remat.optimize_chain(hiding(), x, budget=budget, planner="greedy")),
        "functional": message(lambda: taken(x)),
    }


def stages_with_collectives() -> dict[str, Any]:
    """What is measured by running it must not speak with other ranks."""
    x = torch.randn(8, WIDTH)
    return {"said": message(lambda: remat.optimize_chain(parallel(), x, budget=remat.Fraction(0.6), planner="greedy"))}


def scheduled(module: nn.Module, steps: int = 2) -> list[float]:
    """The gradients' norms after each step of a schedule in which each rank runs one stage."""
    rank, found = dist.get_rank(), []
    stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=lambda y, target: (y - target).square().mean())
    for step in range(steps):
        torch.manual_seed(step)
        x, target = torch.randn(512, WIDTH), torch.randn(512, WIDTH)
        schedule.step(*((x,) if rank == 0 else ()), **({"target": target, "losses": []} if rank == 1 else {}))
        found += [float(p.grad.double().square().sum()) for p in module.parameters() if p.grad is not None]
        module.zero_grad()
    return found


def pipeline() -> dict[str, Any]:
    """Each rank's stage has a plan of its own, though the planner was told of both ranks."""
    plain, planned = blocks(2 + dist.get_rank()), blocks(2 + dist.get_rank())
    remat.enable(planned, budget=FRACTION, planner=RankPlanner("greedy"))
    found = {"plain": scheduled(plain), "planned": scheduled(planned)}
    answer = next(iter(plans_of(planned).plans.values())).answer  # type: ignore[union-attr]
    return {**found, "overhead": answer.overhead, "digest": answer.digest}


class Split(nn.Module):
    """Two layers for torch's own tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def tensor_parallel() -> dict[str, Any]:
    """DTensor parameters: refused by name in a planned module, planned under `torch.compile`."""
    mesh = init_device_mesh("cpu", (2,))

    def split() -> nn.Sequential:
        torch.manual_seed(0)
        made = nn.Sequential(*(Split() for _ in range(4)))
        for block in made:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return made

    plain, planned = split(), split()
    enabled = remat.enable(split(), budget=FRACTION, planner=RankPlanner("greedy"))
    backend = remat.backend(FRACTION, planner=RankPlanner("greedy"))
    found = {
        "said": message(lambda: enabled(data(0))),
        "plain": trained(plain, plain),
        "planned": trained(planned, torch.compile(planned, backend=backend, fullgraph=True, dynamic=False)),
    }
    return {**found, "overhead": backend.answers[0].overhead, "digest": backend.answers[0].digest}


COLLECTIVE_CASES = {
    "cold_rank": cold_rank,
    "slow_rank": slow_rank,
    "hidden_collective": hidden_collective,
    "stages_with_collectives": stages_with_collectives,
    "pipeline": pipeline,
    "tensor_parallel": tensor_parallel,
}
