"""Shares of what plain training needs: of a module that checkpoints itself, and of one whose share is too small."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from remat.errors import BudgetTooSmall
from remat.profiling.measure import peak_memory


class Net(nn.Module):
    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x))
        return x.square().mean()


X = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))


def test_a_module_that_checkpoints_is_told_what_a_share_comes_to(caplog: pytest.LogCaptureFixture) -> None:
    model, plain = Net(True), Net(True)
    remat.optimize(model, X, budget="60%", planner="greedy")
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "checkpoints" in r.message]
    assert said.startswith("the module has 6 checkpoints of its own, which a plan takes out")
    found = re.search(r"about ([\d.]+) MiB above the fixed bytes, a share of ([\d.]+)%; 60% come to ([\d.]+) MiB", said)
    needed, share, come_to = map(float, found.groups())
    measured = peak_memory(lambda: plain(X).backward()).peak_bytes / 2**20  # with its gradients, as it was planned
    assert needed == pytest.approx(measured, rel=0.1)
    assert needed / share == pytest.approx(come_to / 60, rel=0.05)


def test_nothing_is_said_of_bytes_and_of_a_module_without_checkpoints(caplog: pytest.LogCaptureFixture) -> None:
    remat.optimize(Net(False), X, budget="60%", planner="greedy")
    remat.optimize(Net(True), X, budget="1GiB", planner="greedy")
    assert not [r for r in caplog.records if "checkpoints of its own" in r.message]


def test_a_share_that_is_too_small_names_the_one_that_is_enough() -> None:
    model = Net(False)
    with pytest.raises(BudgetTooSmall, match="is enough, a share of ") as raised:
        remat.optimize(model, X, budget="1%", planner="greedy")
    share = str(raised.value).rpartition(" ")[2]
    assert remat.plans_of(remat.optimize(model, X, budget=share, planner="greedy")).plans
