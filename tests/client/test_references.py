"""What a plan leaves behind: nothing that a call was given, and no order that holds no longer."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import remat
from client.small_models import module_of
from client.test_changes_before_backward import Given
from client.test_training_loops import Net, numbers, played, train
from remat.compile.alone import capture
from remat_ir.greedy import checkpointed


def test_nothing_that_a_call_was_given_is_kept() -> None:
    """Neither its arguments, nor tensors that others have taken the place of, nor the module itself.

    The name of its compiled function stays among this module's globals, as after plain `torch.compile`.
    """
    holding = module_of(lambda self, x: F.relu(self.net(x)) * self.factor, net=Net(), factor=torch.ones(8))
    model: Any = remat.enable(holding, budget="1GiB", planner=Given(checkpointed), mode="graph")
    x = numbers()
    train(model, x)
    gone = [weakref.ref(t) for t in (x, model.factor, model.net.one.weight)]
    del x
    model.factor = torch.zeros(8)
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    train(model)
    gc.collect()
    assert [ref() is None for ref in gone] == [True] * 3
    left = weakref.ref(model)
    del model, holding
    gc.collect()
    assert left() is None


def test_nothing_of_a_call_that_was_captured_alone_is_kept() -> None:
    """Dynamo keeps what compiled a graph until it is reset: a batch next to it would be one that training lacks."""
    model, x = Net(), numbers()
    traced = capture(model, (x,))
    assert any(given is x for given in traced.inputs)
    gone = [weakref.ref(x), weakref.ref(model)]
    del x, model, traced
    gc.collect()
    assert [ref() is None for ref in gone] == [True] * 2


def test_buffers_that_become_one_are_planned_anew() -> None:
    """The groups of a known step may not run in their order where a buffer that is read is now one that is written."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(0.0)
            self.register_buffer("total", torch.ones(4, 8))
            self.register_buffer("factor", torch.ones(4, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total.add_(1)
            return self.net(x * self.factor)

    def scene(m: Any, run: Any) -> list[Any]:
        train(run)
        m.factor = m.total
        return [train(run)]

    plain, planned = (played(Adds, scene, plans) for plans in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True) if a is not None and b is not None)
