"""Hooks of all modules that another thread registers and removes while a step is captured."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules

import remat
from remat._compat import tracing
from remat.compile.sized import Backend


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
