"""What a kernel really allocates is what the plan counts for it."""

from __future__ import annotations

import itertools
import logging
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
from client.small_models import Mlp, module_of, numbers
from remat import _compat
from remat.capture.dataflow import dataflow, tensors
from remat.compile.alone import capture
from remat.device import of
from remat.planning.http import Http
from remat.planning.profiles import DiskProfiles, Profile, SharedProfiles
from remat.profiling import profile, timing
from remat.training.step import training_step
from service.serving import serving
from tiers import first


@pytest.mark.parametrize(
    "loss",
    first(
        3,
        [
            F.mse_loss,
            F.l1_loss,
            F.smooth_l1_loss,
            F.huber_loss,
            F.binary_cross_entropy,
            F.soft_margin_loss,
            partial(F.kl_div, reduction="batchmean"),
            F.poisson_nll_loss,
            F.cross_entropy,
            lambda x, target: F.fold(x.reshape(2, 4, 16).mT.contiguous().mT, (5, 5), (2, 2)).square().mean(),
        ],
    ),
)
def test_a_kernel_allocates_what_is_counted_for_it(loss: Callable[..., torch.Tensor]) -> None:
    module = module_of(lambda self, x, target: self.loss(self.inner(x).sigmoid(), target), inner=Mlp(16), loss=loss)
    captured = capture(module, (numbers(8, 16), numbers(8, 16).sigmoid()), {})
    flow = dataflow(captured.joint, captured.forward_outputs)
    with _compat.only_real_tensors(), torch.no_grad():
        for node in flow.kernels:
            real = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors(profile._call(node)())}
            assert sorted(real.values()) == sorted(flow.sizes[s] for s in flow.makes[node]), node


def test_statistics_are_not_held_for_the_backward_pass() -> None:
    """Batch normalization in training hands its running statistics to its backward pass, which does not read them."""
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())
    captured = capture(model, (numbers(8, 16),), {})
    flow = dataflow(captured.joint, captured.forward_outputs)
    new = {s for result in flow.mutated.values() for s in flow.storages_of[result]}
    assert new
    assert not any(new & set(flow.reads[node]) for node in flow.kernels[flow.forward_kernels :])


@torch.library.custom_op("remat_tests::above_one", mutates_args=())
def above_one(x: torch.Tensor) -> torch.Tensor:
    if not bool((x > 1).all()):
        raise RuntimeError("all of x must be above one")
    return x - 1


