"""State that changes after planning: a plan that was made for something else is never run.

Each case changes something between two steps; both must end as they do without plans, bit for bit, for modules that
are planned in place (`enable`) and for modules that wrap (`optimize`).
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.optim.swa_utils import AveragedModel

import remat
from client.comparing import equal
from client.small_models import module_of
from remat.training.enable import plans_of
from tiers import first

GLOBAL = {"scale": 1.0}
OUTSIDE = torch.linspace(0.5, 1.5, 16)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


class Scaled(nn.Module):
    def __init__(self, alpha: Any = 1.0) -> None:
        super().__init__()
        self.net, self.alpha = layers(), alpha

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.alpha


class OfGlobal(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * GLOBAL["scale"] * OUTSIDE


class Table(Scaled):
    def __init__(self) -> None:
        super().__init__({"scale": 1.0, "flip": False})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x if self.alpha["flip"] else -x) * self.alpha["scale"]


class Skip(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) if self.alpha > 0.7 else x * self.net[0].weight.sum()


class Part(nn.Module):
    """A module with a forward of its own that is no built-in one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh()


def tied() -> nn.Module:
    model = module_of(lambda self, x: self.two(self.one(x).relu()), one=nn.Linear(16, 16), two=nn.Linear(16, 16))
    model.two.weight = model.one.weight
    return model


def unlisted() -> nn.Module:
    """Its layer is in a list of Python's: a parameter that no one lists."""
    return module_of(lambda self, x: self.hidden[0](self.net(x)), net=layers(), hidden=[nn.Linear(16, 16)])


def times(factor: float) -> Callable[..., Any]:
    return lambda module, inputs, output: output * factor


def rehook(model: Any) -> None:
    model.handle.remove()
    model.handle = model[0].register_forward_hook(times(3.0))


def hooked() -> nn.Module:
    model = layers()
    model.handle = model[0].register_forward_hook(times(2.0))
    return model


def hooked_itself() -> nn.Module:
    model = layers()
    model.handle = register_module_forward_hook(times(1.5))
    model.register_forward_hook(times(3.0))
    return model


