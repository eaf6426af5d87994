"""A call that is planned ahead in one thread, while another trains the same module."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import remat
from client.small_models import numbers

PLANNING, TRAINED, WAITS = threading.Event(), threading.Event(), threading.Event()


@torch.library.custom_op("remat_tests::met", mutates_args=())
def met(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@met.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    """Once it is asked to, the trace waits until the other thread has trained a step."""
    if WAITS.is_set():
        PLANNING.set()
        assert TRAINED.wait(240)
    return torch.empty_like(x)


class Meeting(nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        y: torch.Tensor = self.layers(x) + met(x.detach())
        return y.square().mean()


@pytest.mark.thorough
def test_another_thread_trains_while_a_call_is_planned_ahead() -> None:
    """The raise that ends a planned call is of that thread's alone."""
    model = remat.enable(Meeting(), budget="100%", planner="greedy", on_failure="raise")
    known, new = numbers(4, 8), numbers(6, 8)
    model(known).backward()
    alone = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    raised: list[BaseException] = []

    def trains() -> None:
        try:
            assert PLANNING.wait(240)
            model(known).backward()
        except BaseException as error:
            raised.append(error)
        finally:
            TRAINED.set()

    other = threading.Thread(target=trains)
    other.start()
    WAITS.set()
    try:
        planned = remat.plans_of(model).plan_for((new,))
    finally:
        WAITS.clear()
        other.join()
    assert not raised
    assert planned is not None
    assert len(remat.plans_of(model).plans) == 2
    assert float(model.calls) == 2, "the planned call has not run"
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(map(torch.equal, found, alone))
    assert len(found) == len(alone) == 4
