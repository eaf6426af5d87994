"""Plans of captured steps that move values to the host and back: the bits of plain training, the predicted memory."""

from __future__ import annotations

import pytest
import torch

from client.small_models import CASES, Case
from client.test_exact import QUICK, WithLoss, callable_of, everything_again, outcome, peak, random_plan
from client.transferring import linked, with_transfers
from remat.planning.profiles import DiskProfiles
from remat.profiling import measure
from remat.training.step import running_peak, training_step
from remat_ir import Offload, plain_plan


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in sorted(CASES)])
def test_every_plan_with_transfers_trains_exactly(name: str, profiles: DiskProfiles) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    step = linked(training_step(case.module, case.args, case.kwargs, table=profiles))
    plain = outcome(case, case.module)
    moved = 0
    for seed, base in enumerate((plain_plan(step.graph), everything_again(step), random_plan(step, 1))):
        plan = with_transfers(step, base, seed)
        moved += sum(isinstance(part, Offload) for part in plan.steps)
        assert measure.differences(plain, outcome(case, callable_of(case, step, plan))) == []
    assert moved or name == "outputs_that_alias"  # which keeps all that it makes


@pytest.mark.parametrize("name", ["batch_norm_and_dropout", "tied_weights"])
def test_the_peak_is_the_predicted_one(name: str, profiles: DiskProfiles) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    whole = Case(WithLoss(case), case.args, case.kwargs, None)
    step = linked(training_step(whole.module, whole.args, whole.kwargs, table=profiles))
    for seed, base in enumerate((plain_plan(step.graph), everything_again(step), random_plan(step, 1))):
        plan = with_transfers(step, base, seed)
        predicted = running_peak(step, plan) - step.graph.fixed_bytes
        assert peak(whole, callable_of(whole, step, plan)) == pytest.approx(predicted, rel=0.01, abs=256)
