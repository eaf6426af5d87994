"""A new size of a known step trains at once, by a plan that is known, and by a better one when that arrives."""

from __future__ import annotations

import copy
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import remat
from client.comparing import outcome
from client.planners import OnDemand
from client.small_models import numbers
from client.test_training import Net
from remat.planning.greedy import greedy_answer, plan_of_another_size
from remat.planning.options import DEFAULT, SolveOptions
from remat.planning.planner import CoordinatedPlanner
from remat.planning.profiles import DiskProfiles
from remat.planning.quick import quick_answer
from remat.planning.sources import GreedyPlanner, LocalPlanner
from remat.profiling import measure, profile
from remat.profiling.timing import Timed, elements, fitted_cost, times
from remat.training.enable import plans_of
from remat.training.step import training_step
from remat_ir import Answer, Problem, Status, budget_at, graph_of, verify


@pytest.mark.parametrize("sizes", [(256, 512), (512, 256)])
def test_a_new_size_starts_at_once_and_gets_better_at_a_boundary_of_steps(
    sizes: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    planner, module = OnDemand(0.7, max_gap=0.01), Net()
    plain = copy.deepcopy(module)
    old, new = (numbers(size, 64) for size in sizes)
    trained = remat.optimize(module, (old,), budget=remat.Fraction(1), planner=planner)
    first = remat.plans_of(trained).plan_for((old,))
    with caplog.at_level(logging.INFO, "remat"):
        before = remat.plans_of(trained).plan_for((new,))
    assert "the plan of another size" in caplog.text
    assert before.answer.plan == first.answer.plan
    assert before.answer.cache == "near"
    assert before.answer.budget_bytes >= budget_at(before.step.graph, 1)
    verify(Problem(before.step.graph, before.answer.budget_bytes), before.answer.plan, cost_ns=before.answer.cost_ns)
    assert measure.differences(outcome(plain, plain, new), outcome(module, trained, new)) == []
    loss = trained(new)
    planner.go.set()
    assert before.better.wait(60) is not None
    loss.backward()  # ends by the plan that it began with
    module.zero_grad()
    module.load_state_dict(plain.state_dict())
    after = remat.plans_of(trained).plan_for((new,))
    assert after.answer.cost_ns < before.answer.cost_ns
    assert measure.differences(outcome(plain, plain, new), outcome(module, trained, new)) == []
    assert measure.differences(outcome(plain, plain, old), outcome(module, trained, old)) == []


@pytest.mark.thorough
def test_without_waiting_the_first_step_runs_by_the_greedy_plan() -> None:
    planner, x = OnDemand(0.7, max_gap=0.01), numbers(512, 64)
    planner.asked = 1
    module = Net()
    original = copy.deepcopy(module)
    trained = remat.optimize(module, (x,), budget=remat.Fraction(0.7), planner=planner, wait=False)
    quick = remat.plans_of(trained).plan_for((x,))
    assert quick.answer.method == "greedy"
    assert quick.better.found() is None
    plain = outcome(original, original, x)
    assert measure.differences(plain, outcome(module, trained, x)) == []
    planner.go.set()
    assert quick.better.wait(60) is None  # the same walk once more, and no better
    assert remat.plans_of(trained).plan_for((x,)) is quick


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["enable", "optimize"])
def test_no_step_waits_where_no_known_plan_fits(way: str) -> None:
    """The plan of the small size keeps everything; the large one starts on a greedy plan, and a better one arrives."""
    torch.manual_seed(0)
    planner, module = Stalled(), Net()
    small, large = (numbers(size, 64) for size in (128, 512))
    budget = budget_at(training_step(module, (large,), {}).graph, 0.75)
    plain = copy.deepcopy(module)
    if way == "enable":
        remat.enable(module, budget=budget, planner=planner, max_gap=0)
    else:
        remat.optimize(module, small, budget=budget, planner=planner, max_gap=0)
    plans, runs = plans_of(module), (plain, module)
    assert measure.differences(outcome(runs[0], runs[0], small), outcome(runs[-1], runs[-1], small)) == []
    expected = outcome(runs[0], runs[0], large)
    assert measure.differences(expected, outcome(module, runs[1], large)) == [], "while the planner is at work"
    quick = plans.plan_for((large,))
    assert quick.answer.method == "greedy"
    assert quick.answer.overhead
    verify(Problem(quick.step.graph, budget), quick.answer.plan, cost_ns=quick.answer.cost_ns)
    planner.go.set()
    found = quick.better.wait(120)
    after = plans.plan_for((large,))
    assert after.answer is (found or quick.answer)
    assert measure.differences(expected, outcome(module, runs[1], large)) == []
    assert planner.asked[-1].graph == quick.step.graph


class Stalled:
    """The solver, whose answers after the first come when it is told to go on."""

    def __init__(self) -> None:
        self.go, self.asked, self.solver = threading.Event(), list[Problem](), LocalPlanner()

    def plan(self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: Any = None) -> Answer:
        self.asked.append(problem)
        assert len(self.asked) == 1 or self.go.wait(60)
        return self.solver.plan(problem, replace(options, time_limit_s=3.0), on_progress=on_progress)


READS = [[], [0], [0, 1], [2], [0, 1, 2], [0, 1, 2], [1, 4], [2], [1], [6, 7], [4], [3, 7], [5, 6, 9], [5, 10]]
COSTS, SIZES = [2, 6, 5, 8, 9, 3, 8, 8, 9, 3, 5, 4, 3, 9], [6, 5, 6, 8, 5, 5, 7, 3, 8, 9, 4, 4, 4, 6]


