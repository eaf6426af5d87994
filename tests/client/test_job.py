"""What of a job is there next to its passes: found by a dry run, and held within the budget; and shares of it."""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from client.small_models import Mlp, numbers
from remat.errors import BudgetTooSmall
from remat.profiling.measure import peak_memory
from remat.profiling.optimizers import takes_closure, update_memory
from remat.training.enable import plans_of
from remat_ir import InvalidData
from tiers import first


class EightBit(torch.optim.Optimizer):
    """A state in bytes, as 8-bit optimizers keep it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["coarse"] = torch.full_like(p, 128, dtype=torch.uint8)
                momentum = (state["coarse"].float() - 128).mul_(0.9).add_(p.grad.sign())
                state["coarse"].copy_(momentum.add_(128))
                p.add_(momentum, alpha=-group["lr"])


MADE: dict[str, Any] = {
    "SGD": torch.optim.SGD,
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1, foreach=True),
    "AdamW": torch.optim.AdamW,
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adafactor": torch.optim.Adafactor,
    "Muon": torch.optim.Muon,
    "8-bit": EightBit,
    "NAdam": torch.optim.NAdam,
    "RAdam foreach": lambda p: torch.optim.RAdam(p, foreach=True),
    "AdamW amsgrad foreach": lambda p: torch.optim.AdamW(p, amsgrad=True, foreach=True),
    "Adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("name", first(4, MADE))
def test_a_dry_run_finds_what_the_step_takes(name: str) -> None:
    model = nn.Sequential(*(nn.Linear(96, 96, bias=name != "Muon") for _ in range(5)))
    optimizer = MADE[name](list(model.parameters()))
    before = copy.deepcopy(optimizer.state_dict()), [p.clone() for p in model.parameters()]
    there = sum(t.nbytes for of in optimizer.state.values() for t in of.values())  # Adagrad's, from the beginning
    found = update_memory(optimizer)
    torch.testing.assert_close(optimizer.state_dict()["state"], before[0]["state"], rtol=0, atol=0)
    assert all(torch.equal(a, b) and a.grad is None for a, b in zip(model.parameters(), before[1], strict=True))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    first = peak_memory(optimizer.step)
    state = there + first.left_bytes
    # some run other kernels from their sixth step on
    later = peak_memory(lambda: [optimizer.step() for _ in range(7)])
    temporaries = max(first.peak_bytes - first.left_bytes, later.peak_bytes - later.left_bytes)
    assert found.state_bytes == pytest.approx(state, rel=0.01, abs=256)
    if name != "Muon":  # its products in bfloat16 take workspace inside the kernel, which a dry run cannot see
        assert found.temporaries_bytes == pytest.approx(temporaries, rel=0.03, abs=2048)


def test_a_step_that_reads_its_numbers_runs_on_small_parameters() -> None:
    model = nn.Linear(300, 300, bias=False)
    size = 300 * 300 * 4
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=5)
    assert takes_closure(optimizer)
    assert not takes_closure(torch.optim.SGD(model.parameters()))
    found = update_memory(optimizer)
    # five pairs, the direction, and the gradient before
    assert found.state_bytes == pytest.approx(12 * size, rel=0.02)
    assert 0 < found.beside_passes_bytes <= found.temporaries_bytes
    assert not optimizer.state


def test_a_step_that_asks_its_tensors_is_extended_to_the_true_size() -> None:
    class Asking(EightBit):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                if (group["params"][0].grad.abs().max() > 0).item():
                    super().step()

    for rows in (8, 3000):
        model = nn.Linear(rows, 64, bias=False)
        found = update_memory(Asking(model.parameters()))
        assert found.state_bytes == pytest.approx(rows * 64, rel=0.01)


def test_what_cannot_be_found_out_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ValueError("no step today")

    assert update_memory(Broken(Mlp(8).parameters())) == (0, 0, 0)
    assert "a step of Broken takes could not be found out (ValueError: no step today)" in caplog.text


def planned(budget: Any, calls: int, **fields: Any) -> tuple[nn.Module, torch.Tensor]:
    model, x = Mlp(64), numbers(512, 64)
    remat.enable(model, budget=budget, planner="greedy", self_check=False, **fields)
    for _ in range(calls):
        model(x).sum().backward()
    return model, x


def test_gradients_that_stay_are_seen() -> None:
    model, x = planned("2MiB", 3)
    size = sum(p.numel() * 4 for p in model.parameters())
    plans = list(plans_of(model).plans)
    assert [p.step.fixed["gradients"] for p in plans if p] == [0, size]
    model.zero_grad()
    model(x).sum().backward()
    model(x).sum().backward()
    assert len(plans_of(model).plans) == 2


def test_accumulation_that_is_said_needs_one_plan() -> None:
    model, _ = planned("2MiB", 3, accumulate=3)
    size = sum(p.numel() * 4 for p in model.parameters())
    assert [p.step.fixed["gradients"] for p in plans_of(model).plans if p] == [size]


def test_a_share_leaves_the_same_room_beside_gradients() -> None:
    model, _ = planned(remat.Fraction(0.8), 3)
    assert len(plans_of(model).plans) == 1


def test_a_step_over_the_budget_is_said_with_what_helps(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Mlp(256), numbers(8, 256)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    size = sum(p.numel() * 4 for p in model.parameters())
    with caplog.at_level(logging.WARNING, "remat"):
        trained = remat.optimize(model, (x,), budget=int(4.5 * size), planner="greedy", optimizer=optimizer)
    assert "the optimizer's own step needs" in caplog.text
    assert "fused=True takes" in caplog.text
    assert "foreach=False takes" in caplog.text
    text = remat.explain(trained)
    (plan,) = remat.plans_of(trained).plans
    assert plan.update_peak_bytes == pytest.approx(5 * size, rel=0.05)
    for line in ("parameters", "gradients", "optimizer state", "optimizer step's temporaries", "activations"):
        assert f"\n{line} " in text
    assert "over the budget of" in text


def test_copies_count_once() -> None:
    model, x = Mlp(64), numbers(64, 64)
    size = sum(p.numel() * 4 for p in model.parameters())
    for ema, count in ((copy.deepcopy(model), 1), ([p.detach().clone() for p in model.parameters()], 1), (model, 0)):
        trained = remat.optimize(remat.disable(model), (x,), budget=remat.Fraction(1), planner="greedy", ema=ema)
        (plan,) = remat.plans_of(trained).plans
        assert plan.step.fixed.get("EMA copies", 0) == count * size


def test_gradients_that_stay_may_be_too_much() -> None:
    x = numbers(4, 64)
    probe = remat.optimize(Mlp(64), (x,), budget=remat.Fraction(1), planner="greedy")
    (plan,) = remat.plans_of(probe).plans
    budget = plan.answer.budget_bytes
    remat.optimize(Mlp(64), (x,), budget=budget, planner="greedy")
    with pytest.raises(BudgetTooSmall):
        remat.optimize(Mlp(64), (x,), budget=budget, planner="greedy", accumulate=2)


@pytest.mark.parametrize("wrong", [{"ema": 3}, {"ema": ["a"]}, {"accumulate": 0}, {"clip_grad_norm": 1.0}])
def test_what_is_no_job_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidData):
        remat.enable(Mlp(8), budget="1MiB", **wrong)


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
