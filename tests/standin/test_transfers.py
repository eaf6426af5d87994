"""Captured steps with transfers on the stand-in: eager and lazy side streams, freed memory overwritten."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from client.small_models import Case
from client.test_exact import callable_of, everything_again, outcome, random_plan
from client.transferring import linked, with_transfers
from remat.lowering import transfers
from remat.lowering.link import StreamLink, UnderWay
from remat.planning.profiles import DiskProfiles
from remat.profiling import measure
from remat.training.step import TrainingStep, training_step
from remat_ir import Plan, plain_plan
from standin import device
from standin.movable import peaks_off, subject, with_loss

pytestmark = pytest.mark.standin
NAMES = ("batch_norm_and_dropout", "attention_with_dropout", "tied_weights")


def drawn(case: Case, profiles: DiskProfiles) -> tuple[TrainingStep, list[Plan]]:
    """The step of a case, and plans of it with transfers."""
    step = linked(training_step(case.module, case.args, case.kwargs, table=profiles))
    bases = (plain_plan(step.graph), everything_again(step), random_plan(step, 1))
    return step, [with_transfers(step.graph, base, seed, share=1.0) for seed, base in enumerate(bases)]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_transfers_leave_plain_bits_however_late_they_run(name: str, lazy: bool, profiles: DiskProfiles) -> None:
    case = subject(name)
    step, plans = drawn(case, profiles)
    plain = outcome(case, case.module)
    with device.lazy_streams(lazy):
        for plan in plans:
            assert measure.differences(plain, outcome(case, callable_of(case, step, plan))) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_peak_is_the_predicted_one(name: str, profiles: DiskProfiles) -> None:
    whole = with_loss(subject(name))
    assert peaks_off(whole, *drawn(whole, profiles)) == []


def no_wait_at_all(patch: pytest.MonkeyPatch) -> None:
    """Neither direction is waited for."""
    patch.setattr(StreamLink, "wait", lambda self, token: None)
    patch.setattr(UnderWay, "__del__", lambda self: None)


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


@pytest.mark.parametrize("mutate", [no_wait_at_all, no_wait_for_copies_back, no_wait_for_copies_out])
def test_a_wait_that_is_forgotten_is_seen(
    mutate: Callable[[pytest.MonkeyPatch], None], profiles: DiskProfiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = subject("attention_with_dropout")
    step, plans = drawn(case, profiles)
    plain = outcome(case, case.module)
    mutate(monkeypatch)
    with device.lazy_streams(True):
        assert any(measure.differences(plain, outcome(case, callable_of(case, step, plan))) for plan in plans)
