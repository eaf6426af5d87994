"""Cases of two ranks that run the stages of a pipeline by one choice of plans: see `ranks_cases`."""

import copy
import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks_training import message
from small_models import FeedForward
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import get_schedule_class

import remat
from remat.distributed import RankPlanner
from remat.pipelines.pipeline import PipelinePlans
from remat.pipelines.schedule import actions_of, named
from remat.planning.budget import Budget
from remat.planning.options import DEFAULT, SolveOptions
from remat.planning.sources import GreedyPlanner
from remat.profiling import measure
from remat.target.fit import predict
from remat.training.enable import plans_of
from remat_ir import Answer, Problem, RematError

WIDTH, ROWS, MICROS = 32, 512, 4
FIT = {"optimizer": "adamw", "planner": "greedy", "time_limit_s": 0.5}
SCHEDULES: dict[str, Callable[..., Any]] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}


class Block(FeedForward):
    """Dropout, and a count of calls."""

    def __init__(self) -> None:
        super().__init__(WIDTH, dropout=0.1)
        self.register_buffer("calls", torch.zeros(1))
        self.calls: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(x)


def made(name: str) -> tuple[Any, list[Any]]:
    """A schedule and this rank's stages of it, equal at each call."""
    rank, count = dist.get_rank(), 2 if name in ("gpipe", "1f1b") else 4
    mine = {2: [rank], 4: [rank, 3 - rank] if name == "zbv" else [rank, rank + 2]}[count]
    torch.manual_seed(0)
    modules = [nn.Sequential(Block(), Block()) for _ in range(count)]
    stages = [pipelining.PipelineStage(modules[i], i, count, torch.device("cpu")) for i in mine]
    given = stages[0] if count == 2 else stages
    return SCHEDULES[name](given, MICROS, loss_fn=lambda y, t: (y - t).square().mean()), stages


