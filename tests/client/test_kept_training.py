"""Training by captures that were kept, in this process and in another."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat import _compat
from remat._compat import keeping
from remat.capture import kept, trace
from remat.capture.kept import Captures

from .test_kept import SOURCE, example, hit, keep, module_of


def gradients(model: nn.Module, run: Callable[..., torch.Tensor], args: Any) -> list[torch.Tensor]:
    for p in model.parameters():
        p.grad = None
    run(*args).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


class Deep(nn.Module):
    """Dropout, normalization with statistics, a tied weight, and a result that is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.3)
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(self.norm(layer(x))))
        return x.view(-1)[:7].sum()


def test_gradients_and_buffers_of_a_kept_capture_are_those_of_plain_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("REMAT_KEEP_CAPTURES", "1")
    monkeypatch.setattr(kept, "KEPT_FROM_S", 0.0)
    x, found = torch.randn(8, 16), []
    for again in (False, True, None):
        torch.manual_seed(1)
        model = Deep()
        run = model if again is None else remat.optimize(model, x, budget="95%", planner="greedy")
        with caplog.at_level("INFO", logger="remat"):
            caplog.clear()
            torch.manual_seed(2)
            steps = [gradients(model, run, (x,)) for _ in range(3)]
        found.append(([g for step in steps for g in step], dict(model.state_dict())))
        model.norm.momentum = 0.5  # a guard of the kept capture: the next step is of another kind
        torch.manual_seed(3)
        found[-1][0].extend(gradients(model, run, (x,)))
    for (grads, state), (others, other) in itertools.pairwise(found):
        assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
        assert all(torch.equal(state[name], other[name]) for name in state)


def test_captures_of_one_model_do_not_replace_each_other(tmp_path: Path) -> None:
    found = Captures(tmp_path, 0.0)

    def models() -> list[Any]:
        trained, evaluated, other, hooked = (module_of(SOURCE).Model() for _ in range(4))
        evaluated.eval()
        other.config.act = "tanh"
        hooked.second.register_forward_hook(lambda module, args, result: result * 2)
        return [trained, evaluated, other, hooked]

    assert all(keep(found, model, example()) for model in models())
    for _ in range(5):  # as another process may do before: torch counts the handles of hooks
        nn.Linear(1, 1).register_forward_hook(print)
    assert all(hit(found, model, example()) for model in (*reversed(models()), *models()))


def test_captures_of_many_configurations_take_the_place_of_old_ones(tmp_path: Path) -> None:
    found, model = Captures(tmp_path, 0.0), module_of(SOURCE).Model()
    for number in range(kept.MOST + 2):
        model.config.act = f"tanh {number}"
        assert keep(found, model, example())
        model.config.act = "tanh 0"
        assert hit(found, model, example()), "what is used stays"
    assert len(list(tmp_path.glob("*.capture"))) == kept.MOST


class Constants(nn.Module):
    """With numbers that become tensors of the graph."""

    def __init__(self, dtype: torch.dtype, count: int) -> None:
        super().__init__()
        self.scale, self.dtype = nn.Parameter(torch.ones(count)), dtype
        self.numbers = [0.0, 1e4, *(1 / (n + 3) for n in range(count - 2))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.tensor(0) == 0, x, 0.0) * self.scale * torch.tensor(self.numbers, dtype=self.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.bool])
def test_constants_are_kept_by_value(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, found = Constants(dtype, 4), (torch.ones(4),), Captures(tmp_path, 0.0)
    assert keep(found, model, args)
    _, _, descriptor, _ = trace._traced(model, args, {}, model)
    restored = found.find(model, model, args, {})
    assert restored is not None
    before, after = (dict(_compat.joint_graph(made).named_buffers()) for made in (descriptor, restored[0]))
    assert len(before) == 2
    assert all(b.dtype == before[n].dtype and repr(b) == repr(before[n]) for n, b in after.items())
    model.numbers[2] = 0.125
    assert not hit(found, model, args)
    monkeypatch.setattr(keeping, "CONSTANT_BYTES", 3)
    assert not keep(found, model, args), "long ones are not"


PROCESS = """
import logging, os, sys
import torch
import remat
from remat import _compat
from remat._compat import keeping
from remat.capture import kept, trace
from remat.capture.kept import Captures
kept.KEPT_FROM_S = 0.0
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
sys.path.insert(0, sys.argv[1])
import kept_source
torch.manual_seed(0)
model = kept_source.Model()
x, z = torch.randn(4, 8), torch.randn(4, 8)
planned = remat.optimize(model, (x, z), budget="100%", planner="greedy")
planned(x, z).backward()
mine = [p.grad.clone() for p in model.parameters()]
for p in model.parameters():
    p.grad = None
kept_source.Model.forward(model, x, z).backward()
print("equal", all(torch.equal(a, p.grad) for a, p in zip(mine, model.parameters())))
"""


def in_a_process(folder: Path, source: str, seed: int = 0) -> str:
    """What a process of its own says that trains the model of a source; `seed` is of the hashes of strings."""
    (folder / "kept_source.py").write_text(source)
    environment = {**os.environ, "REMAT_CACHE_DIR": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"REMAT_KEEP_CAPTURES": "1", "PYTHONHASHSEED": str(seed)}
    command = [sys.executable, "-c", PROCESS, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "equal True" in done.stdout
    return done.stdout


@pytest.mark.slow
def test_another_process_of_the_job(tmp_path: Path) -> None:
    assert "was captured before" not in in_a_process(tmp_path, SOURCE)
    assert "was captured before" in in_a_process(tmp_path, SOURCE)
    edited = SOURCE.replace("x * SCALE + plus", "x * SCALE - plus")
    assert "was captured before" not in in_a_process(tmp_path, edited)
    assert "was captured before" in in_a_process(tmp_path, edited)


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "found"), [("1 if 'c' in LETTERS else 2", True), ("ord(list(LETTERS)[0])", False)])
def test_sets_of_strings_have_another_order_in_each_process(tmp_path: Path, factor: str, found: bool) -> None:
    source = SOURCE.replace("x * SCALE + plus", f"x * ({factor}) + plus") + "\nLETTERS = frozenset('abcdefghij')\n"
    assert f"({factor})" in source
    in_a_process(tmp_path, source, 1)
    assert ("was captured before" in in_a_process(tmp_path, source, 2)) == found
