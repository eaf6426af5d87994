"""Training by plans on the stand-in: the bits of training without one, both generators, the predicted memory."""

from __future__ import annotations

import pytest

from client.test_exact import callable_of, everything_again, outcome, random_plan
from remat.planning.profiles import DiskProfiles
from remat.profiling import measure
from remat.training.step import training_step
from remat_ir import plain_plan
from standin.movable import ALL, peaks_off, subject, with_loss

pytestmark = pytest.mark.standin


@pytest.mark.parametrize("name", ALL)
def test_every_plan_trains_exactly(name: str, profiles: DiskProfiles) -> None:
    case = subject(name)
    step = training_step(case.module, case.args, case.kwargs, table=profiles)
    plain = outcome(case, case.module)
    assert [str(device.device) for device, _ in plain.generators.states] == ["cpu", "cuda:0"]
    for plan in (everything_again(step), random_plan(step, 1)):
        assert measure.differences(plain, outcome(case, callable_of(case, step, plan))) == []


@pytest.mark.parametrize("name", ["batch_norm_and_dropout", "attention_with_dropout", "tied_weights"])
def test_the_peak_is_the_predicted_one(name: str, profiles: DiskProfiles) -> None:
    whole = with_loss(subject(name))
    step = training_step(whole.module, whole.args, whole.kwargs, table=profiles)
    assert peaks_off(whole, step, (plain_plan(step.graph), everything_again(step), random_plan(step, 1))) == []
