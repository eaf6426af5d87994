"""`torch.compile(model, backend="remat")` and `model.compile(backend="remat")`: torch's own words for a plan."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from client.comparing import equal
from client.named_backend import installed
from client.test_adoption import Net, stock, trained
from remat.compile import named

OPTIONS = {"budget": "80%", "planner": "greedy"}


@pytest.fixture(autouse=True)
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        installed(tmp_path_factory.mktemp("site"), patch)
        yield
    torch._dynamo.reset()


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "model.compile"])
def test_the_name_plans(net: nn.Module, in_place: bool) -> None:
    """Loss, gradients, buffers and generator of stock, by a plan that computes something again."""
    expected = stock(copy.deepcopy(net))
    run: Any = net
    if in_place:
        net.compile(backend="remat", options=OPTIONS)
    else:
        run = torch.compile(net, backend="remat", options=OPTIONS)
    assert equal(expected, trained(net, run))
    ((_, backend),) = named._kept
    assert [bool(each.answer.overhead) for each in backend.planned] == [True]


def test_equal_options_share_a_backend_until_torch_forgets_its_graphs(net: nn.Module) -> None:
    for options in (OPTIONS, dict(OPTIONS), {**OPTIONS, "budget": "90%"}):
        torch.compile(copy.deepcopy(net), backend="remat", options=options, dynamic=False)(torch.randn(2, 3, 8, 8))
    assert [options["budget"] for options, _ in named._kept] == ["80%", "90%"]
    torch._dynamo.reset()
    assert not named._kept


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({}, 'backend="remat" needs a budget: options={"budget": "50%"}'),
        ({"options": {"planner": "greedy"}}, 'backend="remat" needs a budget'),
        ({"mode": "reduce-overhead"}, "backend=\"remat\" has no mode 'reduce-overhead'"),
        ({"options": {**OPTIONS, "max_gab": 0.1}}, "backend has no option max_gab; did you mean max_gap?"),
        ({"options": {**OPTIONS, "slack": 0.5}}, "slack must be a number of at least 1, not 0.5"),
        ({"options": {**OPTIONS, "budget": "half"}}, "half"),
    ],
    ids=["nothing", "no budget", "mode", "misspelt", "out of range", "no such budget"],
)
def test_what_it_does_not_take_is_refused_by_a_sentence(net: nn.Module, asked: dict[str, Any], sentence: str) -> None:
    """At the first step, where torch hands the options on for the first time."""
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        torch.compile(net, backend="remat", dynamic=False, **asked)(torch.randn(2, 3, 8, 8))
    assert sentence in str(caught.value)
