"""Captures that another process kept: used where nothing that tracing read is different, and a miss anywhere else."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from remat.capture import kept, trace
from remat.capture.kept import Captures
from remat.settings import settings

SOURCE = """
import os

import torch
from torch import nn

SCALE = 2.0
SETTINGS = {"on": True}

def helper(x, plus=0.5):
    return x * SCALE + plus

def shifting(by):
    def shift(x):
        return x + by
    return shift

class Config:
    def __init__(self):
        self.act = "relu"

class Model(nn.Module):
    kind = "plain"

    def __init__(self):
        super().__init__()
        self.config = Config()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.shift = shifting(1.0)
        self.register_buffer("mask", torch.ones(8))
        self.register_buffer("count", torch.zeros(8))

    def act(self, x):
        return torch.relu(x) if self.config.act == "relu" else torch.tanh(x)

    def forward(self, x, z, times=2):
        y = self.shift(helper(self.second(self.first(x)))) * self.mask + z
        if SETTINGS["on"] and os.environ.get("REMAT_TEST_VARIABLE") is None:
            y = self.act(y)
        if self.kind == "plain":
            y = y * times
        self.count.add_(1)
        return y.sum()
"""


def module_of(source: str) -> types.ModuleType:
    """The source as a module, always of the same name."""
    made = types.ModuleType("kept_source")
    sys.modules["kept_source"] = made
    exec(compile(source, "kept_source.py", "exec"), made.__dict__)
    return made


def example() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(4, 8), torch.ones(4, 8)


def keep(captures: Captures, model: nn.Module, args: Any) -> bool:
    graph, guards, descriptor, _ = trace._traced(model, args, {}, model)
    assert guards.hold(model, args, {})
    return captures.keep(graph, guards, descriptor, model, model, args, {})


def hit(captures: Captures, model: nn.Module, args: Any) -> bool:
    return captures.find(model, model, args, {}) is not None


@pytest.fixture
def captures(tmp_path: Path) -> Captures:
    """With the capture of a model as SOURCE has it."""
    found = Captures(tmp_path / "captures", 0.0)
    assert keep(found, module_of(SOURCE).Model(), example())
    assert hit(found, module_of(SOURCE).Model(), example())
    return found


EDITS = {
    "body of a helper": ("x * SCALE + plus", "x * SCALE - plus"),
    "global": ("SCALE = 2.0", "SCALE = 3.0"),
    "default": ("plus=0.5", "plus=0.25"),
    "closure": ("shifting(1.0)", "shifting(1.5)"),
    "code of a closure": ("return x + by", "return x - by"),
    "dictionary": ('"on": True', '"on": False'),
    "configuration": ('self.act = "relu"', 'self.act = "tanh"'),
    "attribute of the class": ('kind = "plain"', 'kind = "other"'),
    "method": ("torch.tanh(x)", "torch.sigmoid(x)"),
    "default of forward": ("times=2", "times=3"),
    "buffer": ("torch.ones(8)", "torch.ones(8, dtype=torch.float64)"),
    "operator": ("* self.mask + z", "/ self.mask + z"),
    "base class": ("class Model(nn.Module):", "class Model(nn.Sequential):"),
    "constructor": ("nn.Linear(8, 8), nn.Linear(8, 8)", "nn.Linear(8, 8), nn.Linear(8, 8, bias=False)"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_code_is_a_miss(captures: Captures, edit: str) -> None:
    before, after = EDITS[edit]
    assert before in SOURCE
    assert not hit(captures, module_of(SOURCE.replace(before, after)).Model(), example())


def test_code_that_is_not_traced_may_change(captures: Captures) -> None:
    more = SOURCE + "\ndef unrelated():\n    return 1\n\n" + SOURCE.replace("SCALE = 2.0", "SCALE =  2.0 # the same")
    assert hit(captures, module_of(more).Model(), example())


def _patched_method(model: Any) -> None:
    type(model).act = lambda self, x: torch.tanh(x)


def _patched_instance(model: Any) -> None:
    model.forward = types.MethodType(lambda self, x, z: (x * z).sum(), model)


def _patched_part(model: Any) -> None:
    model.first.forward = lambda x: x * 2


def _hook(model: Any) -> None:
    model.second.register_forward_hook(lambda module, args, result: result * 2)


def _pre_hook(model: Any) -> None:
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2, args[1]))


def _tied(model: Any) -> None:
    model.second.weight = model.first.weight


def _aliased(model: Any) -> None:
    model.mask = model.first.bias.detach()


def _aliased_buffers(model: Any) -> None:
    model.count = model.mask


def _strided(model: Any) -> None:
    model.first.weight = nn.Parameter(model.first.weight.detach().t().contiguous().t())


def _frozen(model: Any) -> None:
    model.first.weight.requires_grad_(False)


def _configured(model: Any) -> None:
    model.config.act = "gelu"


def _evaluating(model: Any) -> None:
    model.first.eval()


def _another_class(model: Any) -> None:
    model.second.__class__ = type("Linear", (nn.Linear,), {"forward": lambda self, x: x})


CHANGES: dict[str, Callable[[Any], None]] = {
    name.lstrip("_"): change
    for name, change in list(globals().items())
    if name.startswith("_") and isinstance(change, types.FunctionType) and change.__module__ == __name__
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_module_is_a_miss(captures: Captures, change: str) -> None:
    model = module_of(SOURCE).Model()
    CHANGES[change](model)
    assert not hit(captures, model, example())


def test_other_arguments_are_a_miss(captures: Captures) -> None:
    model, (x, z) = module_of(SOURCE).Model(), example()
    assert not hit(captures, model, (x[:2], z[:2]))
    assert not hit(captures, model, (x.double(), z))
    assert not hit(captures, model, (x.clone().requires_grad_(), z))
    assert not hit(captures, model, (x, x)), "one tensor twice is another call"
    assert not hit(captures, model, (x, x.view(4, 8))), "and so are two in one storage"
    assert not hit(captures, model, (x.t().contiguous().t(), z))
    assert not hit(captures, model, (x, z, 3))
    assert hit(captures, model, (x, z))


def test_other_settings_are_a_miss(captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    model, args = module_of(SOURCE).Model(), example()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not hit(captures, model, args)
    with torch.autograd.graph.save_on_cpu():
        assert not hit(captures, model, args)
    monkeypatch.setenv("REMAT_TEST_VARIABLE", "1")
    assert not hit(captures, model, args)
    monkeypatch.delenv("REMAT_TEST_VARIABLE")
    monkeypatch.setenv("REMAT_ANOTHER_VARIABLE", "1")
    assert hit(captures, model, args)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "relu", lambda x: x)
        assert not hit(captures, model, args)
    with monkeypatch.context() as patched:
        patched.setattr(nn.functional, "linear", lambda x, weight, bias=None: x)
        assert not hit(captures, model, args)
    with monkeypatch.context() as patched:
        patched.setattr(nn.Linear, "forward", lambda self, x: x)
        assert not hit(captures, model, args)
    torch.use_deterministic_algorithms(True)
    try:
        assert not hit(captures, model, args)
    finally:
        torch.use_deterministic_algorithms(False)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, result: None)
    try:
        assert not hit(captures, model, args)
    finally:
        handle.remove()
    assert hit(captures, model, args)


def test_damaged_files_are_misses(captures: Captures) -> None:
    (path,) = captures.folder.glob("*.capture")
    whole = path.read_bytes()
    draw = random.Random(0)
    model, args = module_of(SOURCE).Model(), example()
    for _ in range(60):
        at = draw.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << draw.randrange(8))]) + whole[at + 1 :])
        assert not hit(captures, model, args)
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert not hit(captures, model, args)
    path.write_bytes(whole)
    assert hit(captures, model, args)
    path.chmod(0o666)
    assert not hit(captures, model, args), "others could have written it"
    path.chmod(0o600)
    captures.folder.chmod(0o777)
    assert not hit(captures, model, args)


def test_bytes_name_nothing_but_metadata(captures: Captures) -> None:
    (path,) = captures.folder.glob("*.capture")
    line, _, data = path.read_bytes().partition(b"\n")
    head = json.loads(line)
    del head["sha256"]

    def sealed(parts: dict[str, Any]) -> bool:
        body = json.dumps(parts).encode()
        said = {**head, "sha256": hashlib.sha256(json.dumps(head, sort_keys=True).encode() + body).hexdigest()}
        path.write_bytes(json.dumps(said).encode() + b"\n" + body)
        return hit(captures, module_of(SOURCE).Model(), example())

    parts = json.loads(data)
    assert sealed(parts)
    values, shapes = parts["values"], parts["shapes"]
    assert not sealed({**parts, "shapes": [*shapes, ["os", "_Environ", []]]})
    popen = {"shapes": [*shapes, ["subprocess", "Popen", ["args"]]]}
    assert not sealed({**parts, **popen, "values": [*values, ["object", len(shapes), "true"]]})
    assert not sealed({**parts, "values": [*values, ["type", "subprocess", "Popen"]]})
    assert not sealed({**parts, "values": [*values, ["operator", "os.system.default"]]})
    assert not sealed({**parts, "values": [*values, [len(values) + 1, 0]]})
    assert not sealed({**parts, "values": [*values, ["partial", "print"]]})
    assert not sealed({**parts, "body": ["type", "subprocess", "Popen"]})
    assert sealed({**parts, "values": [*values, ["type", "builtins", "int"]]})


def test_writers_at_once(captures: Captures) -> None:
    model, args = module_of(SOURCE).Model(), example()
    graph, guards, descriptor, _ = trace._traced(model, args, {}, model)
    done: list[bool] = []
    threads = [
        threading.Thread(target=lambda: done.append(captures.keep(graph, guards, descriptor, model, model, args, {})))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * 4
    assert len(list(captures.folder.glob("*.capture"))) == 1
    assert hit(captures, model, args)


class ReadsAnotherTensor(nn.Module):
    """With a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table = [torch.ones(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.table[0]).sum()


@torch._dynamo.assume_constant_result
def constant() -> float:
    return 2.0


class Draws(nn.Module):
    """With a number that each call draws anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * random.uniform(1, 5)).sum()


@torch.compiler.allow_in_graph
def left_alone(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class LeavesToAutograd(Draws):
    """With a function that is not traced by Dynamo: what it calls is not seen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return left_alone(self.linear(x)).sum()


class CallsForAConstant(Draws):
    """With a function that runs while the step is traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * constant()).sum()


TABLE = {f"plus_{n}": float(n) for n in range(3)}


class Numbers:
    def __init__(self) -> None:
        self.__dict__.update(TABLE)


class Composes(Draws):
    """With names that no code spells out."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.which = Numbers(), 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plus: float = getattr(self.numbers, "plus_" + str(self.which))
        return (self.linear(x) + plus).sum()


@pytest.mark.parametrize("model", [ReadsAnotherTensor, Draws, LeavesToAutograd, CallsForAConstant, Composes])
def test_what_a_graph_alone_does_not_say_is_not_kept(tmp_path: Path, model: type[nn.Module]) -> None:
    assert not keep(Captures(tmp_path, 0.0), model(), (torch.ones(2, 4),))


def test_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    assert not settings().keep_captures
    assert Captures.here() is None
    monkeypatch.setenv("REMAT_KEEP_CAPTURES", "1")
    found = Captures.here()
    assert found is not None
    assert found.folder == tmp_path / "captures"
    assert found.from_s == kept.KEPT_FROM_S