class Patient:
    """The solver, which has its plan only where it is given so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.asked, self.solver = seconds, list[float](), LocalPlanner()

    def plan(self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: Any = None) -> Answer:
        self.asked.append(options.time_limit_s)
        if options.time_limit_s < self.seconds:
            return Answer(Status.NOTHING_FOUND, "auto", problem.budget_bytes)
        return self.solver.plan(problem, replace(options, time_limit_s=120))  # ends when it has the optimum


@pytest.mark.thorough
@pytest.mark.parametrize(("limit", "asked"), [(60.0, [1, 4, 16]), (6.0, [1, 4, 6])])
def test_where_no_greedy_walk_fits_solves_grow_until_one_has_a_plan(limit: float, asked: list[float]) -> None:
    planner, problem = Patient(16.0), Problem(graph_of(COSTS, SIZES, READS), 27)
    assert greedy_answer(problem).plan is None
    found = quick_answer(problem, planner, SolveOptions(time_limit_s=limit))
    assert planner.asked == asked
    assert (found.plan is not None) == (limit > 16)
    if found.plan is not None:
        verify(problem, found.plan, cost_ns=found.cost_ns)


@pytest.mark.thorough
def test_a_quick_plan_asks_nobody_where_a_greedy_walk_fits_and_once_where_none_can() -> None:
    planner, graph = Patient(0.0), graph_of(COSTS, SIZES, READS)
    assert quick_answer(Problem(graph, 33), planner, DEFAULT).plan is not None
    assert planner.asked == []
    assert quick_answer(Problem(graph, 20), planner, DEFAULT).status is Status.INFEASIBLE
    assert len(planner.asked) == 1


def test_a_plan_is_used_only_where_it_fits_and_the_step_is_the_same() -> None:
    def problem(rows: int, fraction: float, depth: int = 3) -> tuple[Any, Problem]:
        module = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(depth)])
        step = training_step(module, (numbers(rows, 32),), {})
        return step, Problem(step.graph, budget_at(step.graph, fraction))

    step, asked = problem(64, 1)
    known = [(step.graph, greedy_answer(asked))]
    assert plan_of_another_size(problem(128, 1)[1], known) is not None
    assert plan_of_another_size(problem(128, 0.9)[1], known) is None
    assert plan_of_another_size(problem(128, 1, depth=4)[1], known) is None


def test_a_size_between_two_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its workspaces are measured, its times lie between those of the two; what lies outside is timed, too."""
    timed: list[int] = []

    def counted(calls: Any, devices: Any) -> Timed:
        timed.append(len(calls))
        return times(calls, devices)

    monkeypatch.setattr(profile, "times", counted)
    module, table = Net(), DiskProfiles(tmp_path)
    planner = CoordinatedPlanner(GreedyPlanner(), table)
    trained = remat.optimize(module, (numbers(512, 64),), budget=remat.Fraction(0.9), planner=planner)
    for size in (256, 384, 64, 320):
        remat.plans_of(trained).plan_for((numbers(size, 64),))
    large, small, middle, outside, near = (
        planned.step for planned in remat.plans_of(trained).plans if planned is not None
    )
    assert timed[2] == timed[4] == 0
    assert min(timed[0], timed[1], timed[3]) > 0
    assert len(middle.profiled.fitted) > 0
    assert not large.profiled.fitted | small.profiled.fitted | outside.profiled.fitted
    kernels = (step.profiled.kernels.values() for step in (small, middle, large))
    for a, b, c in zip(*kernels, strict=True):
        assert 0.9 * min(a.cost_ns, c.cost_ns) <= b.cost_ns <= 1.1 * max(a.cost_ns, c.cost_ns)
    alone = training_step(module, (numbers(384, 64),), {}, like=large)
    assert alone.graph.op_workspace_bytes == middle.graph.op_workspace_bytes
    assert alone.graph.value_bytes == middle.graph.value_bytes
    kernels_there = zip(middle.profiled.kernels, alone.profiled.kernels, strict=True)
    fitted = {profile.signature(node) for like, node in kernels_there if like in middle.profiled.fitted}
    device = profile.device_kind(alone.profiled.kernels)
    assert not table.get(device, fitted), "what was not measured is not shared"
    assert near.profiled.fitted == frozenset(near.profiled.kernels) - frozenset(near.profiled.costs) != frozenset()


@pytest.mark.thorough
def test_what_a_size_costs_follows_from_two_others() -> None:
    """One tensor in, one out: elements are twice the rows."""

    def kernel(rows: int) -> fx.Node:
        graph = fx.Graph()
        x = graph.placeholder("x")
        y = graph.call_function(torch.ops.aten.neg.default, (x,))
        x.meta["val"] = y.meta["val"] = torch.empty(rows, device="meta")
        return y

    def cost(rows: int, *known: tuple[int, int]) -> int | None:
        return fitted_cost(elements(kernel(rows)), [(elements(kernel(size)), cost) for size, cost in known])

    assert cost(20, (10, 110), (40, 140)) == 120
    assert cost(20, (10, 110), (400, 500)) == 120, "a straight line, however far apart"
    assert cost(5, (10, 110), (40, 140)) == 105
    assert cost(4, (10, 110), (40, 140)) is None, "below half the smallest"
    assert cost(41, (10, 110), (40, 140)) is None, "above the largest"
    assert cost(20, (10, 110)) is None
    assert cost(20, (10, 140), (40, 110)) == 140, "one that shrinks is taken as the larger"
    assert cost(20, (10, 100), (40, 1600)) == 800, "faster than the size, and near"
    assert cost(20, (10, 100), (41, 1681)) is None, "faster than the size, and far"
    assert cost(9, (10, 100), (40, 1600)) is None
    assert cost(20, (5, 1), (10, 110), (40, 140), (80, 999)) == 120, "the nearest two"