def adding() -> nn.Module:
    """The groups of its step may not run in their order once the buffer that is read is the one that is written."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(1)
        return self.net(x * self.factor)

    model = module_of(forward, net=layers())
    for name in ("total", "factor"):
        model.register_buffer(name, torch.ones(256, 16))
    return model


def untie(model: Any) -> None:
    model.two.weight = nn.Parameter(model.one.weight.detach() * 0.5)


def doubled(self: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, self.weight) * 2


def with_last(last: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(layers(), last())


def doubling(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if gradient is None else gradient * 2 for gradient in inputs)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object]]] = {
    "a float": (Scaled, lambda m: setattr(m, "alpha", 0.5)),
    "a flag": (Skip, lambda m: setattr(m, "alpha", 0.5)),
    "an entry of a dict": (Table, lambda m: m.alpha.update(scale=3.0)),
    "a flag in a dict": (Table, lambda m: m.alpha.update(flip=True)),
    "a global": (OfGlobal, lambda m: GLOBAL.update(scale=0.25)),
    "a global tensor in place": (OfGlobal, lambda m: OUTSIDE.mul_(1.5)),
    "a tensor attribute replaced": (
        lambda: Scaled(torch.ones(16)),
        lambda m: setattr(m, "alpha", torch.full((16,), 2.0)),
    ),
    "a tensor attribute of another shape": (
        lambda: Scaled(torch.ones(16)),
        lambda m: setattr(m, "alpha", torch.full((1,), 2.0)),
    ),
    "a tensor attribute in place": (lambda: Scaled(torch.ones(16)), lambda m: m.alpha.fill_(0.5)),
    "an unlisted parameter": (unlisted, lambda m: m.hidden[0].weight.data.mul_(2)),
    "Dropout.p": (with_last(lambda: nn.Dropout(0.1)), lambda m: setattr(m[1], "p", 0.5)),
    "LayerNorm.eps": (with_last(lambda: nn.LayerNorm(16)), lambda m: setattr(m[1], "eps", 1.0)),
    "BatchNorm.eps": (with_last(lambda: nn.BatchNorm1d(16)), lambda m: setattr(m[1], "eps", 1.0)),
    "BatchNorm.momentum": (with_last(lambda: nn.BatchNorm1d(16)), lambda m: setattr(m[1], "momentum", 0.5)),
    "eval inside": (with_last(lambda: nn.BatchNorm1d(16)), lambda m: m[1].eval()),
    "a submodule replaced": (layers, lambda m: setattr(m, "1", nn.ReLU())),
    "a submodule appended": (layers, lambda m: m.append(nn.Tanh())),
    "the forward of a submodule": (layers, lambda m: setattr(m[0], "forward", MethodType(doubled, m[0]))),
    "the forward of a class": (
        with_last(Part),
        lambda m: setattr(Part, "forward", lambda self, x: self.inner(x).sigmoid()),
    ),
    "the __call__ of a class": (
        with_last(Part),
        lambda m: setattr(Part, "__call__", lambda self, x: self.forward(x) * 2),
    ),
    "a tied weight": (tied, untie),
    "a frozen weight": (layers, lambda m: m[0].weight.requires_grad_(False)),
    "a hook replaced": (hooked, rehook),
    "a hook added": (layers, lambda m: m[0].register_forward_hook(times(2.0))),
    "a hook before added": (layers, lambda m: m[2].register_forward_pre_hook(lambda m, inputs: (inputs[0] * 2,))),
    "a hook around all modules": (layers, lambda m: register_module_forward_hook(times(1.5))),
    "a backward hook added": (layers, lambda m: m[2].register_full_backward_hook(lambda m, i, o: (i[0] * 2,))),
    "a backward hook of all modules": (layers, lambda m: register_module_full_backward_hook(doubling)),
    "a hook around all modules, next to its own, removed": (hooked_itself, lambda m: m.handle.remove()),
    "a buffer that becomes another one": (adding, lambda m: setattr(m, "factor", m.total)),
    "a hook of its own added": (layers, lambda m: m.register_forward_hook(times(2.0))),
}


@pytest.fixture(autouse=True)
def as_before() -> Any:
    forward = Part.forward
    yield
    Part.forward = forward
    if "__call__" in vars(Part):
        del Part.__call__
    GLOBAL.update(scale=1.0)
    OUTSIDE.copy_(torch.linspace(0.5, 1.5, 16))
    nn.modules.module._global_forward_hooks.clear()
    nn.modules.module._global_backward_hooks.clear()


def planned(way: str, model: nn.Module) -> nn.Module:
    given: dict[str, Any] = {"budget": remat.Fraction(1.0), "planner": "greedy", "mode": "graph"}
    if way == "enable":
        return remat.enable(model, **given)
    return remat.optimize(model, (torch.ones(256, 16),), **given)


def step(model: nn.Module, run: nn.Module, seed: int, *more: Any) -> list[torch.Tensor | None]:
    """One step: the loss, every gradient, every buffer and the generator's state."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    loss = run(torch.randn(256, 16), *more).square().mean()
    loss.backward()
    grads = [p.grad for part in (model, *getattr(model, "hidden", ())) for p in part.parameters()]
    kept = [None if t is None else t.detach().clone() for t in (loss, *grads, *model.buffers())]
    return [*kept, torch.get_rng_state()]


QUICK = {
    "a float",
    "a global tensor in place",
    "a tensor attribute replaced",
    "an unlisted parameter",
    "Dropout.p",
    "eval inside",
    "a submodule replaced",
    "the forward of a class",
    "a tied weight",
    "a frozen weight",
    "a hook replaced",
    "a hook around all modules",
    "a hook around all modules, next to its own, removed",
    "a buffer that becomes another one",
    "a backward hook of all modules",
    "a hook of its own added",
}
"""One of each kind of change."""
BY_OPTIMIZE = ("a float", "a global", "Dropout.p", "the forward of a class", "a tied weight", "a hook replaced")


