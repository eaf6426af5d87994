"""Figure 4 on captured training steps: overhead by costs that are measured next to a roofline's, and plans trained.

The networks are modules (`benchmarks.models.paper`). Their steps are captured as they run on this machine's CPU, whose
kernels are measured one by one, and as they would run on a V100, at the batches of the paper's public graphs.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.figures.measure import BEST, Row, Settings, answers, baselines_of, row_of
from benchmarks.models.paper import NETWORKS
from remat.planning.planner import planner_for
from remat.profiling.measure import Outcome, differences, forward_backward, loss_of, outcome, peak_memory
from remat.target.devices import Target
from remat.target.step import target_step
from remat.training.enable import following
from remat.training.optimize import carry_out
from remat.training.step import Planned, TrainingStep, training_step
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
    """A plan that is carried out: its step, the measured peak of it, and how many of its results are not the stock
    step's, bit for bit.
    """

    planned: Planned
    step: Callable[[], torch.Tensor]
    peak_bytes: int
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
    bench = _Bench(model, inputs, step)
    cases = {key: bench.case(answer) for key, answer in distinct.items() if isinstance(key, Plan)}
    assert isinstance(plain.plan, Plan)
    ratios = bench.rounds(cases, cases[plain.plan])
    for share, answer in found:
        if not isinstance(answer.plan, Plan):
            continue
        case = cases[answer.plan]
        low, middle, high = statistics.quantiles(ratios[answer.plan], n=4)
        yield {
            **row_of(TRAINED, batch, step.graph, answer),
            "share": share,
            "measured": round(middle - 1, 5),
            "low": round(low - 1, 5),
            "high": round(high - 1, 5),
            "predicted_bytes": case.planned.predicted_bytes,
            "measured_bytes": case.peak_bytes,
            "unequal": case.unequal,
        }


class _Bench:
    """One model whose step is carried out by several plans, each next to the stock step and to the plain one."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, torch.Tensor], step: TrainingStep) -> None:
        self.model, self.inputs, self.step = model, inputs, step
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self.stock = self._left(self._run(torch.compile(model, backend="aot_eager")))

    def case(self, answer: Answer) -> Case:
        """Carry out a plan, and run it for its results and for its peak."""
        planned = carry_out(self.step, Problem(self.step.graph, answer.budget_bytes), answer)
        run = self._run(following(self.model, planned, planner_for("greedy")))
        unequal = len(differences(self.stock, self._left(run)))
        self.model.zero_grad(set_to_none=True)
        peak = peak_memory(run).peak_bytes + self.step.graph.fixed_bytes
        return Case(planned, run, peak, unequal)

    def rounds(self, cases: Mapping[Plan, Case], plain: Case) -> Mapping[Plan, list[float]]:
        """Each plan's CPU seconds over those of the plain plan, run right before or after it."""
        draw = random.Random(SEED)
        ratios: dict[Plan, list[float]] = {key: [] for key in cases}
        for _ in range(ROUNDS):
            for key in draw.sample(list(cases), len(cases)):
                if draw.random() < 0.5:
                    mine, its = self._seconds(cases[key]), self._seconds(plain)
                else:
                    its, mine = self._seconds(plain), self._seconds(cases[key])
                ratios[key].append(mine / its)
        return ratios

    def _run(self, module: Callable[..., object]) -> Callable[[], torch.Tensor]:
        return forward_backward(module, (), self.inputs, loss_of)

    def _left(self, run: Callable[[], torch.Tensor]) -> Outcome:
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._buffers[name])
        return outcome(self.model, run, SEED)

    def _seconds(self, case: Case) -> float:
        self.model.zero_grad(set_to_none=True)
        start = time.process_time()
        case.step()
        return time.process_time() - start
