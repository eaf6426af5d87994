"""A device that is not here: its kernels, their prices, the commands that plan for it, and models by configurations."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

import remat
from client.commands import command as command  # a fixture
from client.small_models import module_of
from drawn import examples
from remat.capture.dataflow import dataflow
from remat.compile.alone import capture
from remat.errors import PlanMismatch
from remat.planning.links import OF_TARGET, named_link
from remat.planning.plan_file import PlanFile
from remat.planning.profiles import Profile
from remat.profiling.profile import signature
from remat.target.build import build, choice, load, tracing_for
from remat.target.configs import by_config, config_of, presets
from remat.target.devices import ACHIEVED, TARGETS, target_of
from remat.target.price import class_of, operations_of, price, spread
from remat.target.step import target_step
from remat_ir import Graph, InvalidData, Plan, plain_plan
from tiers import first

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)

SCRIPT = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.scale * nn.functional.dropout(self.down(nn.functional.gelu(self.up(x))), 0.1, self.training)

class Net(nn.Module):
    def __init__(self, width=64, layers=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.rates = [r.item() for r in torch.linspace(0, 1, layers, device="cpu")]

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sum()

def make_model(batch=8):
    return Net(), (torch.randn(batch, 32, 64),)

def halves(batch=8):
    return Net().to(torch.bfloat16).cuda(), (torch.randn(batch, 32, 64, dtype=torch.bfloat16, device="cuda"),)

def broken():
    raise ValueError("no such weights")

def reads():
    return Net(), (torch.ones(int(torch.ones(()).item()), 32, 64),)

def nothing():
    return 3

number = 3
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train_script.py"
    path.write_text(SCRIPT)
    return path


def kernels_of(model: str, batch: int | None = None) -> Sequence[fx.Node]:
    with tracing_for(CUDA):
        built = build(load(model), CUDA, batch=batch)
        captured = capture(built.model, built.args, built.kwargs)
    assert all(p.device == CUDA for p in built.model.parameters())
    return dataflow(captured.joint, captured.forward_outputs).kernels


def test_the_kernels_of_a_cuda_device_are_in_the_graph(script: Path) -> None:
    halves, singles = ({node.target for node in kernels_of(name)} for name in (f"{script}:halves", str(script)))
    assert aten._scaled_dot_product_flash_attention.default in halves
    assert aten._scaled_dot_product_flash_attention_backward.default in halves
    assert aten._scaled_dot_product_efficient_attention_backward.default in singles
    assert aten.native_dropout.default in halves & singles


def test_a_device_before_flash_attention_has_another_kernel(script: Path) -> None:
    steps = [target_step(load(f"{script}:halves"), device).step for device in ("v100", "a100")]
    early, later = ({node.target for node in step.operations.flow.kernels} for step in steps)
    assert aten._scaled_dot_product_flash_attention.default in later - early
    assert aten.bmm.default in early - later


@pytest.mark.thorough
def test_nothing_stays_behind_where_there_is_no_device(script: Path) -> None:
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()  # autograd has counted its devices
    kernels_of(f"{script}:halves")
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    assert torch.cuda.is_available() or torch.accelerator.current_accelerator() is None
    out = nn.functional.scaled_dot_product_attention(*(torch.ones(1, 2, 8, 8) for _ in range(3)))
    assert out.device.type == "cpu"


def _qkv(*shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(shape, dtype=dtype, device="meta") for _ in range(3))


@pytest.mark.thorough
def test_attention_is_chosen_as_on_the_device() -> None:
    mask = torch.empty(1, 1, 32, 32, device="meta")
    assert choice(*_qkv(2, 4, 32, 64), None, True, False) == "flash"  # type: ignore[call-arg]
    assert choice(*_qkv(2, 4, 32, 64), mask, False, False) == "efficient"  # type: ignore[call-arg]
    assert choice(*_qkv(2, 4, 32, 64, dtype=torch.float32), None, False, False) == "efficient"  # type: ignore[call-arg]
    assert choice(*_qkv(2, 4, 32, 64, dtype=torch.float64), None, False, False) == "math"  # type: ignore[call-arg]
    assert choice(*_qkv(2, 4, 32, 320), None, False, False) == "efficient"  # type: ignore[call-arg]
    assert choice(*_qkv(2, 4, 32, 3, dtype=torch.float32), None, False, False) == "math"  # type: ignore[call-arg]
    query, key, value = *_qkv(2, 4, 32, 64)[:1], *_qkv(2, 2, 32, 64)[:2]
    assert choice(query, key, value, None, True, True) == "flash"
    assert choice(query, key, value, mask, False, True) == "math"
    for dtype, kernel in ((torch.float16, "efficient"), (torch.float32, "efficient"), (torch.bfloat16, "math")):
        query, key, value = _qkv(2, 4, 32, 64, dtype=dtype)
        assert choice(query, key, value, None, True, False, capability=(7, 5)) == kernel
    query, key, value = _qkv(2, 4, 32, 3, dtype=torch.float32)
    assert choice(query, key, value, None, False, False, capability=(7, 0)) == "efficient"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert choice(*_qkv(2, 4, 32, 64), None, True, False) == "math"  # type: ignore[call-arg]


def test_a_product_costs_its_operations_and_a_sum_its_bytes(script: Path) -> None:
    kernels = kernels_of(f"{script}:halves", batch=64)
    h100 = target_of("h100")
    priced = price(kernels, h100)
    assert set(priced.classes.values()) <= set(ACHIEVED)
    product = next(n for n in kernels if n.target is aten.addmm.default)
    assert operations_of(product) == 2 * 64 * 32 * 64 * 192
    assert all(m.cost_ns >= h100.launch_ns for m in priced.profiled.kernels.values())
    by_bytes = price(kernels, TARGETS["l40s"])
    counted = price(kernels, target_of("flops")).profiled.kernels
    assert counted[product].cost_ns == 2 * 64 * 32 * 64 * 192
    flat = [n for n in kernels if priced.classes[n] == "pointwise"]
    assert all(counted[n].cost_ns == n.meta["val"].numel() for n in flat if isinstance(n.meta["val"], torch.Tensor))
    assert sum(by_bytes.profiled.kernels[n].cost_ns for n in flat) > sum(
        priced.profiled.kernels[n].cost_ns for n in flat
    )
    backward = next(n for n in kernels if n.target is aten._scaled_dot_product_flash_attention_backward.default)
    assert priced.profiled.kernels[backward].workspace_bytes == 4 * 64 * 4 * 128 * (32 + 1)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 4, 16])
def test_a_convolution_in_groups_costs_an_equal_share_of_each_gradient(groups: int, transposed: bool) -> None:
    """A channel is read by its own group alone, on every release of torch."""
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    model = nn.Sequential(kind(16, 32, 3, groups=groups), nn.Tanh(), kind(32, 16, 3, groups=groups))
    step = target_step(lambda: (model, torch.ones(2, 16, 12, 12)), "h100").step
    kernels = step.operations.flow.kernels
    forward = [operations_of(n) for n in kernels if n.target is aten.convolution.default]
    backward = [operations_of(n) for n in kernels if n.target is aten.convolution_backward.default]
    side = (12, 14) if transposed else (10, 8)
    assert forward == [2 * 2 * at**2 * 3**2 * 16 * 32 // groups for at in side]
    assert backward == [2 * forward[1], forward[0]], "the call's input has no gradient"


def test_heads_that_share_their_keys_cost_as_many_operations() -> None:
    """On every release of torch: 2.11 refuses to count those of such an attention."""

    def counted(keys: int) -> list[int]:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            heads = self.linear(x).unflatten(-1, (4, 16)).transpose(1, 2)
            seen = heads[:, :keys]
            return nn.functional.scaled_dot_product_attention(heads, seen, seen, enable_gqa=True).sum()

        model = module_of(forward, linear=nn.Linear(64, 64)).bfloat16()
        step = target_step(lambda: (model, torch.ones(2, 128, 64, dtype=torch.bfloat16)), "h100").step
        return [operations_of(n) for n in step.operations.flow.kernels if class_of(n.target) == "attention"]

    product = 2 * 2 * 4 * 128 * 128 * 16
    assert counted(2) == counted(4) == [2 * product, 5 * product]


def test_workspaces_that_nothing_tells_are_named() -> None:
    """Where the costs are from stands in each result, and so does what they leave out; products leave nothing out."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """A convolution, attention in float32, a solver of linear equations and a sort: each runs whole."""
        rows = self.conv(x).flatten(2)
        seen = nn.functional.scaled_dot_product_attention(*[self.out(rows)[:, None]] * 3)
        return torch.linalg.solve(seen.mT @ seen, rows.mT[:, None]).sort(-1).values.sum()

    def made() -> Any:
        return module_of(forward, conv=nn.Conv2d(3, 8, 3), out=nn.Linear(36, 36))

    whole = target_step(lambda: (made(), (torch.empty(2, 3, 8, 8),)), "a100")
    roofline, workspaces = whole.priced.split("; ")
    assert roofline == "a roofline of NVIDIA A100-SXM4-80GB"
    assert workspaces.endswith(" are not known and count as 0")
    named = ("attention that is not flash's", "convolutions", "_linalg_solve_ex", "sort")
    assert all(name in workspaces for name in named), workspaces
    assert "mm" not in workspaces
    plain = target_step(lambda: (nn.Linear(8, 8), (torch.empty(2, 8),)), "a100")
    assert plain.priced == roofline


@pytest.mark.thorough
def test_recorded_costs_count_where_the_device_says_under_which_name(script: Path) -> None:
    class Table:
        def get(self, device: str, signatures: Any) -> dict[str, Profile]:
            assert device == "cuda this kind"
            return {s: Profile(77, 5) for s in signatures if s == wanted}

    kernels = kernels_of(f"{script}:halves")
    wanted = signature(kernels[3])
    priced = price(kernels, replace(target_of("h100"), profiles="cuda this kind"), Table())
    assert priced.profiled.shared == 1
    assert priced.profiled.kernels[kernels[3]] == (77, 5)
    assert price(kernels, target_of("h100"), Table()).profiled.shared == 0


CLASS = st.tuples(st.integers(0, 50), st.integers(1, 50)).map(lambda pair: (min(pair), max(pair)))


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(CLASS, min_size=1, max_size=6), st.floats(0, 0.5))
def test_the_range_of_an_overhead_is_that_over_all_corners(found: list[tuple[int, int]], within: float) -> None:
    again = {str(i): r for i, (r, _) in enumerate(found)}
    whole = {str(i): t for i, (_, t) in enumerate(found)}
    corners = [
        sum(f * again[n] for f, n in zip(factors, whole, strict=True))
        / sum(f * whole[n] for f, n in zip(factors, whole, strict=True))
        for factors in itertools.product((1 - within, 1 + within), repeat=len(found))
    ]
    assert spread(again, whole, within) == pytest.approx((min(corners), max(corners)))


def test_operators_have_the_class_of_their_kernels() -> None:
    assert class_of(aten.convolution_backward.default) == "convolution"
    assert class_of(aten._softmax.default) == "reduction"
    assert class_of(aten.embedding_dense_backward.default) == "gather"
    assert class_of(aten._scaled_dot_product_flash_attention.default) == "attention"
    assert class_of(torch.ops._c10d_functional.all_reduce.default) == "collective"
    assert class_of(print) == "other"


TABLE = """
name = "mine"
memory = "16GiB"
bandwidth = 1e12
peak = {bfloat16 = 100e12, float32 = 10e12}
achieved = {matmul = 0.5}
"""


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TABLE)
    found = target_of(str(path))
    assert (found.name, found.memory_bytes, found.achieved["matmul"]) == ("mine", 16 * 2**30, 0.5)
    assert found.achieved["pointwise"] == TARGETS["h100"].achieved["pointwise"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("bandwidth = 1e12", ""), "bandwidth is missing"),
        (("bandwidth = 1e12", "bandwidth = -1"), "bandwidth must be a positive number"),
        (("16GiB", "16"), "context leaves nothing of memory"),
        (("matmul", "matmull"), "none of the classes"),
        (("0.5", "1.5"), "at most 1"),
        (("name", "nome"), "nome is none of the fields"),
        (("peak = {", "peak = {x"), "peak has operations per second by .* not xbfloat16"),
        (("name =", "capability = 9\nname ="), "capability must be two numbers"),
        (("= {", "{"), "is no TOML"),
    ],
)
def test_a_wrong_table_says_what_is_wrong(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TABLE.replace(*change))
    with pytest.raises(InvalidData, match=said):
        target_step(lambda: None, str(path))


@pytest.mark.parametrize(
    ("text", "found"), [("RTX 4090", "rtx4090"), ("gaudi", "gaudi3"), ("H-100", "h100"), ("l4", "l4"), ("l40", "l40s")]
)
def test_a_device_is_found_by_how_people_write_it(text: str, found: str) -> None:
    assert target_of(text) is TARGETS[found]


@pytest.mark.parametrize("text", ["rtx", "", "t", "h1", "100"])
def test_a_name_of_several_devices_or_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidData, match="is no device"):
        target_of(text)


def test_a_module_is_there_though_one_that_it_needs_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose name its own begins with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "nowhere_train.py").write_text("import nowhere\n")
    with pytest.raises(InvalidData, match=r"nowhere_train cannot be imported: .*No module named 'nowhere'"):
        load("nowhere_train:make_model")


@pytest.mark.thorough
def test_what_makes_no_model_is_refused_in_a_sentence(script: Path, tmp_path: Path) -> None:
    for text, said in [
        (f"{tmp_path}/no.py:make_model", "there is no file"),
        ("no_such_package.models:make_model", "there is no module"),
        (f"{script}:missing", "has no function missing"),
        (f"{script}:number", "has no function number"),
    ]:
        with pytest.raises(InvalidData, match=said):
            load(text)
    for name, said in [
        ("broken", r"broken fails: ValueError: no such weights \(at train_script.py, line \d+\)"),
        ("nothing", "must return"),
        ("reads", "device='cpu'"),
    ]:
        with pytest.raises(InvalidData, match=said):
            target_step(load(f"{script}:{name}"), "h100")
    with pytest.raises(InvalidData, match="take the argument batch"):
        target_step(load(f"{script}:broken"), "h100", batch=2)
    with pytest.raises(InvalidData, match="'h1000' is no device: write one of a100, h100"):
        target_step(load(str(script)), "h1000")
    with pytest.raises(InvalidData, match="there is no optimizer 'adamn'"):
        target_step(load(str(script)), "h100", optimizer="adamn")


@pytest.mark.thorough
def test_optimizer_state_is_fixed_and_the_step_is_the_one_that_torch_takes_on_the_device(script: Path) -> None:
    """All parameters together on CUDA, with copies of all of them; fake tensors alone would step one by one."""
    steps = [target_step(load(str(script)), "h100", optimizer=o) for o in (None, "adamw")]
    plain, adamw = (found.step.fixed for found in steps)
    assert plain["optimizer state"] == 0
    assert 2 * plain["parameters"] >= adamw["optimizer state"] > 1.9 * plain["parameters"] - 512 * 100
    assert steps[1].update.temporaries_bytes >= adamw["parameters"]


@pytest.mark.parametrize("optimizer", [None, "sgd", "adamw"])
def test_reserved_bytes_of_a_device_are_whole_segments_around_the_peaks(script: Path, optimizer: str | None) -> None:
    found = target_step(load(str(script)), "h100", batch=64, optimizer=optimizer)
    reserved = found.reserved_bytes()
    assert reserved >= max(found.peak_bytes(), found.update_peak_bytes)
    assert reserved % (2 * 2**20) == 0
    less = max(found.peak_bytes(), found.update_peak_bytes)
    assert reserved <= 1.5 * less + 60 * 2**20


def remat_command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "REMAT_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    words = [sys.executable, "-m", "remat", *arguments]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.thorough
def test_a_plan_for_a_named_device_says_how_sure_it_is(script: Path, command: Any, tmp_path: Path) -> None:
    ran = command(
        "plan", f"{script.name}:halves", "--device", "h100", "--budget", "70%", "--batch", "64", "--local", "--json",
        "--picture", "memory.svg", "-o", "plan.json", "-q",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    data = ran.data
    low, high = data["overhead_range"]
    assert 0 < low < data["answer"]["overhead"] < high
    assert data["peak_bytes"] <= data["reserved_bytes"] <= data["plain_reserved_bytes"]
    assert data["device"] == "NVIDIA H100 80GB HBM3"
    assert data["priced"] == "a roofline of NVIDIA H100 80GB HBM3"
    assert (tmp_path / "memory.svg").read_text().startswith("<svg xmlns")
    (step,) = PlanFile(tmp_path / "plan.json").steps
    assert step.priced == data["priced"]
    assert any("flash" in name for name in step.graph.op_names or ())


@pytest.mark.thorough
def test_the_command_shows_the_best_flags_of_another_stack(script: Path, command: Any) -> None:
    given = "plan", script.name, "--device", "a100", "--budget", "85%", "--local", "-q"
    ran = command(*given, "--for", "megatron")
    assert ran.code == 0, ran.err
    line = ran.out.splitlines()[-1]
    assert re.fullmatch(
        r"megatron: --recompute-granularity \S+ .*; [\d.]+ [KMG]iB, [\d.]+ % slower than the plan.*", line
    )
    data = command(*given, "--for", "hf", "--json").data
    assert data["flags"]["cost_ns"] >= data["answer"]["cost_ns"]
    assert data["flags"]["peak_bytes"] <= data["answer"]["budget_bytes"]
    wrong = command(*given, "--for", "keras")
    assert wrong.code == 2
    assert "--for takes deepspeed, hf, megatron, nemo, torchtitan, not 'keras'" in wrong.err


@pytest.mark.thorough
def test_a_plan_made_by_the_command_is_one_of_the_job(script: Path, tmp_path: Path) -> None:
    """Captured from fake tensors by one process, from real ones by another: the same graph."""
    ran = remat_command("plan", script.name, "-b", "80%", "--local", "-o", "plan.json", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "costs: measured on cpu" in ran.stdout
    model, args = load(str(script))()
    trained = remat.optimize(model, args, plan=tmp_path / "plan.json")
    (planned,) = remat.plans_of(trained).plans
    assert planned.answer.plan == PlanFile(tmp_path / "plan.json").steps[0].answer.plan
    trained(*args).backward()


@pytest.mark.slow
def test_a_plan_made_by_the_command_with_a_link_is_one_of_the_job_with_that_link(script: Path, tmp_path: Path) -> None:
    """Kernels of a CPU over a link of a fast device: what moves costs nothing."""
    given = ("plan", script.name, "--local", "-o", "plan.json", "-t", "10")
    ran = remat_command(*given, "-b", "60%", "--link", "1000GB", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "offloaded" in ran.stdout
    (step,) = PlanFile(tmp_path / "plan.json").steps
    assert step.graph.link == named_link("1000GB")
    model, args = load(str(script))()
    with pytest.raises(PlanMismatch, match="moves values to the host: give the link that it was made for"):
        remat.optimize(model, args, plan=tmp_path / "plan.json")
    trained = remat.optimize(model, args, plan=tmp_path / "plan.json", link="1000GB")
    (planned,) = remat.plans_of(trained).plans
    assert planned.answer.plan == step.answer.plan
    trained(*args).backward()
    assert "'slow' is no link" in remat_command(*given, "-b", "60%", "--link", "slow", folder=tmp_path).stderr


@pytest.mark.thorough
def test_capture_writes_a_graph_that_the_other_commands_read(script: Path, command: Any, tmp_path: Path) -> None:
    ran = command("capture", script.name, "--device", "a100", "-o", "graph.json", "-q")
    assert ran.code == 0, ran.err
    graph = Graph.from_json((tmp_path / "graph.json").read_bytes())
    assert any(name.startswith("blocks.1.up:") for name in graph.op_names or ())
    wrong = command("plan", f"{script.name}:broken", "--device", "a100")
    assert wrong.code == 2
    assert wrong.err.splitlines()[-1].startswith("remat: broken fails: ValueError: no such weights")


def test_no_plan_costs_nothing_over_and_nothing_is_uncertain(script: Path) -> None:
    found = target_step(load(f"{script}:halves"), "h100")
    plan = plain_plan(found.graph)
    assert isinstance(plan, Plan)
    assert found.overhead_range(plan) == (0.0, 0.0)
    assert found.peak_bytes() == found.peak_bytes(plan)


@pytest.mark.parametrize(
    ("text", "both"), [("pcie4", 25_200_000_000), ("H200", 50_400_000_000), ("25GB/s", 25 * 10**9)]
)
def test_a_link_by_its_name(text: str, both: int) -> None:
    link = named_link(text)
    assert (link.to_host_bytes_per_s, link.to_device_bytes_per_s) == (both, both)


@pytest.mark.thorough
@pytest.mark.parametrize(("device", "kernel"), [("h100", "sin"), ("t4", "cos"), ("rtx4090", "cos")])
def test_a_model_is_told_the_generation_of_the_device(device: str, kernel: str) -> None:
    """As experts of transformers choose a kernel."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y.sin() if torch.cuda.get_device_capability(x.device) >= (9, 0) else y.cos()

    step = target_step(lambda: (module_of(forward, linear=nn.Linear(8, 8)), torch.ones(4, 8)), device)
    assert any(f"{kernel}.default" in str(node.target) for node in step.step.operations.flow.kernels)


