"""A plan file pins a plan across restarts: verified on what is captured, refused by name where that is another step."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import remat
from client.comparing import step_differences
from client.test_shared import Broken
from client.transferring import Mover
from remat.planning.plan_file import PlanFile, difference
from remat.profiling.measure import peak_memory
from remat_ir import Answer, InvalidData, graph_of


class Net(nn.Module):
    """A few layers whose activation may be exchanged."""

    def __init__(self, layers: int = 4, activation: type[nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))
        self.activation = activation()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return x.sum()


def net(layers: int = 4, activation: type[nn.Module] = nn.Tanh) -> Net:
    torch.manual_seed(3)
    return Net(layers, activation)


X = torch.ones(256, 64)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    remat.save_plans(remat.optimize(net(), X, budget="90%", planner="greedy"), path)
    return path


class Deaf:
    """A planner that must not be asked."""

    def plan(self, problem: object, options: object = None, *, on_progress: object = None) -> Answer:
        raise AssertionError("asked")


@pytest.mark.parametrize("budget", [None, "90%"])
def test_a_restarted_job_runs_the_same_plan_and_asks_nobody(saved: Path, budget: str | None) -> None:
    model = net()
    trained = remat.optimize(model, X, budget=budget, plan=saved, planner=Deaf())
    (planned,) = remat.plans_of(trained).plans
    assert planned.answer.plan == PlanFile(saved).steps[0].answer.plan
    assert step_differences(net(), model, (X,)) == []


def test_enable_takes_a_plan_file_too(saved: Path) -> None:
    model = remat.enable(net(), plan=str(saved), planner=Deaf())
    model(X).backward()
    path = saved.with_name("again.json")
    remat.save_plans(model, path)
    assert PlanFile(path).steps[0].answer.plan == PlanFile(saved).steps[0].answer.plan


def test_another_size_of_the_step_takes_the_plan_if_it_fits(saved: Path) -> None:
    trained = remat.optimize(net(), X[:128], plan=saved, planner=Deaf())
    (planned,) = remat.plans_of(trained).plans
    assert planned.answer.cache == "file"
    with pytest.raises(remat.PlanMismatch, match=r"needs .* here, and the budget is"):
        remat.optimize(net(), X.repeat(4, 1), plan=saved, planner=Deaf())


def test_a_plan_that_keeps_more_on_the_host_than_it_may_is_refused_by_that(tmp_path: Path) -> None:
    path, link = tmp_path / "plan.json", "pcie4"
    remat.save_plans(remat.optimize(net(), X, budget="100%", link=link, planner=Mover(None)), path)
    pinned = remat.optimize(net(), X, plan=path, link=link, host_bytes="1GiB", planner=Deaf())
    assert remat.plans_of(pinned).plans
    with pytest.raises(remat.PlanMismatch, match="on the host, and host_bytes is 16 KiB"):
        remat.optimize(net(), X, plan=path, link=link, host_bytes="16KiB", planner=Deaf())


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (
            lambda: net(activation=nn.Sigmoid),
            r"op \d+ \(layers.0:addmm\+sigmoid\) is op \d+ \(layers.0:addmm\+tanh\) in the file",
        ),
        (lambda: net(layers=5), r"op \d+ \(.*\)"),
    ],
)
def test_another_step_is_refused_by_the_op_that_differs(saved: Path, other: object, named: str) -> None:
    with pytest.raises(remat.PlanMismatch, match=named):
        remat.optimize(other(), X, plan=saved, budget="90%", planner="greedy")


def test_a_later_call_that_is_another_step_is_planned_with_a_warning(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained = remat.optimize(net(), X, plan=saved, budget="90%", planner="greedy")
    with caplog.at_level(logging.WARNING, logger="remat"):
        trained(torch.ones(1, 64, requires_grad=True)).backward()  # its input has a gradient: other ops
    assert "planned as if there were no file" in caplog.text


def test_a_file_that_is_none_is_refused_before_capture(saved: Path, tmp_path: Path) -> None:
    model = net()
    with pytest.raises(InvalidData, match="cannot be read: No such file"):
        remat.optimize(model, X, plan=tmp_path / "no.json")
    with pytest.raises(InvalidData, match="path of a plan file"):
        remat.enable(model, plan=3)
    with pytest.raises(InvalidData, match="a budget is needed"):
        remat.optimize(model, X)
    with pytest.raises(InvalidData, match="mode='chain'"):
        remat.optimize(model, X, plan=saved, mode="chain")
    data = json.loads(saved.read_text())
    data["steps"][0]["answer"]["plan"]["steps"] = data["steps"][0]["answer"]["plan"]["steps"][1:]
    saved.write_text(json.dumps(data))
    with pytest.raises(InvalidData, match="plan"):
        remat.optimize(model, X, plan=saved)


def test_a_module_without_plans_has_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="no plan to write"):
        remat.save_plans(remat.enable(net(), budget="90%"), tmp_path / "plan.json")
    with pytest.raises(RuntimeError, match="not enabled"):
        remat.save_plans(net(), tmp_path / "plan.json")


def test_each_way_in_which_a_graph_may_differ_is_seen() -> None:
    """What a plan refers to is what is compared: ops, what they read and make, and the sets that bind plans."""
    from dataclasses import replace

    graph = graph_of([1, 2, 3], [4, 5, 6], [[], [0], [0, 1]])
    others = [
        replace(graph, op_inputs=((), (0,), (1,))),
        replace(graph, value_op=(0, 1, 1)),
        replace(graph, once=(1,)),
        replace(graph, keep=(2,)),
        replace(graph, optional=(2,)),
        replace(graph, backward_from=1),
        graph_of([1, 2, 3, 4], [4, 5, 6, 7], [[], [0], [0, 1], [2]]),
        replace(graph, op_names=("a:mm", "b:mm", "c:tanh")),
    ]
    named = replace(graph, op_names=("a:mm", "b:mm", "c:mm"))
    assert all(difference(named if other.op_names else graph, other) for other in others)
    assert difference(graph, replace(graph, op_cost_ns=(9, 9, 9), value_bytes=(9, 9, 9), fixed_bytes=9)) is None
    assert difference(named, replace(named, op_names=("x:mm", "y:mm", "z:mm"))) is None


@pytest.mark.thorough
def test_the_plans_of_a_divided_budget_are_taken_without_a_planner(tmp_path: Path) -> None:
    """Those of each graph of a forward that breaks, within the budget that they shared."""
    model, x, path = Broken(), torch.randn(256, 128), tmp_path / "plan.json"
    again = copy.deepcopy(model)
    remat.enable(model, budget="60%", planner="greedy")
    model(x).backward()
    with pytest.raises(InvalidData, match="has not been divided yet"):
        remat.save_plans(model, path)
    for _ in range(3):
        model(x).backward()
    remat.save_plans(model, path)
    remat.enable(again, plan=path, planner=Deaf())
    for _ in range(4):
        again.zero_grad()
        again(x).backward()
    one, other = (each.forward.backend.division for each in (model, again))
    assert (one.calls, one.overhead > 0, other.overhead) == (3, True, pytest.approx(one.overhead, abs=0.05))
    assert one.fixed_bytes + one.allowed_bytes == other.fixed_bytes + other.allowed_bytes
    again.zero_grad()
    assert peak_memory(lambda: again(x).backward()).peak_bytes <= other.predicted_bytes
