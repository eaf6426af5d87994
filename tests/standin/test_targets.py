"""A plan that was made without the device is one of the step that is captured on it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import remat
from client.test_target import SCRIPT, remat_command
from remat.planning.plan_file import PlanFile, difference
from remat.profiling.measure import differences, forward_backward, outcome
from remat.target.build import load

pytestmark = pytest.mark.standin
DEVICE = torch.device("cuda:0")


def test_a_plan_for_a_named_device_trains_on_it_bit_for_bit(tmp_path: Path) -> None:
    """Planned by a process that has no device, from fake tensors; captured from real ones here: the same graph."""
    path = tmp_path / "train_script.py"
    path.write_text(SCRIPT)
    ran = remat_command("plan", path.name, "-d", "h100", "-b", "80%", "--local", "-o", "plan.json", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    (planned,) = PlanFile(tmp_path / "plan.json").steps
    assert any("efficient_attention" in name for name in planned.graph.op_names or ())
    torch.manual_seed(0)
    model, args = load(str(path))()
    model, args = model.to(DEVICE), tuple(a.to(DEVICE) for a in args)
    # what kernels take while they run is not modelled by the plan's prices, and the stand-in's take some
    trained = remat.optimize(copy.deepcopy(model), args, plan=tmp_path / "plan.json", budget="95%", planner="greedy")
    (here,) = remat.plans_of(trained).plans
    assert difference(here.step.graph, planned.graph) is None
    assert here.step.graph.value_bytes == planned.graph.value_bytes
    assert here.answer.plan == planned.answer.plan
    plain = outcome(model, forward_backward(model, args))
    assert differences(plain, outcome(trained, forward_backward(trained, args))) == []
