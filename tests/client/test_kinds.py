"""What is looked at before every step: quick, and blind to nothing that a plan takes for granted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from remat.capture.guards import Call, Holders, parts, state_of, what_changed


def network() -> nn.Module:
    first = nn.Linear(4, 4)
    return nn.Sequential(first, nn.BatchNorm1d(4), nn.Sequential(nn.Dropout(), first), nn.Linear(4, 2))


CHANGES: dict[str, tuple[str, Callable[[nn.Module], object]]] = {
    "eval inside": ("train mode", lambda m: m[2][0].eval()),  # type: ignore[index]
    "frozen": ("parameters", lambda m: m[0].weight.requires_grad_(False)),  # type: ignore[index]
    "another dtype in place": ("parameters", lambda m: m[3].double()),  # type: ignore[index]
    "another shape in place": (
        "parameters",
        lambda m: setattr(m[3].weight, "data", torch.zeros(5, 4)),  # type: ignore[index]
    ),
    "a buffer": ("buffers", lambda m: m[1].register_buffer("extra", torch.zeros(1))),  # type: ignore[index]
    "a hook": ("hooks", lambda m: m[2][1].register_forward_hook(lambda *_: None)),  # type: ignore[index]
}


def _key(module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    call = Call(module, module, args, kwargs)
    return (*call.arguments, *call.numbers), *state_of(module)


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_plan_takes_for_granted_is_in_the_key(name: str) -> None:
    aspect, change = CHANGES[name]
    module, args = network(), (torch.zeros(3, 4),)
    before = _key(module, args, {})
    assert _key(module, args, {}) == before
    change(module)
    after = _key(module, args, {})
    assert after != before
    assert aspect in what_changed(after, before)


def test_the_log_says_in_what_the_arguments_differ() -> None:
    module, x = network(), torch.zeros(3, 4)

    def told(*args: torch.Tensor) -> str:
        return what_changed(_key(module, args, {}), _key(module, (x, x), {}))

    assert told(x, torch.zeros(3, 4)) == "arguments (which of them are one tensor)"
    assert told(torch.zeros(2, 4), torch.zeros(4, 3).t()) == (
        "arguments (shape, strides, which of them are one tensor)"
    )
    assert told(x) == "arguments"


def test_every_module_is_seen_once() -> None:
    module = network()
    assert {id(part) for part in parts(module)} == {id(part) for part in module.modules()}
    assert len(list(parts(module))) == len(list(module.modules()))


def test_tensors_are_found_again_after_a_module_or_a_parameter_is_replaced() -> None:
    module = network()
    call = Call(module, module, (), {})
    holders = Holders(["0.weight", "1.running_mean", "3.bias"])

    def same() -> bool:
        wanted = [module[0].weight, module[1].running_mean, module[3].bias]  # type: ignore[index]
        return all(a is b for a, b in zip(holders.tensors(call), wanted, strict=True))

    assert same()
    module[3].bias = nn.Parameter(torch.ones(2))  # type: ignore[index]
    assert same()
    module[3] = nn.Linear(4, 2)  # type: ignore[index]
    assert same()
    module[1], module[3] = module[3], module[1]  # type: ignore[index]
    with pytest.raises((KeyError, AttributeError)):
        holders.tensors(call)
