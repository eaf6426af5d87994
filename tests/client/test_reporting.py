"""The first steps by a plan check themselves, and what a job tells its log and its service of them and of the plan."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import remat
from client.small_models import numbers
from client.test_training import Net
from remat.planning.profiles import DiskProfiles, Profile
from remat.profiling.measure import Lifetimes, Window
from remat.profiling.profile import device_kind, signature
from remat.training.enable import backend_of
from remat.training.memory import SHORTEST_NS, TIMED_STEPS, StepPeak
from remat.training.step import Planned
from service.serving import Service, eventually, serving
from service.test_tenants import cli

ARGS = (numbers(512, 64),)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose tenant stores names."""
    with serving(tmp_path_factory.mktemp("reported"), workers=1) as running:
        yield running


def trained(service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int = 1 + TIMED_STEPS) -> nn.Module:
    """A module that has trained by the service's plan."""
    monkeypatch.setenv("REMAT_CACHE_DIR", str(folder))
    torch.manual_seed(0)
    made = remat.optimize(Net(), ARGS, budget=remat.Fraction(0.7), planner=service.url, time_limit_s=5)
    for _ in range(steps):
        made(*ARGS).backward()
    return made


def attached(service: Service, made: nn.Module) -> dict[str, Any]:
    """What the service has with the solve of a module's plan."""
    (planned,) = remat.plans_of(made).plans
    reply = service.http.get(f"/v1/solves/{planned.answer.id}/attachments")
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_nothing_is_told_unless_it_may(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trained(service, tmp_path, monkeypatch)
    assert attached(service, made) == {"run": None, "names": None}


def test_the_run_of_the_first_steps_is_reported_once_all_are_timed(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peak, and the least time of the steps after the first; the page of the solve shows both."""
    monkeypatch.setenv("REMAT_REPORT_RUNS", "1")
    made = trained(service, tmp_path, monkeypatch, steps=TIMED_STEPS)
    (left,) = backend_of(made).check.untimed.values()
    assert left == 1
    made(*ARGS).backward()
    eventually(lambda: attached(service, made)["run"] is not None)
    run = attached(service, made)["run"]
    (peak,) = remat.plans_of(made).peaks.values()
    assert {name: run[name] for name in peak._fields} == peak._asdict()
    assert run["measured_ns"] > 0
    assert run["device"]
    assert not backend_of(made).check.untimed


def test_names_are_sent_where_the_service_stores_them(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By module and operator, with the line of the model's code; a service that stores none is told of once, softly."""
    monkeypatch.setenv("REMAT_SEND_NAMES", "1")
    with caplog.at_level(logging.INFO, "remat"):
        refused = trained(service, tmp_path / "a", monkeypatch, steps=0)
        eventually(lambda: "names of ops were not stored" in caplog.text)
    assert attached(service, refused)["names"] is None
    cli(service, "tenants", "names", "default", "on")
    made = trained(service, tmp_path / "b", monkeypatch, steps=0)
    eventually(lambda: attached(service, made)["names"] is not None)
    names = attached(service, made)["names"]
    (planned,) = remat.plans_of(made).plans
    assert len(names["names"]) == len(names["where"]) == planned.step.graph.ops
    assert names["names"] == list(planned.step.graph.op_names or ())
    assert any(place.startswith("client/test_training.py:") for place in names["where"])


@pytest.mark.parametrize(("tolerance", "contradicted"), [(0.0, True), (1e9, False)])
def test_a_profile_that_a_step_contradicts_is_measured_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tolerance: float,
    contradicted: bool,
) -> None:
    """By a tolerance that every step is beyond: a warning after a few steps, and the kernels' times are forgotten."""
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    made = remat.optimize(Net(), ARGS, budget=remat.Fraction(0.7), planner="greedy")
    (graph,) = backend_of(made).trained
    kernels = list(graph.planned.step.profiled.kernels)
    table, device = DiskProfiles(tmp_path / "profiles"), device_kind(kernels)
    known = table.get(device, map(signature, kernels))
    assert known
    monkeypatch.setattr("remat.training.memory.SHORTEST_NS", 1)
    monkeypatch.setattr("remat.training.memory.TIME_TOLERANCE", tolerance)
    with caplog.at_level(logging.WARNING, "remat"):
        for _ in range(1 + TIMED_STEPS):
            made(*ARGS).backward()
    assert ("are measured again for the next plan" in caplog.text) == contradicted
    assert table.get(device, known) == ({} if contradicted else known)


def test_a_contradicted_profile_of_several_sizes_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes share one graph of symbols, whose nodes say nothing of what was measured."""
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("remat.training.memory.SHORTEST_NS", 1)
    monkeypatch.setattr("remat.training.memory.TIME_TOLERANCE", 0.0)
    made = remat.enable(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), budget="100%", planner="greedy")
    for rows in (16, 24, 32):
        for _ in range(1 + TIMED_STEPS):
            made(torch.ones(rows, 8)).sum().backward()
    for trained in backend_of(made).trained:
        profiled = trained.planned.step.profiled
        assert profiled.known
        assert DiskProfiles(tmp_path / "profiles").get(device_kind(profiled.kernels), profiled.known) == {}


@pytest.mark.parametrize(
    ("predicted", "measured", "apart"),
    [(131, 100, True), (129, 100, False), (100, 131, False), (100, 500, False), (100, None, False)],
)
def test_kernels_slower_than_their_step_contradict_it(predicted: int, measured: int | None, apart: bool) -> None:
    scale = SHORTEST_NS // 10
    took = None if measured is None else measured * scale
    assert StepPeak(1, 1, predicted * scale, took).contradicts_profile == apart
    assert not StepPeak(1, 1, predicted, measured).contradicts_profile  # some hundred ns: calls, not kernels


def test_forgotten_profiles_are_measured_by_the_next(tmp_path: Path) -> None:
    table = DiskProfiles(tmp_path)
    table.put("cpu", {"a": Profile(5, 0), "b": Profile(6, 0)})
    table.forget("cpu", ["a", "missing"])
    assert table.get("cpu", ["a", "b"]) == {"b": Profile(6, 0)}
    assert table.put("cpu", {"a": Profile(7, 0)}) == {"a": Profile(7, 0)}


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
