"""What a job tells its service of a plan: names of ops and measured runs, each only where it may."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from client.small_models import numbers
from client.test_training import Net
from remat.planning.profiles import DiskProfiles, Profile
from remat.profiling.profile import device_kind, signature
from remat.training.enable import backend_of
from remat.training.memory import SHORTEST_NS, TIMED_STEPS, StepPeak
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
