"""Mutants of the client: each breaks one thing that only a device shows, and the lane's own checks must see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from client.small_models import Case
from client.test_exact import callable_of, everything_again, outcome
from remat.device import Accelerator, of
from remat.lowering import codegen, lower
from remat.profiling import measure
from remat.training.step import TrainingStep, training_step
from standin.movable import peaks_off, subject, with_loss

pytestmark = pytest.mark.standin

Check = Callable[[Case], bool]


def step_of(case: Case) -> TrainingStep:
    return training_step(case.module, case.args, case.kwargs)


def bits_are_plain(case: Case) -> bool:
    plain, step = outcome(case, case.module), step_of(case)
    return measure.differences(plain, outcome(case, callable_of(case, step, everything_again(step)))) == []


def peak_is_predicted(case: Case) -> bool:
    whole = with_loss(case)
    step = step_of(whole)
    return not peaks_off(whole, step, [everything_again(step)])


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
        (replay_that_stays, "mlp_with_dropout", bits_are_plain),
        (no_rounding, "tied_weights", peak_is_predicted),
        (nothing_is_freed_early, "mlp_with_dropout", peak_is_predicted),
    ],
)
def test_the_checks_see_a_broken_client(
    mutate: Callable[[pytest.MonkeyPatch], None], case: str, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(subject(case))
    with monkeypatch.context() as patch:
        mutate(patch)
        assert not check(subject(case))