def test_autocast_inside_a_model_casts_as_on_the_device() -> None:
    """Torch switches it off, with a warning, where there is no such device; afterwards it does so again."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = self.linear(x)
        return y.float().sum()

    before = torch.autocast.__init__
    step = target_step(lambda: (module_of(forward, linear=nn.Linear(8, 8)), torch.ones(4, 8)), "h100").step
    product = next(n for n in step.operations.flow.kernels if n.target is aten.addmm.default)
    assert product.meta["val"].dtype is torch.bfloat16
    assert torch.autocast.__init__ is before
    assert not torch.is_autocast_enabled("cuda")


def test_every_device_says_where_its_figures_are_from() -> None:
    for device in TARGETS.values():
        assert device.source
        assert 0 < device.usable_bytes < device.memory_bytes


def test_a_link_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="'fast' is no link: write one of pcie3, pcie4, pcie5"):
        named_link("fast")
    file = tmp_path / "link.json"
    file.write_text('{"to_host_bytes_per_s": 5, "to_device_bytes_per_s": 0}')
    with pytest.raises(InvalidData, match="to_device_bytes_per_s must be at least 1"):
        named_link(str(file))
    assert set(OF_TARGET) == set(TARGETS)


PAGE = Path(__file__).parents[2] / "docs" / "targets.md"

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_local_experts", "num_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("head_dim", "d_kv"), 16),
    "vocab_size": 300,
    "pad_token_id": 1,
    "image_size": 32,
    "num_labels": 10,
    "time_step_rank": 4,
    "moe_intermediate_size": 32,
    "max_source_positions": 40,
    "sample_size": 16,
    "cross_attention_dim": 64,
    "projection_class_embeddings_input_dim": 6 * 256 + 64,
}


def small(name: str) -> dict[str, Any]:
    """A preset of little width and depth, in float32."""
    config = dict(presets()[name].config)
    found = {key: SMALL.get(key, value) for key, value in config.items()}
    if "model_type" in found:
        found |= {"dtype": "float32", "pad_token_id": 1, "decoder_start_token_id": 0}
    if "block_out_channels" in found:
        found["block_out_channels"] = [32 * 2 ** min(i, 1) for i in range(len(found["block_out_channels"]))]
    if found.get("model_type") == "mamba":
        found["intermediate_size"] = 2 * found["hidden_size"]
    return found


ALIKE = {json.dumps(small(name), sort_keys=True): name for name in presets()}
"""Presets that are the same when they are small: one of each."""


@pytest.mark.parametrize("name", first(4, presets()))
def test_a_preset_has_its_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model, _, _ = by_config(presets()[name].config)()
    assert sum(p.numel() for p in model.parameters()) == presets()[name].parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALIKE.values()))
def test_a_small_preset_peaks_as_predicted(name: str) -> None:
    """By the allocator's own events, while a real step runs."""
    torch.manual_seed(0)
    model, args, kwargs = by_config(small(name), 64)(batch=4)
    model = remat.optimize(model.train(), args, kwargs, budget="100%", planner="greedy")
    output = model(*args, **kwargs)
    (output[0] if isinstance(output, tuple) else output.loss).sum().backward()
    (peak,) = remat.plans_of(model).peaks.values()
    assert peak.as_predicted, peak