@pytest.mark.parametrize(
    ("way", "name"),
    [
        *(("enable", name) for name in CASES if name in QUICK),
        *first(
            0, [*(("enable", name) for name in CASES if name not in QUICK), *(("optimize", n) for n in BY_OPTIMIZE)]
        ),
    ],
)
def test_a_change_between_steps_counts(way: str, name: str) -> None:
    make, change = CASES[name]
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    model = make()
    run = planned(way, model)
    assert equal(step(plain, plain, 1), step(model, run, 1))
    before = step(plain, plain, 2)
    assert equal(before, step(model, run, 2))
    change(plain)
    change(model)
    expected = step(plain, plain, 2)
    assert not equal(before, expected), "the change is none"
    assert equal(expected, step(model, run, 2))


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "a deep copy of what was pickled": lambda module: copy.deepcopy(pickle.loads(pickle.dumps(module))),
    "AveragedModel": lambda module: AveragedModel(module).module,
}


def saved_and_loaded(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS["torch.save"] = saved_and_loaded


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("way", first(1, ["enable", "optimize"]))
def test_a_copy_is_a_module_of_its_own(way: str, name: str) -> None:
    """It trains its own weights into its own gradients, by plans of its own or without; so does the source."""
    model = Scaled()
    run = planned(way, model)
    before = step(model, run, 1)
    copied = WAYS[name](run)
    fresh = Scaled()
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(0.5)
    fresh.load_state_dict(copied.state_dict())
    model.zero_grad(set_to_none=True)
    assert equal(step(copied, copied, 2), step(fresh, fresh, 2))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert equal(step(model, run, 1), before)
    if name in ("deepcopy", "AveragedModel"):
        assert len(plans_of(copied).plans) == 1


class Writes(nn.Module):
    """Keeps a running sum in a buffer, which it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers()
        self.register_buffer("total", torch.zeros(256, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.detach())
        return self.net(x) * self.total


def test_an_argument_that_shares_memory_with_a_buffer_trains_as_without_a_plan() -> None:
    model, plain = Writes(), Writes()
    plain.load_state_dict(model.state_dict())
    remat.enable(model, budget=remat.Fraction(1.0), planner="greedy", mode="graph")
    for each in (model, plain):
        each(torch.ones(256, 16)).sum().backward()
    assert torch.equal(model(model.total.view(256, 16)), plain(plain.total.view(256, 16)))
    assert torch.equal(model.total, plain.total)


class Numbered(nn.Module):
    def __init__(self, read: bool, returned: bool = False) -> None:
        super().__init__()
        self.net, self.read, self.returned = layers(), read, returned

    def forward(self, x: torch.Tensor, number: float) -> Any:
        y = self.net(x) * (1 - number / 100) if self.read else self.net(x)
        return (y, number) if self.returned else y


def test_a_number_that_is_not_read_costs_no_plan() -> None:
    model = remat.enable(Numbered(False), budget=remat.Fraction(1.0), planner="greedy")
    for number in range(12):
        model(torch.ones(256, 16), number).sum().backward()
    assert len(plans_of(model).plans) == 1
    returned = remat.enable(Numbered(False, returned=True), budget=remat.Fraction(1.0), planner="greedy")
    for number in range(3):
        assert returned(torch.ones(256, 16), number)[1] == number


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize("way", ["enable", "optimize"])
def test_a_number_that_changes_in_each_call_trains_as_without_a_plan(way: str, returned: bool) -> None:
    torch.manual_seed(0)
    plain = Numbered(True, returned)
    model = copy.deepcopy(plain)
    given = {"budget": remat.Fraction(1.0), "planner": "greedy"}
    run = remat.enable(model, **given) if way == "enable" else remat.optimize(model, (torch.ones(256, 16), 0), **given)

    def loss(run: nn.Module) -> Callable[..., Any]:
        return lambda *args: run(*args)[0] if returned else run(*args)

    for number in (*range(6), 0, 1):
        assert equal(step(model, loss(run), 1, number), step(plain, loss(plain), 1, number))


def test_an_attribute_that_changes_in_each_call_trains_as_without_a_plan() -> None:
    torch.manual_seed(0)
    model = Scaled()
    plain = copy.deepcopy(model)
    remat.enable(model, budget=remat.Fraction(1.0), planner="greedy")
    for number in range(12):
        model.alpha = plain.alpha = number / 16
        assert equal(step(model, model, 1), step(plain, plain, 1))
