"""Training by plans on the stand-in, with and without transfers: the bits of training without one, both generators.

Side streams run eagerly and lazily, and freed memory is overwritten; the memory is the predicted one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import remat
from client.comparing import step_differences
from client.small_models import Case
from client.test_exact import callable_of, everything_again, outcome, random_plan
from client.test_target import SCRIPT, remat_command
from client.transferring import linked, with_transfers
from remat.lowering import transfers
from remat.lowering.link import UnderWay
from remat.planning.plan_file import PlanFile, difference
from remat.planning.profiles import DiskProfiles
from remat.profiling import measure
from remat.target.build import load
from remat.training.step import TrainingStep, training_step
from remat_ir import Plan, plain_plan
from standin import device
from standin.movable import ALL, DEVICE, peaks_off, subject, with_loss

pytestmark = pytest.mark.standin
NAMES = ("batch_norm_and_dropout", "attention_with_dropout", "tied_weights")


@pytest.mark.parametrize("name", ALL)
def test_every_plan_trains_exactly(name: str, profiles: DiskProfiles) -> None:
    case = subject(name)
    step = training_step(case.module, case.args, case.kwargs, table=profiles)
    plain = outcome(case, case.module)
    assert [str(there.device) for there, _ in plain.generators.states] == ["cpu", "cuda:0"]
    for plan in (everything_again(step), random_plan(step, 1)):
        assert measure.differences(plain, outcome(case, callable_of(case, step, plan))) == []


def drawn(case: Case, profiles: DiskProfiles, moves: bool = True) -> tuple[TrainingStep, list[Plan]]:
    """The step of a case, and plans of it, with transfers if values move."""
    step = training_step(case.module, case.args, case.kwargs, table=profiles)
    step = linked(step) if moves else step
    plans = [plain_plan(step.graph), everything_again(step), random_plan(step, 1)]
    if moves:
        plans = [with_transfers(step.graph, plan, seed, share=1.0) for seed, plan in enumerate(plans)]
    return step, plans


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_peak_is_the_predicted_one(name: str, moves: bool, profiles: DiskProfiles) -> None:
    whole = with_loss(subject(name))
    assert peaks_off(whole, *drawn(whole, profiles, moves)) == []


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_transfers_leave_plain_bits_however_late_they_run(name: str, lazy: bool, profiles: DiskProfiles) -> None:
    case = subject(name)
    step, plans = drawn(case, profiles)
    plain = outcome(case, case.module)
    with device.lazy_streams(lazy):
        for plan in plans:
            assert measure.differences(plain, outcome(case, callable_of(case, step, plan))) == []


def no_wait_for_copies_back(patch: pytest.MonkeyPatch) -> None:
    """Ops read what is still under way."""

    def prefetched(returning: transfers.Moving) -> list[torch.Tensor]:
        return [place.on(returning.storage) for place in returning.away.places]

    patch.setattr(transfers, "prefetched", prefetched)
    patch.setattr(UnderWay, "__del__", lambda self: None)


def no_wait_for_copies_out(patch: pytest.MonkeyPatch) -> None:
    """A storage is freed while it is copied out."""

    def offloaded(leaving: transfers.Moving) -> transfers.Away:
        return leaving.away

    patch.setattr(transfers, "offloaded", offloaded)
    patch.setattr(UnderWay, "__del__", lambda self: None)


@pytest.mark.parametrize("mutate", [no_wait_for_copies_back, no_wait_for_copies_out])
def test_a_wait_that_is_forgotten_is_seen(
    mutate: Callable[[pytest.MonkeyPatch], None], profiles: DiskProfiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = subject("attention_with_dropout")
    step, plans = drawn(case, profiles)
    plain = outcome(case, case.module)
    mutate(monkeypatch)
    with device.lazy_streams(True):
        assert any(measure.differences(plain, outcome(case, callable_of(case, step, plan))) for plan in plans)


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
    assert step_differences(model, trained, args) == []