def batch(stages: list[Any], seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What this rank gives to a step of the schedule."""
    torch.manual_seed(seed)
    x, target = torch.randn(ROWS * MICROS, WIDTH), torch.randn(ROWS * MICROS, WIDTH)
    first, last = (any(getattr(s, what) for s in stages) for what in ("is_first", "is_last"))
    return (x,) if first else (), {"target": target, "losses": []} if last else {}


def trained(schedule: Any, stages: list[Any]) -> tuple[list[Any], int]:
    """Losses, gradients and buffers of two steps, and the measured peak of a third one."""
    found: list[Any] = []
    for seed in range(2):
        args, kwargs = batch(stages, seed)
        torch.manual_seed(100 + seed + dist.get_rank())
        before = [buffer.clone() for stage in stages for buffer in stage.submod.buffers()]
        schedule.step(*args, **kwargs)
        after = [buffer for stage in stages for buffer in stage.submod.buffers()]
        if seed:  # in its first step a schedule runs each stage once more, to see shapes
            found += [float(b - a) for a, b in zip(before, after, strict=True)]
        found += [float(loss.detach()) for loss in kwargs.get("losses", ())]
        for stage in stages:
            for tensor in (p.grad for p in stage.submod.parameters()):
                found.append(None if tensor is None else float(tensor.double().square().sum()))
            stage.submod.zero_grad()
    args, kwargs = batch(stages, 2)
    for _ in range(2):  # the second one lets go what was seen to be made in the first one
        for stage in stages:
            stage.clear_runtime_states()
        peak = measure.peak_memory(lambda: schedule.step(*args, **kwargs)).peak_bytes
        for stage in stages:
            stage.submod.zero_grad()
    return found, peak


def pipelined(name: str) -> dict[str, Any]:
    """A schedule without plans and by them."""
    schedule, stages = made(name)
    plain, plain_peak = trained(schedule, stages)
    schedule, stages = made(name)
    before = [copy.deepcopy(stage.submod.state_dict()) for stage in stages]
    state = torch.get_rng_state()
    args, kwargs = batch(stages, 7)
    torch.set_rng_state(state)
    plans = remat.optimize_pipeline(stages, schedule, args, kwargs, budget=remat.Fraction(0.8), planner="greedy")
    untouched = torch.equal(state, torch.get_rng_state())
    for stage, saved in zip(stages, before, strict=True):
        untouched &= all(torch.equal(t, saved[key]) for key, t in stage.submod.state_dict().items())
        untouched &= all(p.grad is None for p in stage.submod.parameters())
    planned, peak = trained(schedule, stages)
    return {
        "plain": plain,
        "planned": planned,
        "untouched": untouched,
        "peak": peak / (plans.budget_bytes - plans.fixed_bytes),
        "of_predicted": peak / (plans.predicted_bytes - plans.fixed_bytes),
        "of_plain": peak / plain_peak,
        "stages": list(plans.stages),
        "overhead": plans.overhead,
        "makespans": [plans.plain_makespan_ns, plans.bound_ns, plans.makespan_ns],
        "text": str(plans),
    }


def trained_by(name: str, budget: Budget, rows: int = 512) -> PipelinePlans:
    """The plans of a schedule's stages for a real step, of what `test_fit` captures."""
    sys.path.append(str(Path(__file__).parents[1]))
    from client.test_fit import part

    numbers = sorted({run.stage for run in actions_of(named(name, 2, MICROS))[dist.get_rank()]})
    count = 2 * len(numbers)
    modules = [part(number, count)[0] for number in numbers]
    bodies = [getattr(module, "body", module) for module in modules]
    stages = [pipelining.PipelineStage(b, n, count, torch.device("cpu")) for b, n in zip(bodies, numbers, strict=True)]
    kind: Any = get_schedule_class(name)
    schedule = kind(stages if len(stages) > 1 else stages[0], MICROS, loss_fn=lambda y, t: (y - t).square().mean())
    schedule.step = functools.partial(schedule.step, return_outputs=False)
    x = torch.randn(rows * MICROS, 64)
    args, kwargs = (x,) if 0 in numbers else (), {"target": x.clone()} if count - 1 in numbers else {}
    optimizer = torch.optim.AdamW([p for module in bodies for p in module.parameters()], foreach=True)
    return remat.optimize_pipeline(stages, schedule, args, kwargs, budget=budget, planner="greedy", optimizer=optimizer)


def fitted(name: str) -> dict[str, Any]:
    """What a rank needs without plans, by the allocator's own events."""
    plans = trained_by(name, remat.Fraction(1.0))
    return {"plain": plans.measured_bytes, "fixed": plans.fixed_bytes, "update": plans.update_peak_bytes}


def largest(name: str) -> dict[str, Any]:
    """What a rank needs at the largest micro-batches that `predict` finds, and at one that is a little larger."""
    sys.path.append(str(Path(__file__).parents[1]))
    from client.test_fit import TABLE, part

    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "small.toml"
        table.write_text(TABLE.replace("MEMORY", "48MiB"))
        found = predict(part, str(table), parallel=f"pp=2,micros={MICROS},schedule={name}", **FIT)
    told = [found.memory_bytes, found.largest_plain, found.largest_planned.size, found.largest_planned.overhead]
    dist.broadcast_object_list(told)  # greedy plans have a limit of time
    memory, plain, planned, overhead = told
    rows = {"plain": plain, "over": plain + plain // 16, "planned": planned}
    needs = {key: trained_by(name, remat.Fraction(1.0), rows[key]).measured_bytes for key in ("plain", "over")}
    needs["planned"] = trained_by(name, memory, planned).measured_bytes
    return {"memory": memory, "needs": needs, "rows": rows, "overhead": overhead}


def earlier() -> dict[str, Any]:
    """Both ranks of 1F1B inside as many bytes as the last one needs without a plan."""
    schedule, stages = made("1f1b")
    args, kwargs = batch(stages, 7)
    _, plain = trained(schedule, stages)
    needs = [0, 0]
    dist.all_gather_object(needs, plain)
    schedule, stages = made("1f1b")
    budget = remat.ActivationBytes(int(1.05 * needs[1]))
    plans = remat.optimize_pipeline(stages, schedule, args, kwargs, budget=budget, planner="greedy")
    (planned,) = plans_of(stages[0].submod).plans
    return {"needs": needs, "overhead": planned.answer.overhead, "makespan": plans.overhead}


class AwayFromOne:
    """A planner that the second rank cannot reach."""

    def plan(self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: Any = None) -> Answer:
        if dist.get_rank():
            raise RematError("nobody answers there")
        return GreedyPlanner().plan(problem, options)


def refused() -> dict[str, Any]:
    """On both ranks, and the stages are as they were."""
    schedule, stages = made("zero_bubble")
    args, kwargs = batch(stages, 7)

    def ask(**options: Any) -> str:
        options = {"budget": remat.Fraction(0.8), "planner": "greedy", **options}
        return message(
            lambda: remat.optimize_pipeline(options.pop("stages", stages), schedule, args, kwargs, **options)
        )

    found = {
        "small": ask(budget=remat.ActivationBytes(1000 if dist.get_rank() else "1GiB")),
        "planner": ask(ranks=True),
        "rank_planner": ask(planner=RankPlanner("greedy")),
        "away": ask(planner=AwayFromOne(), strict=True),
        "budget": ask(budget=remat.UnitBytes(1, 1)),
        "stages": ask(stages=[stage.submod for stage in stages]),
        "others": ask(stages=stages[:1]),
    }
    found["left"] = [stage.dw_builder is None and "forward" not in stage.submod.__dict__ for stage in stages]
    stages[0].dw_builder = lambda: lambda: None
    found["dw_builder"] = ask()
    stages[0].dw_builder = None
    found["one_optimizer"] = ask(optimizer=object() if dist.get_rank() else None)
    stages[0].dw_builder = (lambda: lambda: None) if dist.get_rank() else None
    found["one_builder"] = ask()
    found["left"] += [stage.dw_builder is None and "forward" not in stage.submod.__dict__ for stage in stages[1:]]
    found["left"].append("forward" not in stages[0].submod.__dict__)
    stages[0].dw_builder = None
    capture = stages[0].submod[0].register_forward_hook(lambda *_: print(end="") if dist.get_rank() else None)
    found["captured"] = ask()
    capture.remove()
    return found


PIPELINE_CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: lambda name=name: pipelined(name) for name in SCHEDULES},
    **{f"fitted {kind.__name__[8:]}": lambda kind=kind: fitted(kind.__name__[8:]) for kind in SCHEDULES.values()},
    **{f"largest {kind.__name__[8:]}": lambda kind=kind: largest(kind.__name__[8:]) for kind in SCHEDULES.values()},
    "pipelines_earlier": earlier,
    "pipelines_refused": refused,
}