def test_a_model_is_found_by_its_file_its_folder_and_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2 = presets()["openai-community/gpt2"].config
    (tmp_path / "config.json").write_text(json.dumps(gpt2))
    assert config_of(str(tmp_path)) == config_of(str(tmp_path / "config.json")) == config_of("GPT2") == gpt2
    assert load("gpt2").__name__ == "GPT2LMHeadModel"
    assert config_of("no/such") is None
    for text, why in ((" {", "cannot be read"), ('{"a": 1}', "is no configuration")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InvalidData, match=why):
            config_of(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "length", "why"),
    [
        ({"model_type": "nothing"}, None, "transformers does not read"),
        ({"model_type": "gpt2", "architectures": ["NoModel"]}, None, "has no NoModel"),
        ({"_class_name": "AutoencoderKL"}, None, "write a function"),
        ({"model_type": "gpt2"}, 0, "at least one token"),
    ],
)
def test_what_cannot_be_made_is_refused(config: dict[str, Any], length: int | None, why: str) -> None:
    with pytest.raises(InvalidData, match=why):
        by_config(config, length)


def test_the_length_is_of_configurations_alone(command: Any, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text("def make_model():\n    pass\n")
    ran = command("fit", f"{script}:make_model", "--device", "h100", "--length", 8)
    assert ran.code == 2
    assert "a function makes its own call" in ran.err


@pytest.mark.thorough
def test_a_model_fits_by_its_configuration(command: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small("openai-community/gpt2")))
    ran = command("fit", tmp_path, "-d", "h100", "--batch", 4, "--length", 32, "-t", 1, "--local", "--json", "-q")
    found = json.loads(ran.out)
    assert found["model"] == "GPT2LMHeadModel"
    assert found["fixed_bytes"]["inputs"] == 4 * 32 * 8


