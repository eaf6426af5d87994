"""`remat.enable` behind torch.compile: what it captures, keeps, and leaves as it is."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import remat
from client.comparing import equal, step_differences
from client.small_models import CASES, Writing, module_of
from client.test_adoption import Net, trained
from client.test_exact import outcome
from releases.test_lane import Again
from releases.test_lane import stock as stock_of
from remat.compile import carrier
from remat.compile.carrier import Carrier
from remat.profiling import measure
from remat_ir import RematError
from tiers import first

AGAIN: dict[str, Any] = {"budget": remat.ActivationBytes("1GiB"), "planner": Again()}
GREEDY: dict[str, Any] = {"budget": "100%", "planner": "greedy"}

pytestmark = pytest.mark.usefixtures("anew")


def plans(module: nn.Module) -> int:
    """How many plans an enabled module has; and that it is one which runs behind torch.compile."""
    carrier = module.__dict__["forward"]
    assert isinstance(carrier, Carrier)
    return len(carrier.backend.planned)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Tanh()) for _ in range(4)))


@dataclasses.dataclass
class Config:
    scale: float = 2.0


class Dataclass(Layers):
    def forward(self, x: torch.Tensor, how: Any = Config()) -> torch.Tensor:  # noqa: B008
        return (self.layers(x) * how.scale).sum()


class Function(Layers):
    def forward(self, x: torch.Tensor, how: Any = lambda t: t * 2) -> torch.Tensor:
        return how(self.layers(x)).sum()


class Scalar(Layers):
    def forward(self, x: torch.Tensor, how: Any = np.float32(2)) -> torch.Tensor:  # noqa: B008
        return (self.layers(x) * float(how)).sum()


class Counter(Layers):
    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layers(x).sum()


class Annealed(Layers):
    """A number that changes with each call."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.factor *= 0.7
        return (self.layers(x) * self.factor + (1 - self.factor)).sum()


@pytest.mark.parametrize("kind", [Annealed, Dataclass, Function, Scalar, Counter])
def test_ordinary_python_trains_by_plans(kind: Callable[[], nn.Module]) -> None:
    """Arguments that are no tensors, and state that changes: a number of its own may have a plan of its own."""
    plain = kind()
    model = remat.enable(copy.deepcopy(plain), **AGAIN)
    for seed in range(4):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(seed))
        assert step_differences(plain, model, (x,)) == []
    assert 1 <= plans(model) <= (4 if kind is Annealed else 3)


@pytest.mark.parametrize("name", first(3, sorted(CASES)))
def test_a_module_trains_bit_for_bit(name: str) -> None:
    case = CASES[name]()
    expected = outcome(case, case.module)
    remat.enable(case.module, **AGAIN)
    assert measure.differences(expected, outcome(case, case.module)) == []
    assert plans(case.module)


def test_the_module_stays_itself() -> None:
    """Names, evaluation, hooks of its own, deep copies, pickles; `disable` undoes it."""
    plain = Net()
    model = copy.deepcopy(plain)
    assert remat.enable(model, **AGAIN) is model
    with pytest.raises(RuntimeError, match="enabled on this Net already"):
        remat.enable(model, **AGAIN)
    assert type(model) is Net
    assert list(model.state_dict()) == list(plain.state_dict())
    model.eval(), plain.eval()
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 3, 8, 8)), plain(torch.ones(2, 3, 8, 8)))
    assert plans(model) == 0
    model.train(), plain.train()
    calls: list[int] = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    other = copy.deepcopy(model)
    handle.remove()
    expected = trained(plain, stock_of(plain))
    assert equal(expected, trained(other, other))
    assert len(calls) == 2
    assert other.forward.model is other
    assert plans(other) == 1
    assert plans(model) == 0
    stored = pickle.dumps(model)
    assert b"remat" not in stored
    assert not isinstance(pickle.loads(stored).forward, Carrier)
    assert remat.disable(model) is model
    assert "forward" not in model.__dict__


def test_an_instances_own_forward_is_compiled_and_put_back() -> None:
    """A trainer stands autocast there: a class's forward in its place would train in another precision, silently."""
    plain = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    model = copy.deepcopy(plain)
    for each in (plain, model):
        each.forward = torch.autocast("cpu", torch.bfloat16)(each.forward)
    own = model.forward
    remat.enable(model, **AGAIN)
    x = torch.randn(32, 16)
    found = model(x)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, plain(x))
    found.float().sum().backward()
    assert plans(model) == 1
    remat.disable(model)
    assert model.forward is own


@pytest.mark.parametrize("arrangement", ["same storage", "overlap", "same view", "apart"])
def test_inputs_that_share_memory_and_are_written_to(arrangement: str) -> None:
    def given(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        base = torch.arange(10 * 16.0).reshape(10, 16)
        views = {"apart": (base[:4].clone(), base[4:8].clone()), "same storage": (base[1:5], base[5:9])}
        return {**views, "overlap": (base[1:5], base[2:6]), "same view": (base[1:5], base[1:5])}[kind]

    plain = Writing()
    model = remat.enable(copy.deepcopy(plain), **GREEDY)
    for kind in ("apart", arrangement, "overlap", "apart", arrangement):
        assert torch.equal(model(*given(kind)), plain(*given(kind))), kind


@pytest.mark.thorough
def test_many_models_of_a_class_are_planned_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than Dynamo compiles of one code object, of a class of torch's own; nothing holds a model that is gone."""
    monkeypatch.setattr(carrier, "MOST_GRAPHS", 8)
    gone, kept = [], []
    for i in range(20):
        model = remat.enable(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), **GREEDY)
        model(torch.ones(2, 4)).sum().backward()
        assert plans(model) == 1, i
        (kept if i % 2 else gone).append(model)
    dropped = [weakref.ref(model) for model in gone]
    del model, gone
    gc.collect()
    assert sum(ref() is not None for ref in dropped) == 0
    assert all(plans(model) for model in kept)


def test_what_cannot_be_planned_is_refused_or_runs_as_it_is() -> None:
    def sparse() -> nn.Module:
        return module_of(lambda self, x: self.table(x).sum(), table=nn.Embedding(8, 4, sparse=True))

    x = torch.tensor([1, 2])
    with pytest.raises(RematError, match="sparse"):
        remat.enable(sparse(), on_failure="raise", **GREEDY)(x)
    plain = sparse()
    model = remat.enable(copy.deepcopy(plain), **GREEDY)
    for module in (plain, model):
        for _ in range(2):
            module(x).backward()
    assert torch.equal(model.table.weight.grad.to_dense(), plain.table.weight.grad.to_dense())
    assert plans(model) == 1, "the part behind the embedding"
    with pytest.raises(remat.BudgetTooSmall, match="is enough"):
        remat.enable(Counter(), budget="1%", planner="greedy")(torch.randn(64, 16))
