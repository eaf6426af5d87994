"""Cases of two ranks whose step has collectives, or is a stage of a pipeline: see `ranks_cases`."""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from planners import OnDemand
from ranks_training import FRACTION, blocks, compared, message, trained
from small_models import FeedForward
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import remat
from remat.capture.operations import held_by_threads
from remat.device import of
from remat.distributed import RankPlanner
from remat.planning.profiles import Profile
from remat.profiling import timing
from remat.profiling.collectives import hop_signatures
from remat.profiling.fixed import here
from remat.settings import settings
from remat.training.enable import backend_of, plans_of

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


def in_parallel(planner: Any = "greedy", **options: Any) -> dict[str, Any]:
    """Training with and without a plan, and what the plan makes of the collectives."""
    plain, planned = parallel(), parallel()
    remat.enable(planned, budget=remat.Fraction(0.6), planner=planner, mode="graph", **options)
    found = compared(plain, planned, lambda m: trained(m, m))
    made = next(iter(plans_of(planned).plans))
    graph = made.step.graph
    reduced = [op for op in range(graph.ops) if graph.op_label(op).endswith("all_reduce)")]
    plans, peaks = plans_of(planned), []
    for _ in range(6):
        peaks.append(plans.peaks[made])
        backend_of(planned).check.expect(made)
        trained(planned, planned, steps=1)
    return {
        **found,
        "costs": [graph.op_cost_ns[op] for op in reduced],
        "once": [op in graph.once for op in reduced],
        "kernels": [len(made.step.operations.ops[op].nodes) for op in reduced],
        "peaks": [[peak.predicted_bytes, peak.measured_bytes] for peak in peaks],
        "held": held_by_threads(made.step.operations),
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
        return in_parallel(RankPlanner("greedy"), recompute_collectives=True)
    finally:
        timing.LONGEST_NS = usual


def priced() -> dict[str, Any]:
    """Where all ranks meet, the link is measured; then it is one over which an all-reduce costs more than a kernel."""
    planner = RankPlanner("greedy")
    found = in_parallel(planner)
    kind = f"{of('cpu').describe()} timing {timing.VERSION}"
    signatures = hop_signatures(dist.group.WORLD, torch.device("cpu"))
    known = planner.profiles.get(kind, sorted(signatures.values()))
    planner.profiles.put(kind, {s: Profile(10**9 + size, 0) for size, s in signatures.items()})
    return {**found, "known": sorted(profile[0] for profile in known.values()), "slow": in_parallel(planner)}


class Mixing(nn.Module):
    """Parameters of all ranks (DTensor) next to tensors of torch's own, which are taken for the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))
        self.layers = distribute_module(layers, mesh)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x * self.scale)
        return (x * self.scale).square().mean().to_local()


def implicitly_replicated() -> dict[str, Any]:
    """Steps before and after a better plan takes over, in both ways, under DTensor's implicit replication."""
    found: dict[str, Any] = {}
    for way in ("enable", "backend"):
        torch.compiler.reset()
        planned, plain, planner = Mixing(), Mixing(), OnDemand()
        asking: dict[str, Any] = {"budget": remat.Fraction(1), "planner": RankPlanner(planner), "max_gap": 0}
        run: Any = planned
        if way == "enable":
            remat.enable(planned, **asking)
        else:
            run = torch.compile(planned, backend=remat.backend(**asking), dynamic=False)
        compiled = torch.compile(plain, backend="aot_eager", dynamic=False)

        def step(model: nn.Module, call: Any, rows: int = 128) -> list[float]:
            model.zero_grad()
            x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
            with implicit_replication():
                loss = call(x)
            loss.backward()
            grads = [p.grad.full_tensor() for p in model.parameters()]
            return [loss.item(), *(number for g in grads for number in g.flatten().tolist())]

        taken = Taken()
        logging.getLogger("remat").addHandler(taken)
        logging.getLogger("remat").setLevel(logging.INFO)
        step(planned, run, 64)
        before = step(planned, run)
        planner.go.set()
        for _ in range(4000):
            step(planned, run)
            if taken.over:
                break
        logging.getLogger("remat").removeHandler(taken)
        found[way] = {
            "over": taken.over,
            "before": before,
            "after": step(planned, run),
            "plain": step(plain, compiled),
            "outside": message(lambda plain=plain: plain(torch.ones(2, WIDTH))),
        }
    return found


class Taken(logging.Handler):
    """Whether a better plan has taken over."""

    over = False

    def emit(self, record: logging.LogRecord) -> None:
        self.over = self.over or "a better plan takes over" in record.getMessage()


class Extreme(nn.Module):
    """The sum on one rank, and the largest on the other: the same shapes, and other collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
        self.how = ("sum", "max")[dist.get_rank()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        reduced = functional.wait_tensor(functional.all_reduce(y.detach(), self.how, dist.group.WORLD))
        return nn.functional.gelu(y + reduced)


def other_collectives() -> dict[str, Any]:
    """Told before a plan is taken up."""
    model = remat.enable(Extreme(), budget=remat.Fraction(0.9), planner="greedy", ranks=True, mode="graph")
    return {"said": message(lambda: model(torch.randn(64, WIDTH)))}


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
    found = compared(plain, planned, lambda m: trained(m, m))
    budget, x = remat.Fraction(0.6), torch.randn(8, WIDTH)
    taken = remat.enable(hiding(), budget=budget, planner="greedy", functional_ops=("remat_ranks::hidden",))
    return {
        **found,
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
    remat.enable(planned, budget=FRACTION, planner="greedy", ranks=True)
    return compared(plain, planned, scheduled)


COLUMNS_AND_ROWS = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCES = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


def split(mesh: Any, layers: Mapping[str, Any]) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(*(FeedForward(WIDTH) for _ in range(3)))
    for block in made:
        parallelize_module(block, mesh, dict(layers))
    return made


def taught(model: nn.Module, call: Any, rows: int, sequence: int = 0) -> list[float]:
    """Losses, norms of the gradients on this rank, and of what was learned; AdamW."""
    optimizer, found = torch.optim.AdamW(model.parameters()), []
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(rows, 8, WIDTH)
        if sequence:
            x = x.chunk(sequence, 1)[dist.get_rank() % sequence].contiguous()
        loss = call(x).square().mean()
        loss.backward()
        found += [loss.item(), *(float(here(p.grad).double().square().sum()) for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return found + [float(here(p).detach().double().square().sum()) for p in model.parameters()]


def made_by(model: nn.Module) -> dict[str, Any]:
    """Of the only plan of an enabled module."""
    (plan,) = (p for p in plans_of(model).plans if p)
    graph = plan.step.graph
    return {
        "overhead": plan.answer.overhead,
        "digest": plan.answer.digest,
        "parameters": plan.step.fixed["parameters"],
        "local": sum(here(p).numel() * p.element_size() for p in model.parameters()),
        "collectives": sum("all_" in name or "reduce_scatter" in name for name in graph.op_names),
    }


def tensor_parallel() -> dict[str, Any]:
    """DTensor parameters under `torch.compile`."""
    mesh = init_device_mesh("cpu", (2,))
    plain, planned = (split(mesh, COLUMNS_AND_ROWS) for _ in range(2))
    backend = remat.backend(FRACTION, planner="greedy", ranks=True)
    compiled = torch.compile(planned, backend=backend, fullgraph=True, dynamic=False)
    found = {"plain": taught(plain, plain, 16), "planned": taught(planned, compiled, 16)}
    return {**found, "overhead": backend.answers[0].overhead, "digest": backend.answers[0].digest}


def split_and_enabled(layers: Mapping[str, Any], sequence: int) -> dict[str, Any]:
    """DTensor parameters in a module that is planned whole; activations may be split between its layers."""
    mesh = init_device_mesh("cpu", (2,))
    plain, planned = split(mesh, layers), split(mesh, layers)
    remat.enable(planned, budget=FRACTION, planner="greedy", ranks=True, mode="graph")
    found = [taught(m, m, 16, sequence) for m in (plain, planned)]
    return {"plain": found[0], "planned": found[1], **made_by(planned)}


def two_dimensions() -> dict[str, Any]:
    """fully_shard over one dimension of a mesh, tensor parallelism over the other, each block with its plan."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    plain, planned = split(mesh["tensor"], COLUMNS_AND_ROWS), split(mesh["tensor"], COLUMNS_AND_ROWS)
    for block in planned:
        remat.enable(block, budget=remat.Fraction(0.92), planner="greedy", ranks=True, mode="graph")
    for model in (plain, planned):
        for block in model:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    found = {"plain": taught(plain, plain, 16), "planned": taught(planned, planned, 16)}
    made = [made_by(block) for block in planned]
    return {**found, **made[-1], "overhead": min(m["overhead"] for m in made)}


COLLECTIVE_CASES = {
    "cold_rank": cold_rank,
    "slow_rank": slow_rank,
    "priced": priced,
    "implicitly_replicated": implicitly_replicated,
    "other_collectives": other_collectives,
    "hidden_collective": hidden_collective,
    "stages_with_collectives": stages_with_collectives,
    "pipeline": pipeline,
    "tensor_parallel": tensor_parallel,
    "tensor_parallel_enabled": lambda: split_and_enabled(COLUMNS_AND_ROWS, 0),
    "sequence_parallel": lambda: split_and_enabled(SEQUENCES, 2),
    "two_dimensions": two_dimensions,
}
