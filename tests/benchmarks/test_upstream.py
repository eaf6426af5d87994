"""Torch's open reports: the programs say what they should, and each patch mends what its report shows."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch._functorch.config as functorch
from benchmarks.upstream import issue_149258, issue_190758, issue_193193, issue_197871
from benchmarks.upstream.common import NEEDS_CUDA, Step, WithLoss, error, step
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


def _under_budget(budget: float, partitioners: ModuleType) -> tuple[Step, Step]:
    """A plain step, and one under a budget by a partitioner."""
    module, x = issue_190758.model(), torch.linspace(-1, 1, 64 * 128).reshape(64, 128)
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        partition_fn=partitioners.min_cut_rematerialization_partition,
    )
    with functorch.patch(activation_memory_budget=budget, enable_autograd_cache=False):
        return step(module, None, x), step(module, torch.compile(WithLoss(module), backend=backend, dynamic=False), x)


def test_random_operators_are_saved_under_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._functorch.partitioners as installed

    module = _patched("random.patch", "torch._functorch.partitioners", tmp_path, monkeypatch)
    for budget in (0.0, 0.4):
        assert error(*_under_budget(budget, installed)) > 1e-2
        assert error(*_under_budget(budget, module)) < 1e-5


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run")
def test_what_needs_cuda_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for program in (issue_193193, issue_149258):
        assert program.main() == 0
        assert capsys.readouterr().out.strip() == NEEDS_CUDA


def test_a_tagged_plan_keeps_to_the_knapsacks_budget() -> None:
    assert all(issue_197871.by_tags(seed) for seed in range(4))
