"""Chains with transfers on the stand-in: eager and lazy side streams, freed memory overwritten."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from client.small_models import numbers
from client.test_chain_training import MeanSquare, convolutions
from remat.chains.profile import chain_of
from remat.chains.training import carry_out_chain
from remat.lowering.link import UnderWay, link_of
from remat.planning.options import SolveOptions
from remat.planning.sources import LocalPlanner
from remat.profiling import measure
from remat_ir import Answer, ChainPlan, Problem, Verb, budget_at
from standin import device

pytestmark = pytest.mark.standin
DEVICE = torch.device("cuda:0")


class Offloading(NamedTuple):
    """Stages, their input, and a plan that moves some of what they make."""

    stages: list[nn.Module]
    x: torch.Tensor
    needs_grad: Any
    problem: Problem
    answer: Answer

    def outcome(self, planned: bool) -> measure.Outcome:
        """What a step leaves behind, with or without the plan."""
        stages = nn.ModuleList(copy.deepcopy(self.stages))
        trained: Any = nn.Sequential(*stages)
        if planned:
            trained = carry_out_chain(list(stages), self.problem, self.answer, self.needs_grad)
        found = measure.outcome(stages, measure.forward_backward(trained, (self.x,)))
        torch.cuda.synchronize()
        return found


@pytest.fixture(scope="module")
def offloading() -> Offloading:
    stages: list[nn.Module] = [stage.to(DEVICE) for stage in (*convolutions(6), MeanSquare())]
    x = numbers(8, 3, 24, 24).to(DEVICE)
    chain, needs_grad = chain_of(stages, x, link_bytes_per_s=4 * 10**9)
    problem = Problem(chain, budget_at(chain, 0.5))
    answer = LocalPlanner().plan(problem, SolveOptions(method="pofo", time_limit_s=5))
    assert isinstance(answer.plan, ChainPlan), answer.message
    assert any(step.verb is Verb.OFFLOAD for step in answer.plan.steps)
    return Offloading(stages, x, needs_grad, problem, answer)


@pytest.mark.parametrize("lazy", [False, True])
def test_transfers_leave_plain_bits_however_late_they_run(lazy: bool, offloading: Offloading) -> None:
    with device.lazy_streams(lazy):
        assert measure.differences(offloading.outcome(False), offloading.outcome(True)) == []


def test_an_error_between_transfer_and_wait_frees_nothing_under_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a copy still writes is not given to who asks next; without the token's care it is."""
    link = link_of(DEVICE)

    def fails() -> torch.Tensor:
        copies, token = link.out([torch.full((1000,), 1.0, device=DEVICE).untyped_storage()])
        link.wait(token)
        try:
            link.back(copies)
            raise RuntimeError("the step fails before it waits")
        except RuntimeError:
            pass
        next_one = torch.full((1000,), 2.0, device=DEVICE)
        torch.cuda.synchronize()
        return next_one

    assert bool((fails() == 2.0).all())
    monkeypatch.setattr(UnderWay, "__del__", lambda self: None)
    assert not bool((fails() == 2.0).all())