@pytest.mark.thorough
def test_methods_are_compared_on_a_configuration(command: Any, tmp_path: Path) -> None:
    """Not taken for a graph file, whose name ends in the same way."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(small("openai-community/gpt2") | {"n_positions": 32}))
    ran = command("compare", config, "-d", "h100", "-b", "100%", "--methods", "greedy", "--local", "--json", "-q")
    assert ran.code == 0, ran.err
    ways = {row["way"]: row["overhead"] for row in ran.data["ways"]}
    assert ways["plain"] == ways["greedy"] == 0


def test_the_page_lists_the_presets() -> None:
    rows = [f"| `{name}` | {preset.parameters / 1e6:,.0f} |" for name, preset in presets().items()]
    text = PAGE.read_text().split("<!-- presets: begin -->\n\n")[1].split("\n\n<!-- presets: end -->")[0]
    assert text.split("\n")[2:] == rows, "\n".join(rows)


@pytest.mark.thorough
def test_a_rank_has_its_share_of_a_sequence_and_of_the_experts() -> None:
    """Tokens and experts are shared; an attention runs once with the keys and values of each rank."""
    mixtral = by_config(small("mistralai/Mixtral-8x7B-v0.1"), 256)
    whole, part = (target_step(mixtral, "h100", batch=2, parallel=parallel) for parallel in (None, "cp=4,ep=2"))
    assert (whole.step.fixed["inputs"], part.step.fixed["inputs"]) == (2 * 256 * 8, 2 * 64 * 8)
    experts = 2 * 2 * 3 * 64 * 128 * 4  # layers, experts fewer, products, their sizes
    assert whole.step.fixed["parameters"] - part.step.fixed["parameters"] == pytest.approx(experts, rel=0.05)
    llama = by_config({**small("meta-llama/Llama-3.2-1B"), "dtype": "bfloat16"}, 128)
    flow = target_step(llama, "h100", batch=2, parallel="cp=2").step.operations.flow
    prices = {cp: price(flow.kernels, target_of("h100"), cp=cp) for cp in (1, 2)}
    attention = [node for node, kind in prices[1].classes.items() if kind == "attention"]
    assert len(attention) == 2 * 2
    for node, once in prices[1].profiled.kernels.items():
        shared = prices[2].profiled.kernels[node]
        assert shared.cost_ns == once.cost_ns * (2 if node in attention else 1)
        assert (shared.workspace_bytes > once.workspace_bytes) == (node in attention)


@pytest.mark.parametrize(
    ("name", "parallel", "why"),
    [
        ("openai-community/gpt2", "ep=2", "a gpt2 has no experts"),
        ("mistralai/Mixtral-8x7B-v0.1", "ep=4", "ep=4 does not share 4 experts of which a token takes 2: .* at most 2"),
        ("mistralai/Mixtral-8x7B-v0.1", "ep=3", "write a divisor of 4"),
        ("meta-llama/Llama-3.2-1B", "cp=3", "cp=3 does not divide sequences of 64 tokens"),
        ("openai/whisper-small", "cp=2", "is not called with tokens"),
    ],
)
def test_what_ranks_cannot_share_is_refused(name: str, parallel: str, why: str) -> None:
    with pytest.raises(InvalidData, match=why):
        target_step(by_config(small(name), 64), "h100", batch=2, parallel=parallel)


@pytest.mark.parametrize(("name", "most"), [("openai-community/gpt2", 1024), ("FacebookAI/roberta-base", 512)])
def test_a_sequence_has_no_more_tokens_than_the_model_has_positions(name: str, most: int) -> None:
    with torch.device("meta"):
        by_config(small(name), most)()
        with pytest.raises(InvalidData, match=f"write --length {most} or less"):
            by_config(small(name), most + 1)()
        by_config(small("google-t5/t5-base"), 2048)()  # its positions are relative
