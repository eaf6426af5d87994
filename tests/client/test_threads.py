"""What other threads do while a step is planned or captured: they train the same module, and hook all modules."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules

import remat
from client.small_models import numbers
from remat._compat import tracing
from remat.compile.sized import Backend

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


@pytest.mark.thorough
def test_hooks_of_all_modules_are_those_that_other_threads_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread works while AOTAutograd's export runs, which is otherwise a matter of luck."""
    removed = modules.register_module_forward_hook(lambda *_: None)
    added: list[Any] = []
    export = tracing.aot_export_joint_with_descriptors

    def other() -> None:
        added.append(modules.register_module_forward_hook(lambda *_: None))
        removed.remove()

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return export(*args, **kwargs)

    monkeypatch.setattr(tracing, "aot_export_joint_with_descriptors", meanwhile)
    try:
        remat.optimize(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.ones(4, 8), budget="100%", planner="greedy")
        there = set(modules._global_forward_hooks)
        assert (added[0].id in there, removed.id in there) == (True, False)
    finally:
        for handle in (*added, removed):
            modules._global_forward_hooks.pop(handle.id, None)


@pytest.mark.thorough
@pytest.mark.parametrize("ahead", [True, False])
def test_a_capture_that_hooks_end_is_made_again(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """Another thread removes a hook of all modules between Dynamo's trace and its guards, which look for it."""
    removed = [modules.register_module_forward_hook(lambda *_: None) for _ in range(2)]
    compiled, ended = Backend.__call__, 0

    def meanwhile(self: Backend, *args: Any) -> Any:
        nonlocal ended
        if removed:
            ended += 1
            thread = threading.Thread(target=removed.pop().remove)
            thread.start()
            thread.join()
        return compiled(self, *args)

    monkeypatch.setattr(Backend, "__call__", meanwhile)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.ones(4, 8)
    if ahead:
        remat.optimize(model, x, budget="100%", planner="greedy")
    else:
        remat.enable(model, budget="100%", planner="greedy")
    model(x).sum().backward()
    assert ended == 2
    assert len(remat.plans_of(model).plans) == 1
