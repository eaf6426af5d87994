"""Torch's open reports: the programs say what they should, and each patch mends what its report shows."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
from benchmarks.upstream import issue_149258, issue_190758, issue_193193, issue_197838, issue_197871
from benchmarks.upstream.common import NEEDS_CUDA, Step, WithLoss, error, step
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

PATCHES = Path(issue_197871.__file__).parent / "patches"
ROOT = Path(torch.__file__).parent.parent


def _patched(name: str, target: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of torch's after a patch, next to the installed one; skipped where the patch is for another release."""
    path = folder / (target.replace(".", "/") + ".py")
    path.parent.mkdir(parents=True)
    path.write_text((ROOT / (target.replace(".", "/") + ".py")).read_text())
    applied = subprocess.run(
        ["git", "apply", str(PATCHES / name)], cwd=folder, capture_output=True, text=True, check=False
    )
    if applied.returncode:
        pytest.skip(f"the patch is for torch 2.13.0: {applied.stderr.strip()[:80]}")
    found = importlib.util.spec_from_file_location(f"{target}_patched", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found.loader.exec_module(module)
    return module


def test_the_knapsack_keeps_to_its_budget_and_stays_optimal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = "torch._functorch._activation_checkpointing.knapsack"
    module = _patched("knapsack.patch", target, tmp_path, monkeypatch)
    seeds = range(150)
    assert any(issue_197871.over(issue_197871.dp_knapsack_sliding_hirschberg, seed) for seed in seeds)
    for seed in seeds:
        weights, values, budget = issue_197871.instance(seed)
        unit = issue_197871.UNIT
        runtime, saved, again = module.dp_knapsack_sliding_hirschberg(
            [w / unit for w in weights], values, budget / unit
        )
        assert sum(weights[i] for i in saved) <= budget
        assert runtime == issue_197871.best(weights, values, budget)
        assert sorted([*saved, *again]) == list(range(len(weights)))


def _under_budget(
    model: nn.Module, x: torch.Tensor, budget: float, partitioners: ModuleType, solver: str = "dp"
) -> Step:
    """A step under a budget by a partitioner, with torch's kernels."""
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        partition_fn=partitioners.min_cut_rematerialization_partition,
    )
    more: dict[str, Any] = {"activation_memory_budget": budget, "activation_memory_budget_solver": solver}
    with functorch.patch(enable_autograd_cache=False, **more):
        return step(model, torch.compile(WithLoss(model), backend=backend, dynamic=False), x)


def test_random_operators_are_saved_under_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._functorch.partitioners as installed

    patched = _patched("random.patch", "torch._functorch.partitioners", tmp_path, monkeypatch)
    module, x = issue_190758.model(), torch.linspace(-1, 1, 64 * 128).reshape(64, 128)
    plain = step(module, None, x)
    for budget in (0.0, 0.4):
        assert error(plain, _under_budget(module, x, budget, installed)) > 1e-2
        assert error(plain, _under_budget(module, x, budget, patched)) < 1e-5


def test_the_peak_falls_with_the_budget_by_a_solver_that_looks_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own solver bounds what is saved: between some of these budgets the measured peak rises."""
    import torch._functorch.partitioners as installed

    patched = _patched("peak.patch", "torch._functorch.partitioners", tmp_path, monkeypatch)
    module, x = issue_197838.model(2), torch.linspace(-1, 1, 4 * 64 * 128).reshape(4, 64, 128)
    budgets = (0.9, 0.7, 0.5, 0.3, 0.1)
    theirs = [_under_budget(module, x, budget, installed).peak_bytes for budget in budgets]
    assert any(b > a for a, b in pairwise(theirs)), theirs
    ours = [_under_budget(module, x, budget, patched, "dp_peak") for budget in budgets]
    assert all(b.peak_bytes <= a.peak_bytes for a, b in pairwise(ours)), [each.peak_bytes for each in ours]


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run")
def test_what_needs_cuda_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for program in (issue_193193, issue_149258):
        assert program.main() == 0
        assert capsys.readouterr().out.strip() == NEEDS_CUDA


def test_a_tagged_plan_keeps_to_the_knapsacks_budget() -> None:
    assert all(issue_197871.by_tags(seed) for seed in range(4))
