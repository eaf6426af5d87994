"""What cannot be captured trains as a chain of stages, through the same door."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import remat
from client.small_models import Mlp, numbers
from client.test_training import Counting
from remat.errors import CaptureError
from remat.profiling import measure
from remat_ir import InvalidData


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


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


def outcome(module: nn.Module, run: nn.Module, x: torch.Tensor) -> measure.Outcome:
    state = copy.deepcopy(module.state_dict())
    found = measure.outcome(module, measure.forward_backward(run, (x,), {}, lambda y: y.square().mean()))
    module.load_state_dict(state)
    return found


@pytest.mark.parametrize("mode", ["auto", "chain"])
def test_recurrent_stages_train_exactly_as_a_chain(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    module, x = recurrent(), numbers(8, 12, 16)
    with caplog.at_level(logging.INFO, "remat"):
        trained = remat.optimize(module, (x,), budget=remat.Fraction(0.6), planner="greedy", mode=mode)  # type: ignore[arg-type]
    assert ("the stages run as a chain" in caplog.text) == (mode == "auto")
    (chain,) = trained.chains.values()
    assert trained.plans == {}
    assert chain.answer is not None
    assert chain.answer.overhead
    assert list(trained.state_dict()) == list(module.state_dict())
    assert measure.differences(outcome(module, module, x), outcome(module, trained, x)) == []
    text = remat.explain(trained)
    assert "a chain of 6 stages" in text
    assert "Recurrent" in text
    with torch.no_grad():
        assert torch.equal(trained.eval()(x), module(x))


def test_another_size_of_a_chain_gets_a_plan_of_its_own() -> None:
    module = recurrent()
    trained = remat.optimize(module, (numbers(8, 12, 16),), budget=remat.Fraction(0.6), planner="greedy", mode="chain")
    x = numbers(4, 12, 16)
    assert measure.differences(outcome(module, module, x), outcome(module, trained, x)) == []
    assert len(trained.chains) == 2


def test_a_sequential_that_can_be_captured_trains_as_a_graph() -> None:
    module = nn.Sequential(Mlp(16), Mlp(16))
    trained = remat.optimize(module, (numbers(4, 16),), budget=remat.Fraction(1), planner="greedy")
    assert len(trained.plans) == 1
    assert not trained.chains


def test_what_no_mode_trains_is_refused_by_name() -> None:
    x = (numbers(4, 12, 16),)
    with pytest.raises(CaptureError, match="cannot be captured"):
        remat.optimize(recurrent(), x, budget=remat.Fraction(1), planner="greedy", mode="graph")
    with pytest.raises(CaptureError, match=r"takes an nn\.Sequential and one tensor, not Recurrent"):
        remat.optimize(Recurrent(), x, budget=remat.Fraction(1), planner="greedy", mode="chain")
    with pytest.raises(CaptureError, match="Python state"):  # stages that count their calls would count too many
        remat.optimize(nn.Sequential(Counting()), (numbers(4, 16),), budget=remat.Fraction(1), planner="greedy")
    with pytest.raises(InvalidData, match="mode is one of 'auto'"):
        remat.optimize(Mlp(16), (numbers(4, 16),), budget="1GiB", mode="best")  # type: ignore[arg-type]
