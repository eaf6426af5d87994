"""What was not planned says so, and a planner that is away is asked again."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import remat
from client.comparing import equal, gradients
from remat.errors import CaptureError
from remat.planning import quick
from remat.planning.greedy import greedy_answer
from remat.planning.options import DEFAULT, SolveOptions
from remat.planning.sources import LocalPlanner
from remat_ir import Answer, Problem, RematError

pytestmark = pytest.mark.usefixtures("fresh_cache")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)))


X = torch.linspace(-1, 1, 64 * 32).reshape(64, 32)


def test_calls_that_no_plan_runs_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = remat.enable(net(), budget="100%", planner="greedy")
    model(X).sum().backward()
    assert remat.plans_of(model).calls == (1, 0)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(2):
            model(X).sum().backward()
    assert remat.plans_of(model).calls == (1, 2)
    assert caplog.text.count("a call of this Sequential runs without a plan: torch.compile has captured nothing") == 1
    torch.func.grad(lambda x: model(x).sum())(X)
    assert remat.plans_of(model).calls == (1, 3)
    with torch.no_grad():
        model(X)
    model(X).sum().backward()
    assert remat.plans_of(model).calls == (2, 3), "evaluation is neither"


@torch.library.custom_op("remat_tests::laid_out", mutates_args=())
def laid_out(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


@laid_out.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    """Says of its strides what they are not."""
    return torch.empty_like(x)


class Turning(nn.Module):
    """Where a view was traced the real tensor has none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean() + laid_out(x.detach()).reshape(-1).sum()


def test_a_graph_that_does_not_run_as_it_was_traced_is_no_planned_call(caplog: pytest.LogCaptureFixture) -> None:
    model = remat.enable(Turning(), budget="100%", planner="greedy")
    assert remat.check(model, X).planned_calls == 0
    model(X).backward()
    found = remat.plans_of(model)
    assert found.calls == (0, 2)
    assert (found.plans, found.unplanned, found.plan_for((X,))) == ((), 1, None)
    assert caplog.text.count("runs without a plan") == 1


class Parted(nn.Module):
    """Two graphs of Dynamo's, of which the second does not run as it was traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), Turning()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.last(x)


@pytest.mark.parametrize("make", [Turning, Parted])
def test_a_graph_that_does_not_run_is_given_up_where_nothing_measures_it(
    make: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """Without the check of first steps, and in a step of several graphs, which share a budget."""
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    remat.enable(model, budget="100%", planner="greedy", self_check=False)
    for _ in range(2):
        for each in (model, plain):
            each(X).backward()
    assert equal(gradients(model), gradients(plain))
    assert remat.plans_of(model).unplanned == 1
    assert caplog.text.count("training runs without a plan: the captured step does not run") == 1
    refused = remat.enable(make(), budget="100%", planner="greedy", self_check=False, on_failure="raise")
    with pytest.raises(CaptureError, match="do not lie in memory as the traced ones"):
        refused(X)


class Away:
    """A planner that cannot be reached some times."""

    def __init__(self, times: int) -> None:
        self.left = times

    def plan(self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: Any = None) -> Answer:
        if self.left:
            self.left -= 1
            raise RematError("nobody is there")
        return LocalPlanner().plan(problem, replace(options, time_limit_s=5))


@pytest.mark.thorough
def test_a_planner_that_is_away_is_asked_again_and_its_plan_taken_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quick, "AGAIN_S", [0.01])
    model, planner = net(), Away(3)
    remat.optimize(model, X, budget="75%", planner=planner)
    assert "Away gave no usable answer and is passed over: nobody is there" in caplog.text
    assert "the plan is GreedyPlanner's instead: it costs at most" in caplog.text
    assert "the planner that failed is asked again while training goes on" in caplog.text
    (first,) = remat.plans_of(model).plans
    assert first.answer.method == "greedy"
    better = first.better.wait(300)
    assert planner.left == 0
    model(X).sum().backward()
    (then,) = remat.plans_of(model).plans
    assert then.answer == (better or first.answer)


def test_a_planner_that_fails_is_an_error_where_nobody_may_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RematError, match="nobody is there"):
        remat.optimize(net(), X, budget="75%", planner=Away(1), strict=True)
    monkeypatch.setenv("REMAT_STRICT", "1")
    with pytest.raises(RematError, match="nobody is there"):
        remat.optimize(net(), X, budget="75%", planner=Away(1))


@pytest.mark.thorough
def test_asking_again_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two problems are asked for at once; those whose planner is away leave the place to others between."""
    monkeypatch.setattr(quick, "AGAIN_S", [600.0])
    lost = [remat.optimize(net(), X, budget="75%", planner=Away(10**6)) for _ in range(3)]
    model = net()
    remat.optimize(model, X, budget="75%", planner=Away(0), wait=False)
    (plan,) = remat.plans_of(model).plans
    plan.better.wait(300)
    assert [len(remat.plans_of(each).plans) for each in lost] == [1, 1, 1]


class Held:
    """The greedy plan, once it may be told."""

    def __init__(self, may: threading.Event) -> None:
        self.may, self.asked = may, 0

    def plan(self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: Any = None) -> Answer:
        self.asked += 1
        assert self.may.wait(300)
        return greedy_answer(problem)


@pytest.mark.thorough
def test_plans_of_a_model_that_has_gone_are_not_asked_for() -> None:
    """Models that are enabled again and again would be planned before the one that trains."""
    may = threading.Event()
    planners = [Held(may) for _ in range(4)]
    models = [remat.optimize(net(), X, budget="75%", planner=planner, wait=False) for planner in planners[:3]]
    gone = weakref.ref(models.pop())
    gc.collect()
    assert gone() is None
    models.append(remat.optimize(net(), X, budget="75%", planner=planners[3], wait=False))
    may.set()
    for model in models:
        (plan,) = remat.plans_of(model).plans
        plan.better.wait(300)
    assert [planner.asked for planner in planners] == [1, 1, 0, 1]


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "remat")
    return caplog
