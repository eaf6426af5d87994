"""What cannot be captured trains as a chain of stages, through the same door."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import remat
from client.comparing import outcome
from client.planners import OnDemand
from client.small_models import Mlp, mean_square, numbers
from remat.chains.modules import ChainedModule
from remat.errors import CaptureError
from remat.profiling import measure
from remat_ir import Answer, InvalidData
from tiers import first


class Recurrent(nn.Module):
    """A recurrent stage with dropout, which no graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.LSTM(16, 16, batch_first=True), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(torch.tanh(self.inner(x)[0]))


def recurrent() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Recurrent() for _ in range(6)))


@pytest.mark.parametrize("mode", first(1, ["auto", "chain"]))
def test_recurrent_stages_train_exactly_as_a_chain(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    module, x = recurrent(), numbers(8, 12, 16)
    plain = copy.deepcopy(module)
    with caplog.at_level(logging.INFO, "remat"):
        trained = remat.optimize(module, (x,), budget=remat.Fraction(0.6), planner="greedy", mode=mode)
    assert ("the stages run as a chain" in caplog.text) == (mode == "auto")
    (chain,) = remat.plans_of(trained).chains
    assert remat.plans_of(trained).plans == ()
    assert chain.answer.overhead
    assert trained is module
    assert measure.differences(outcome(plain, plain, x, mean_square), outcome(module, module, x, mean_square)) == []
    text = remat.explain(trained)
    assert "a chain of 6 stages" in text
    assert "Recurrent" in text
    with torch.no_grad():
        assert torch.equal(trained.eval()(x), plain.eval()(x))


def test_a_call_that_is_wrong_itself_makes_no_chain_of_the_stages() -> None:
    """Dynamo says of it, too, that it is no single graph."""
    model = remat.enable(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), budget="100%", planner="greedy")
    model(numbers(4, 16)).sum().backward()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(numbers(4, 15))
    model(numbers(4, 16)).sum().backward()
    found = remat.plans_of(model)
    assert (found.calls, len(found.plans), found.chains) == ((2, 0), 1, ())


@pytest.mark.thorough
def test_no_step_of_a_chain_waits_at_another_size() -> None:
    """It starts on the plan of the first size and ends the step by it; the better one takes over at the next."""
    module, planner, small, large = recurrent(), OnDemand(0.6), numbers(4, 12, 16), numbers(8, 12, 16)
    asking: dict[str, Any] = {"budget": remat.Fraction(1), "planner": planner, "max_gap": 0}

    reference = copy.deepcopy(module)
    run: Any = remat.optimize(module, (small,), mode="chain", **asking)
    run(small)

    def chain_of_large() -> ChainedModule:
        return next(chain for chain in remat.plans_of(run).chains if chain.chain.activation_bytes[0] == large.nbytes)

    plain = outcome(reference, reference, large, mean_square)
    assert measure.differences(plain, outcome(module, run, large, mean_square)) == [], "while the planner is at work"
    chain = chain_of_large()
    assert chain.answer.cache == "near"
    assert chain.answer.overhead
    assert copy.deepcopy(chain).better is None
    loss = run(large).square().mean()
    planner.go.set()
    assert chain.better.wait(60) is not None
    loss.backward()  # ends by the plan that it began with
    module.zero_grad()
    assert measure.differences(plain, outcome(module, run, large, mean_square)) == []
    assert chain_of_large() is chain
    assert chain.answer.overhead == 0
    assert chain.better is None
    assert planner.asked == 2


@pytest.mark.thorough
def test_a_chain_may_start_without_waiting() -> None:
    module, planner, x = recurrent(), OnDemand(0.6), numbers(4, 12, 16)
    planner.asked = 1
    trained = remat.optimize(module, (x,), budget=remat.Fraction(0.6), planner=planner, mode="chain", wait=False)
    (chain,) = remat.plans_of(trained).chains
    assert chain.answer.method == "greedy"
    assert chain.better.found() is None
    planner.go.set()


@pytest.mark.thorough
@pytest.mark.parametrize("reserved", [None, 12345])
def test_a_better_plan_that_reserves_more_than_the_budget_is_left(reserved: int | None) -> None:
    """On an accelerator what a plan reserves is known from a rehearsal, at the start of the step that could take it."""
    module, planner, small, large = recurrent(), OnDemand(0.6), numbers(4, 12, 16), numbers(8, 12, 16)
    trained = remat.optimize(module, (small,), budget=remat.Fraction(1), planner=planner, max_gap=0, mode="chain")
    trained(large)
    chain = next(c for c in remat.plans_of(trained).chains if c.better is not None)
    quick, looked = chain.plan, list[Answer]()

    def reserves(answer: Answer) -> int | None:
        looked.append(answer)
        return reserved

    chain.reserves = reserves
    planner.go.set()
    better = chain.better.wait(60)
    for _ in range(2):
        trained(large)
    assert looked == [better]
    assert (chain.plan == quick) == (reserved is None)
    assert chain.reserved_bytes == reserved


@pytest.mark.thorough
def test_a_larger_input_than_a_chain_was_planned_for_is_told(caplog: pytest.LogCaptureFixture) -> None:
    module = recurrent()
    trained = remat.optimize_chain(module, numbers(4, 12, 16), budget=remat.Fraction(0.6), planner="greedy")
    trained(numbers(2, 12, 16))
    assert not caplog.records
    for _ in range(2):
        trained(numbers(8, 12, 16))
    (record,) = caplog.records
    assert "the budget may be exceeded" in record.getMessage()


def test_what_no_mode_trains_is_refused_by_name() -> None:
    x = (numbers(4, 12, 16),)
    with pytest.raises(InvalidData, match=r"takes an nn\.Sequential and one tensor, not Recurrent"):
        remat.optimize(Recurrent(), x, budget=remat.Fraction(1), planner="greedy", mode="chain")
    with pytest.raises(CaptureError, match=r"takes an nn\.Sequential and one tensor, not a Sequential and 1"):
        remat.optimize(recurrent(), (x,), budget="100%", planner="greedy", mode="chain", on_failure="raise")
    with pytest.raises(InvalidData, match="mode is one of 'auto'"):
        remat.optimize(Mlp(16), (numbers(4, 16),), budget="1GiB", mode="best")
