"""Real architectures train exactly, by random plans and by a planner's, in the memory that was predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from benchmarks.models.behind import behind
from benchmarks.models.zoo import build, named
from functorch.compile import default_partition, make_boxed_func

from client.small_models import Case
from client.test_exact import callable_of, everything_again, outcome, peak, random_plan
from remat import _compat
from remat.planning.greedy import greedy_answer
from remat.planning.options import SolveOptions
from remat.planning.profiles import DiskProfiles
from remat.planning.sources import LocalPlanner
from remat.profiling import measure
from remat.training.step import TrainingStep, running_peak, training_step
from remat_ir import Plan, Problem, plain_peak, plain_plan, verify
from remat_ir.greedy import least_memory

EACH_CHANGE = ("gpt2",)


def stock_of(case: Case, step: TrainingStep) -> Callable[..., Any]:
    """The step as torch's own aot_eager runs it: its default partition, its kernels as they come."""
    boxed = lambda graph, _: make_boxed_func(graph.forward)  # noqa: E731
    run = _compat.compile_joint(step.captured.descriptor, default_partition, boxed, boxed)
    return behind(case.module, lambda inputs: run(*inputs))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough if name in EACH_CHANGE else pytest.mark.slow)
        for name in named("tiny")
    ],
)
def test_an_architecture_trains_exactly_within_its_budget(name: str, profiles: DiskProfiles) -> None:
    subject = build(name)
    case = Case(subject.model, (), dict(subject.inputs), None)
    step = training_step(case.module, case.args, case.kwargs, table=profiles)
    graph = step.graph
    stock = outcome(case, stock_of(case, step))
    plans: list[Plan] = [plain_plan(graph), everything_again(step), random_plan(step, 1)]
    plain = plain_peak(graph)
    tightest = least_memory(graph)
    least = verify(Problem(graph, plain), tightest).peak_bytes
    assert least < plain
    for quarters in (3, 2, 1):
        budget = least + (plain - least) * quarters // 4
        found = greedy_answer(Problem(graph, budget), time_limit_s=10, max_gap=0.01).plan
        assert isinstance(found, Plan)
        plans.append(found)
        assert running_peak(step, found) <= budget
    if name not in EACH_CHANGE:
        solved = LocalPlanner().plan(Problem(graph, (least + plain) // 2), SolveOptions(time_limit_s=3)).plan
        assert isinstance(solved, Plan)
        plans.append(solved)
    plans.append(tightest)
    for plan in plans:
        function = callable_of(case, step, plan)
        assert measure.differences(stock, outcome(case, function)) == []
    for plan in (plans[0], plans[-1]):
        predicted = running_peak(step, plan) - graph.fixed_bytes
        assert peak(case, callable_of(case, step, plan)) == pytest.approx(predicted, rel=0.01, abs=256)
