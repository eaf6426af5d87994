"""Figure 4 on captured training steps: overhead by costs that are measured next to a roofline's, and plans trained.

The networks are modules (`benchmarks.models.paper`). Their steps are captured as they run on this machine's CPU, whose
kernels are measured one by one, and as they would run on a V100, at the batches of the paper's public graphs.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.figures.measure import BEST, Row, Settings, answers, baselines_of, row_of
from benchmarks.harness.steps import Steps
from benchmarks.models.paper import NETWORKS
from remat.planning.planner import planner_for
from remat.target.devices import Target
from remat.target.step import target_step
from remat.training.enable import following
from remat.training.optimize import carry_out
from remat.training.step import TrainingStep, training_step
from remat_ir import Answer, Graph, Plan, Problem, plain_peak
from remat_solver import solve
from remat_solver.bounds import known_budget
from remat_solver.chain.network import linear_network

V100 = Target("NVIDIA V100", 16 * 2**30, 900e9, {"float32": 15.7e12}, launch_ns=5_000)
BATCHES = {"vgg16": (16, 256), "mobilenet": (32, 512), "unet": (8, 32)}
"""Of the step that is measured, and of that on the V100: the paper's."""
TRAINED = "unet"
ROUNDS = 9
SEED = 11


def profiles(plan: Settings) -> Iterator[Row]:
    """Overhead against budget by measured kernels, and by a V100's roofline."""
    torch.set_num_threads(1)
    for name, make in NETWORKS.items():
        if plan.networks is not None and name not in plan.networks:
            continue
        for costs, device, batch in zip(("measured", "roofline"), (None, V100), BATCHES[name], strict=True):
            graph = target_step(make, device, batch=batch).graph
            for share, answer in _answers(plan, name, graph):
                yield {**row_of(name, batch, graph, answer), "costs": costs, "share": share}


def _answers(plan: Settings, name: str, graph: Graph) -> Iterator[tuple[float, Answer]]:
    """Each method's answers, from the least budget at which a plan is known to the plain peak."""
    least, steps = known_budget(graph), plan.points - 1
    most = plain_peak(graph)
    shares = {least + (most - least) * n // steps: round(n / steps, 4) for n in range(plan.points)}
    rotor = () if linear_network(graph) is None else ("rotor",)
    for method in (BEST, "checkpoint-all", *rotor, *baselines_of(graph)):
        if plan.wants(name, method):
            for answer in answers(graph, sorted(shares), method, plan.seconds):
                yield shares[answer.budget_bytes], answer


class Case(NamedTuple):
    """A plan that is carried out: its peaks, and how many of its results are not the stock step's, bit for bit."""

    predicted_bytes: int
    measured_bytes: int
    unequal: int


def trained(plan: Settings) -> Iterator[Row]:
    """The plans of all methods for the measured step of one network, trained: bits, peaks, and time over plain."""
    if plan.networks is not None and TRAINED not in plan.networks:
        return
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    batch = BATCHES[TRAINED][0]
    model, inputs = NETWORKS[TRAINED](batch)
    step = training_step(model.train(), (), inputs)
    plain = solve(Problem(step.graph, plain_peak(step.graph)), method="checkpoint-all")
    found = list(_answers(plan, TRAINED, step.graph))
    distinct = {answer.plan: answer for answer in (plain, *(answer for _, answer in found))}
    steps = Steps(model, inputs)
    steps.tried("stock", model, torch.compile(model, backend="aot_eager"))
    cases = {key: _case(steps, model, step, answer) for key, answer in distinct.items() if isinstance(key, Plan)}
    assert isinstance(plain.plan, Plan)
    ratios = _rounds(steps, list(cases), plain.plan)
    for share, answer in found:
        if not isinstance(answer.plan, Plan):
            continue
        low, middle, high = statistics.quantiles(ratios[answer.plan], n=4)
        yield {
            **row_of(TRAINED, batch, step.graph, answer),
            "share": share,
            "measured": round(middle - 1, 5),
            "low": round(low - 1, 5),
            "high": round(high - 1, 5),
            **cases[answer.plan]._asdict(),
        }


def _case(steps: Steps, model: nn.Module, step: TrainingStep, answer: Answer) -> Case:
    """Carry out a plan, and run it for its results and for its peak."""
    planned = carry_out(step, Problem(step.graph, answer.budget_bytes), answer)
    _, unequal, peak = steps.tried(answer.plan, model, following(model, planned, planner_for("greedy")))
    return Case(planned.predicted_bytes, peak + step.graph.fixed_bytes, len(unequal))


def _rounds(steps: Steps, plans: list[Plan], plain: Plan) -> Mapping[Plan, list[float]]:
    """Each plan's CPU seconds over those of the plain plan, run right before or after it."""
    draw = random.Random(SEED)
    ratios: dict[Plan, list[float]] = {key: [] for key in plans}
    for _ in range(ROUNDS):
        for key in draw.sample(plans, len(plans)):
            if draw.random() < 0.5:
                mine, its = steps.seconds(key), steps.seconds(plain)
            else:
                its, mine = steps.seconds(plain), steps.seconds(key)
            ratios[key].append(mine / its)
    return ratios
