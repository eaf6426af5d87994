"""Mutants of the client: each breaks one thing that only a device shows, and the lane's own checks must see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from client.small_models import CASES, Case
from client.test_exact import WithLoss, callable_of, everything_again, outcome
from remat.device import Accelerator, of
from remat.lowering import codegen, lower
from remat.profiling import measure
from remat.training.step import TrainingStep, running_peak, training_step
from standin.movable import moved
from standin.test_training import DEVICE, peak_there

pytestmark = pytest.mark.standin

Check = Callable[[Case], bool]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def step_of(case: Case) -> TrainingStep:
    return training_step(case.module, case.args, case.kwargs)


def bits_are_plain(case: Case) -> bool:
    plain, step = outcome(case, case.module), step_of(case)
    return measure.differences(plain, outcome(case, callable_of(case, step, everything_again(step)))) == []


def peak_is_predicted(case: Case) -> bool:
    case = Case(WithLoss(case), case.args, case.kwargs, None)
    step = step_of(case)
    plan = everything_again(step)
    predicted = running_peak(step, plan) - step.graph.fixed_bytes
    return peak_there(case, callable_of(case, step, plan)) == pytest.approx(predicted, rel=0.01, abs=2048)


def replay_from_now(patch: pytest.MonkeyPatch) -> None:
    """A recomputation draws new numbers."""

    def replay(state: torch.Tensor, device: str, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        now = of(device).generator_state()
        try:
            return target(*args, **kwargs)
        finally:
            of(device).set_generator_state(now)

    patch.setattr(lower, "replay", replay)


def replay_that_stays(patch: pytest.MonkeyPatch) -> None:
    """A recomputation draws the numbers again, and leaves the generator where they ended."""

    def replay(state: torch.Tensor, device: str, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        of(device).set_generator_state(state)
        return target(*args, **kwargs)

    patch.setattr(lower, "replay", replay)


def no_rounding(patch: pytest.MonkeyPatch) -> None:
    """Sizes are counted as they are asked for."""
    patch.setattr(Accelerator, "GRANULE", 1)


def nothing_is_freed_early(patch: pytest.MonkeyPatch) -> None:
    """Values live to the end of their pass."""
    patch.setattr(codegen, "_last_uses", lambda nodes: {})


@pytest.mark.parametrize(
    ("mutate", "case", "check"),
    [
        (replay_from_now, "mlp_with_dropout", bits_are_plain),
        (replay_that_stays, "mlp_with_dropout", bits_are_plain),
        (no_rounding, "tied_weights", peak_is_predicted),
        (nothing_is_freed_early, "mlp_with_dropout", peak_is_predicted),
    ],
)
def test_the_checks_see_a_broken_client(
    mutate: Callable[[pytest.MonkeyPatch], None], case: str, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    assert check(moved(CASES[case](), DEVICE))
    with monkeypatch.context() as patch:
        mutate(patch)
        torch.manual_seed(0)
        assert not check(moved(CASES[case](), DEVICE))
