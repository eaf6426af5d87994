"""Training by a plan leaves behind what plain training does, bit by bit, in the memory that was predicted."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.models.behind import behind
from torch import nn

from client.small_models import CASES, Case
from remat.planning.profiles import DiskProfiles
from remat.profiling import measure
from remat.training.step import TrainingStep, running_peak, training_step
from remat_ir import Plan, Problem, plain_plan, plan_of, verify
from tiers import first


def callable_of(case: Case, step: TrainingStep, plan: Plan) -> Callable[..., Any]:
    """The case's step by a plan."""
    return behind(case.module, step.compile(plan))


def outcome(case: Case, function):  # type: ignore[no-untyped-def]
    """What two accumulated steps leave behind, the module's state restored afterwards."""
    state = {name: t.clone() for name, t in case.module.state_dict().items()}
    for argument in case.args:
        if isinstance(argument, torch.Tensor):
            argument.grad = None
    step = measure.forward_backward(function, case.args, case.kwargs, case.loss)

    def twice() -> torch.Tensor:
        step()
        return step()

    found = measure.outcome(case.module, twice)
    inputs = {f"input {i}": None if a.grad is None else a.grad.clone() for i, a in enumerate(case.args)}
    case.module.load_state_dict(state)
    return found._replace(gradients={**found.gradients, **inputs})


def random_plan(step: TrainingStep, seed: int) -> Plan:
    """A valid plan that recomputes whatever it likes, wherever it likes."""
    graph, draw = step.graph, random.Random(seed)
    pinned = set(graph.once) | {graph.value_op[v] for v in graph.keep}
    free = [op for op in range(graph.ops) if op not in pinned]
    sequence: list[int] = []
    for op in range(graph.ops):
        for again in draw.sample(free, min(len(free), draw.choice((0, 0, 1, 3)))):
            sequence += [again] * (again < op)
        sequence.append(op)
    plan = plan_of(graph, sequence)
    verify(Problem(graph, 2**50), plan)
    return plan


def everything_again(step: TrainingStep) -> Plan:
    """Before each op of the backward pass, all that it needs from the forward pass is computed anew."""
    graph = step.graph
    pinned = set(graph.once) | {graph.value_op[v] for v in graph.keep}
    sequence = list(range(graph.backward_from))
    for op in range(graph.backward_from, graph.ops):
        needed: set[int] = set()
        stack = [graph.value_op[v] for v in graph.op_inputs[op]]
        while stack:
            maker = stack.pop()
            if maker in pinned or maker in needed or maker >= graph.backward_from:
                continue
            needed.add(maker)
            stack += [graph.value_op[v] for v in graph.op_inputs[maker]]
        sequence += [*sorted(needed), op]
    plan = plan_of(graph, sequence)
    verify(Problem(graph, 2**50), plan)
    return plan


def peak(case: Case, function) -> int:  # type: ignore[no-untyped-def]
    """The measured peak of one step from no gradients, in bytes above the fixed ones."""
    run = measure.forward_backward(function, case.args, case.kwargs, case.loss)
    found = 0
    for _ in range(2):  # libraries allocate once what they use ever after
        case.module.zero_grad()
        for argument in case.args:
            argument.grad = None
        found = measure.peak_memory(run).peak_bytes
    return found


class WithLoss(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.inner, self.loss = case.module, case.loss or (lambda output: output)

    def forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        return self.loss(self.inner(*args, **kwargs))


QUICK = ("attention_with_dropout", "buffer_that_is_read_and_overwritten", "outputs_that_alias", "tied_weights")
THOROUGH = (
    "batch_norm_used_twice",
    "custom_autograd_function",
    "loss_and_unused_output",
    "random_numbers_of_all_kinds",
)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in sorted(CASES.keys() - {*QUICK, *THOROUGH})]


@pytest.mark.parametrize("name", [*first(len(QUICK), QUICK + THOROUGH), *SLOW])
def test_every_plan_trains_exactly(name: str, profiles: DiskProfiles) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    step = training_step(case.module, case.args, case.kwargs, table=profiles)
    plain = outcome(case, case.module)
    for plan in (plain_plan(step.graph), everything_again(step), random_plan(step, 1), random_plan(step, 2)):
        assert measure.differences(plain, outcome(case, callable_of(case, step, plan))) == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["batch_norm_and_dropout", pytest.param("tied_weights", marks=pytest.mark.slow)])
def test_the_peak_is_the_predicted_one(name: str, profiles: DiskProfiles) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    whole = Case(WithLoss(case), case.args, case.kwargs, None)
    step = training_step(whole.module, whole.args, whole.kwargs, table=profiles)
    for plan in (plain_plan(step.graph), everything_again(step), random_plan(step, 1), random_plan(step, 2)):
        predicted = running_peak(step, plan) - step.graph.fixed_bytes
        assert peak(whole, callable_of(whole, step, plan)) == pytest.approx(predicted, rel=0.01, abs=256)