@above_one.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("remat_tests::drawn_above_one", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def drawn_above_one(x: torch.Tensor) -> torch.Tensor:
    """Of which it is known that it draws numbers, and so no more than that."""
    return above_one(x)


@drawn_above_one.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_kernel_that_refuses_made_up_numbers_is_measured_on_the_calls(caplog: pytest.LogCaptureFixture) -> None:
    picky = module_of(lambda self, x: self.inner(above_one(x)).square().mean(), inner=Mlp(16))
    with caplog.at_level("INFO", logger="remat"):
        step = training_step(picky, (numbers(4, 16).abs() + 2,), {}, functional=("remat_tests::above_one",))
    assert "above_one.default) refuses made-up inputs (all of x" in caplog.text
    assert "it is measured on what precedes it makes" in caplog.text
    assert not step.profiled.neighbours


def test_a_kernel_that_refuses_all_inputs_takes_a_neighbours_cost(caplog: pytest.LogCaptureFixture) -> None:
    """Under fake tensors there are no real ones; the report says how many kernels were not measured."""
    module = module_of(lambda self, x: self.inner(drawn_above_one(x)).square().mean(), inner=Mlp(16))
    with caplog.at_level("WARNING", logger="remat"):
        x = numbers(4, 16).abs() + 2
        loss = torch.compile(module, backend=remat.backend(remat.Fraction(1.0), planner="greedy"))(x)
    assert "taken for its neighbour in size" in caplog.text
    assert torch.equal(loss, module(x))


@pytest.mark.parametrize("name", ["autocast", "meta"])
def test_what_is_measured_where_inputs_are_not_as_the_metadata_say(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Statistics of batch normalization in bfloat16 are float32 numbers, and a meta device has no clock."""
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    x = numbers(2, 3, 8, 8)
    with caplog.at_level("INFO", logger="remat"):
        if name == "meta":
            said = remat.explain(module.to("meta"), (x.to("meta"),), budget=remat.Fraction(1.0), planner="greedy")
            assert "times say nothing" in said
            return
        with torch.autocast("cpu", torch.bfloat16):
            step = training_step(module, (x,), {})
    assert "native_batch_norm_backward.default) refuses made-up inputs" in caplog.text
    assert not step.profiled.neighbours


def test_costs_that_no_device_has_are_measured_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A table that says that kernels are free is not believed; what is measured stands from then on."""
    captured = capture(Mlp(16), (numbers(8, 16),), {})
    kernels = dataflow(captured.joint, captured.forward_outputs).kernels
    table, device = DiskProfiles(tmp_path), profile.device_kind(kernels)
    table.put(device, {profile.signature(node): Profile(0, 0) for node in kernels})
    measured = profile.profile_kernels(kernels, table)
    assert measured.shared == 0
    assert all(kernel.cost_ns >= profile.CALL_NS for kernel in measured.kernels.values())
    assert "less than any device needs" in caplog.text
    again = profile.profile_kernels(kernels, table)
    assert again.shared == again.signatures
    assert again.kernels == measured.kernels


@pytest.mark.parametrize(("factor", "believed"), [(1, True), (30, False)])
def test_a_table_that_a_busy_machine_filled_is_not_believed(
    factor: int, believed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its costliest kernels are measured again; where they contradict it, all are, and this machine's own count."""
    captured = capture(Mlp(512), (numbers(2048, 512),), {})
    kernels = dataflow(captured.joint, captured.forward_outputs).kernels
    first, second = (profile.profile_kernels(kernels) for _ in range(2))
    lesser = {n: min(m, second.kernels[n]) for n, m in first.kernels.items()}
    table, device = DiskProfiles(tmp_path), profile.device_kind(kernels)
    told = {profile.signature(n): Profile(factor * m.cost_ns, m.workspace_bytes) for n, m in lesser.items()}
    table.put(device, told)
    found = profile.profile_kernels(kernels, table)
    assert (found.shared == 0) != believed
    assert ("all are measured anew" in caplog.text) != believed
    total = sum(m.cost_ns for m in found.kernels.values())
    assert total < 10 * sum(m.cost_ns for m in first.kernels.values())
    stands = table.get(device, list(told))
    assert {n: stands[profile.signature(n)].cost_ns for n in kernels} == {
        n: m.cost_ns for n, m in found.kernels.items()
    }, "what was measured anew stands on this machine"
    assert (found.spread is None) == believed
    assert first.spread is not None


@pytest.mark.thorough
@pytest.mark.parametrize("factor", [1.9, 1 / 1.9])
def test_a_shared_table_that_is_off_throughout_decides_no_plan(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No cost is twice off, and most are: the job measures all kernels itself, plans by that, and reports it."""
    module, args = Mlp(512), (numbers(4096, 512),)
    step = training_step(module, args, {})
    again = profile.profile_kernels(step.operations.flow.kernels)
    kernels = {node: min(measured, again.kernels[node]) for node, measured in step.profiled.kernels.items()}
    device = profile.device_kind(kernels)
    told = {  # odd, so that no cost that is measured, which has two digits, equals one of the table
        profile.signature(n): Profile(max(1001, round(factor * m.cost_ns)) | 1, m.workspace_bytes)
        for n, m in kernels.items()
    }
    with serving(tmp_path, workers=1) as service:
        other = SharedProfiles(Http(service.url), DiskProfiles(tmp_path / "other"))
        assert other.put(device, told) == told
        monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "here"))
        made = remat.optimize(module, args, budget=remat.Fraction(0.8), planner=service.url, time_limit_s=5)
        (planned,) = remat.plans_of(made).plans
        assert caplog.text.count("all are measured anew") == 1
        profiled = planned.step.profiled
        assert profiled.shared == 0
        assert not {m.cost_ns for m in profiled.kernels.values()} & {m.cost_ns for m in told.values()}
        sent = service.http.get(f"/v1/solves/{planned.answer.id}/problem").json()["graph"]
        assert sum(sent["op_cost_ns"]) == sum(m.cost_ns for m in profiled.kernels.values())
        with closing(sqlite3.connect(next(tmp_path.glob("*.sqlite")))) as database:
            reports = dict(database.execute("SELECT signature, cost_ns FROM profile_reports").fetchall())
        assert reports == {profile.signature(n): m.cost_ns for n, m in profiled.kernels.items()}


@pytest.mark.parametrize("factor", [21.7, 1 / 21.7])
def test_one_wrong_cost_of_a_table_decides_nothing(
    factor: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """4,294 ms in place of 198, for one kernel alone: it counts as it is measured here, and so from then on."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """Several products of one width, and an activation that is a small part of the step."""
        return self.layers(x).tanh().square().mean() + self.layers[0](x).tanh().sum()

    layers = nn.Sequential(*(nn.Linear(384, 384) for _ in range(4)), nn.Linear(384, 8))
    captured = capture(module_of(forward, layers=layers), (numbers(4096, 384),), {})
    kernels = dataflow(captured.joint, captured.forward_outputs).kernels
    first = profile.profile_kernels(kernels)
    by_cost = sorted(first.kernels, key=lambda n: -first.kernels[n].cost_ns)
    wrong = next(n for n in by_cost if "tanh" in str(n.target)) if factor > 1 else by_cost[0]
    table, device = DiskProfiles(tmp_path), profile.device_kind(kernels)
    told = {profile.signature(n): Profile(*m) for n, m in first.kernels.items()}
    told[profile.signature(wrong)] = Profile(round(factor * first.kernels[wrong].cost_ns), 0)
    table.put(device, told)
    found = profile.profile_kernels(kernels, table)
    assert "these count as here" in caplog.text
    assert found.shared >= found.signatures - 2, "the others are believed"
    stands = table.get(device, [profile.signature(wrong)])[profile.signature(wrong)]
    for cost in (found.kernels[wrong].cost_ns, stands.cost_ns):
        assert 1 / 3 < cost / first.kernels[wrong].cost_ns < 3


def test_samples_that_lie_apart_are_taken_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a kernel that other work slows down two times of three, the quicker samples count."""
    caplog.set_level(logging.INFO, "remat")
    monkeypatch.setattr(timing, "ROUNDS", 3)
    monkeypatch.setattr(timing, "SAMPLES", 3)
    calls = itertools.count()

    def kernel() -> torch.Tensor:
        return torch.ones(100).sum() if next(calls) % 3 else torch.ones(3_000_000).sum()

    timed = timing.times({"odd": lambda: kernel}, {"odd": of("cpu")})
    assert timed.costs["odd"] < 500_000
    assert timed.spread > timing.NOISY
    assert "the quicker ones count" in caplog.text


def test_no_memory_is_written_so_fast() -> None:
    """The floor of a kernel's cost grows with what it makes."""
    captured = capture(Mlp(16), (numbers(8, 16),), {})
    node = dataflow(captured.joint, captured.forward_outputs).kernels[0]
    node.meta["val"] = torch.empty(2**31, device="meta")
    least = profile.CALL_NS + 2**33 // profile.MOST_BYTES_PER_NS
    told = {"less": Profile(least - 1, 0), "enough": Profile(least, 0)}
    assert list(profile.believed(told, {key: [node] for key in told})) == ["enough"]
