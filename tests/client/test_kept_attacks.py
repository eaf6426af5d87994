"""Changes between two processes that change what is traced, and could pass a kept capture by: none may."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from remat import CaptureError
from remat.capture import kept, trace
from remat.capture.kept import Captures

from .test_kept import keep

OTHER = """
import os
SCALE = 2.0
__version__ = "1.0"
def flag():
    return os.environ.get("REMAT_ATTACK") is not None
def scaled(y):
    return y * SCALE
"""

SOURCE = """
import abc, builtins, collections, contextvars, dataclasses, datetime, decimal, enum, fractions, functools, itertools
import logging, math, operator, os, pathlib, random, sys, time, types, weakref
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
import kept_other

def setup(model):
    pass

{program}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        setup(self)

    def forward(self, x):
        return step(self, self.linear(x)).sum()
"""

_ENTRY = re.compile(r"## (.+): (.+)\n((?:.*\n)*?)--\n((?:.+\n?)+)")

ATTACKS = {name: (*rest,) for name, *rest in _ENTRY.findall(Path(__file__).with_name("kept_attacks.txt").read_text())}
"""By name: what must come of it, a program, and what is changed after a capture of it was kept.

What comes of it is a "miss", or "not captured", or "not kept", or the "same" graph after the change.
"""

THERE = {name: types.ModuleType(name) for name in ("kept_other", "kept_attack")}


def module_of(name: str, text: str) -> types.ModuleType:
    """The module of this name, with this text and nothing else in it."""
    made = sys.modules[name]
    made.__dict__.clear()
    made.__dict__.update(__name__=name, __package__="")
    exec(compile(text, f"{name}.py", "exec"), made.__dict__)
    return made


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What changes may call."""
    for name, made in THERE.items():
        monkeypatch.setitem(sys.modules, name, made)
    undo: list[Callable[[], Any]] = []
    yield {
        "patch": monkeypatch.setattr,
        "setenv": monkeypatch.setenv,
        "there": lambda name: monkeypatch.setitem(sys.modules, name, types.ModuleType(name)),
        "chdir": lambda: monkeypatch.chdir(tmp_path),
        "undo": undo,
    }
    monkeypatch.undo()
    for each in undo:
        each()


def outcome(captures: Captures, attack: str, change: dict[str, Any]) -> str:
    """What comes of a capture that was kept before a change."""
    _, program, changes = ATTACKS[attack]

    def model_of() -> Any:
        module_of("kept_other", OTHER)
        return module_of("kept_attack", SOURCE.replace("{program}", program)).Model()

    model, args = model_of(), (torch.ones(4, 8),)
    try:
        before = trace._traced(model, args, {}, model)[2]
    except CaptureError:
        return "not captured"
    if not keep(captures, model, args):
        return "not kept"
    model = model_of()
    assert captures.find(model, model, args, {}) is not None, "it is found where nothing has changed"
    there = sys.modules["kept_attack"].__dict__
    there.update(change, model=model)
    exec(changes, there)
    found = captures.find(model, model, args, {}) is not None
    try:
        same = kept.same(before, trace._traced(model, args, {}, model)[2])
    except CaptureError:
        same = False
    assert same or not found, "the capture of another program was used"
    return "same" if same else "miss"


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_change_passes_by(tmp_path: Path, attack: str, change: dict[str, Any]) -> None:
    assert outcome(Captures(tmp_path / "captures", 0.0), attack, change) == ATTACKS[attack][0]
