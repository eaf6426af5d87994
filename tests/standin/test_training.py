"""Training by plans on the stand-in: the bits of training without one, both generators, the predicted memory."""

from __future__ import annotations

import pytest
import torch
from benchmarks.models.zoo import build

from client.small_models import CASES, Case
from client.test_exact import WithLoss, callable_of, everything_again, outcome, random_plan
from remat.planning.profiles import DiskProfiles
from remat.profiling import measure
from remat.training.step import TrainingStep, running_peak, training_step
from remat_ir import plain_plan
from standin.movable import moved

pytestmark = pytest.mark.standin
DEVICE = torch.device("cuda:0")


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> DiskProfiles:
    return DiskProfiles(tmp_path_factory.mktemp("profiles"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def trains_exactly(case: Case, profiles: DiskProfiles) -> TrainingStep:
    step = training_step(case.module, case.args, case.kwargs, table=profiles)
    plain = outcome(case, case.module)
    assert [str(device.device) for device, _ in plain.generators.states] == ["cpu", "cuda:0"]
    for plan in (everything_again(step), random_plan(step, 1)):
        assert measure.differences(plain, outcome(case, callable_of(case, step, plan))) == []
    return step


ON_THE_HOST = ("tensors_that_are_no_buffers",)
"""Makes a tensor on the CPU within its forward, and adds it to another: no case for a device."""


@pytest.mark.parametrize("name", sorted(CASES.keys() - set(ON_THE_HOST)))
def test_every_plan_trains_exactly(name: str, profiles: DiskProfiles) -> None:
    torch.manual_seed(0)
    trains_exactly(moved(CASES[name](), DEVICE), profiles)


@pytest.mark.parametrize("name", ["vgg", "gpt2", "resnet_basic"])
def test_models_of_the_zoo_train_exactly(name: str, profiles: DiskProfiles) -> None:
    subject = build(name)
    trains_exactly(moved(Case(subject.model, (), dict(subject.inputs), None), DEVICE), profiles)


@pytest.mark.parametrize("name", ["batch_norm_and_dropout", "attention_with_dropout", "tied_weights"])
def test_the_peak_is_the_predicted_one(name: str, profiles: DiskProfiles) -> None:
    """To the granule: a prediction that does not round as the allocator does is off by more."""
    torch.manual_seed(0)
    case = moved(CASES[name](), DEVICE)
    whole = Case(WithLoss(case), case.args, case.kwargs, None)
    step = training_step(whole.module, whole.args, whole.kwargs, table=profiles)
    for plan in (plain_plan(step.graph), everything_again(step), random_plan(step, 1)):
        predicted = running_peak(step, plan) - step.graph.fixed_bytes
        assert peak_there(whole, callable_of(whole, step, plan)) == pytest.approx(predicted, rel=0.01, abs=2048)


def peak_there(case: Case, function) -> int:  # type: ignore[no-untyped-def]
    run = measure.forward_backward(function, case.args, case.kwargs, case.loss)
    found = 0
    for _ in range(2):
        case.module.zero_grad()
        found = measure.peak_memory(run, DEVICE).allocated_bytes
    return found
