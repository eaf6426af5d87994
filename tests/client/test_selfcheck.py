"""The first step by a plan checks itself, and what is off is told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import remat
from client.small_models import numbers
from client.test_training import Net
from remat.profiling.measure import Lifetimes, Window
from remat.training.enable import backend_of
from remat.training.step import Planned

ARGS = (numbers(512, 64),)


def trained_by(change: Callable[[Planned], Planned] = lambda made: made, **options: bool) -> nn.Module:
    """A module that runs by a plan, or by what is made of it."""
    torch.manual_seed(0)
    made = remat.optimize(Net(), ARGS, budget=remat.Fraction(0.7), planner="greedy", **options)
    (found,) = backend_of(made).trained
    found.use(change(found.planned))
    return made


def test_the_first_step_is_measured_and_the_second_is_not(caplog: pytest.LogCaptureFixture) -> None:
    trained = trained_by()
    (planned,) = remat.plans_of(trained).plans
    with caplog.at_level(logging.INFO, "remat"):
        for _ in range(3):
            trained(*ARGS).backward()
    peak = remat.plans_of(trained).peaks[planned]
    assert peak.predicted_bytes == planned.activation_bytes
    assert peak.measured_bytes == pytest.approx(peak.predicted_bytes, rel=0.01)
    assert caplog.text.count("the first step peaked at") == 1
    assert not backend_of(trained).check.due
    assert "first step: peak" in remat.explain(trained)


def test_a_peak_that_is_off_is_told_after_a_second_look(caplog: pytest.LogCaptureFixture) -> None:
    trained = trained_by(lambda made: replace(made, predicted_bytes=made.predicted_bytes - made.activation_bytes // 10))
    (wrong,) = remat.plans_of(trained).plans
    with caplog.at_level(logging.INFO, "remat"):
        trained(*ARGS).backward()
        assert "the budget may not hold" not in caplog.text
        trained(*ARGS).backward()
        trained(*ARGS).backward()
    assert caplog.text.count("the budget may not hold") == 1
    assert remat.plans_of(trained).peaks[wrong].off == pytest.approx(1 / 9, abs=0.02)


def test_the_loss_of_the_caller_is_no_part_of_the_peak(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
    trained = remat.optimize(module, ARGS, budget=remat.Fraction(0.9), planner="greedy")
    with caplog.at_level(logging.INFO, "remat"):
        output = trained(*ARGS)
        (output.exp() * output.sin()).logsumexp(0).square().mean().backward()
    (peak,) = remat.plans_of(trained).peaks.values()
    assert peak.measured_bytes == pytest.approx(peak.predicted_bytes, rel=0.01)
    assert "as planned" in caplog.text


def test_it_can_be_switched_off_and_leaves_the_profiler_of_the_caller_alone() -> None:
    silent = trained_by(self_check=False)
    silent(*ARGS).backward()
    assert remat.plans_of(silent).peaks == {}
    trained = trained_by()
    (planned,) = remat.plans_of(trained).plans
    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        trained(*ARGS).backward()
    assert remat.plans_of(trained).peaks == {}
    assert len(theirs.events()) > 10
    trained(*ARGS)  # never runs backward, and says nothing
    assert remat.plans_of(trained).peaks == {}
    trained(*ARGS).backward()
    assert planned in remat.plans_of(trained).peaks


def test_planning_goes_on_under_the_profiler_of_the_caller() -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        made = remat.optimize(Net(), (numbers(96, 64),), budget=remat.Fraction(0.8), planner="greedy")
    assert len(remat.plans_of(made).plans) == 1


def test_what_another_thread_frees_is_gone_by_the_lifetimes_of_storages() -> None:
    """A CPU's allocator tells of it in the thread that frees: by its events both tensors are there at once."""
    found = {}
    for window in (Lifetimes(), Window()):
        window.open()
        held = [torch.ones(1000)]
        other = threading.Thread(target=held.clear)
        other.start()
        other.join()
        held.append(torch.ones(1000))
        found[type(window)] = window.close().peak_bytes
        held.clear()
    assert found == {Lifetimes: 4000, Window: 8000}
