"""Chain plans on CUDA: recomputation and transfers next to the computation, with plain training's bits and the peak."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from client.small_models import numbers
from client.test_chain_training import METHODS, MeanSquare, convolutions, trained_alike
from remat.chains.profile import chain_of
from remat.chains.training import carry_out_chain
from remat.lowering.link import bandwidth, link_of
from remat.planning.options import SolveOptions
from remat.planning.sources import LocalPlanner
from remat.profiling import measure
from remat_ir import Chain, ChainPlan, Problem, Status, budget_at

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def deterministic() -> None:
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


class Profiled(NamedTuple):
    stages: list[nn.Module]
    x: torch.Tensor
    chain: Chain
    needs_grad: tuple[bool, ...]


@pytest.fixture(scope="module")
def profiled() -> Profiled:
    device = torch.device("cuda")
    stages = [stage.to(device) for stage in (*convolutions(), MeanSquare())]
    x = numbers(8, 3, 32, 32).to(device)
    chain, needs_grad = chain_of(stages, x, link_bytes_per_s=bandwidth(device))
    return Profiled(stages, x, chain, needs_grad)


@pytest.mark.parametrize("tenths", [4, 6, 8])
@pytest.mark.parametrize("method", METHODS)
def test_plans_on_cuda(method: str, tenths: int, profiled: Profiled) -> None:
    stages, x, chain, needs_grad = profiled
    device = x.device
    problem = Problem(chain, budget_at(chain, tenths / 10))
    answer = LocalPlanner().plan(problem, SolveOptions(method=method, time_limit_s=2))
    if not isinstance(answer.plan, ChainPlan):
        assert answer.status in (Status.INFEASIBLE, Status.NOTHING_FOUND), answer.message
        return
    trained = trained_alike(stages, x, lambda fresh: carry_out_chain(fresh, problem, answer, needs_grad))
    measured = measure.peak_memory(lambda: trained(x).backward(), device).peak_bytes
    assert measured <= 1.01 * (answer.peak_bytes - chain.fixed_bytes)


def test_a_storage_comes_back_as_it_left_while_others_are_made() -> None:
    device = torch.device("cuda")
    link = link_of(device)
    values = [torch.randn(1 << 20, device=device) for _ in range(8)]
    expected = [value.clone() for value in values]
    copies = []
    for value in values:
        made, token = link.out([value.untyped_storage()])
        copies.append(made)
        link.wait(token)
    del value, values
    for _ in range(50):  # what is freed is used again at once
        torch.randn(1 << 20, device=device).mul_(2)
    for made, wanted in zip(copies, expected, strict=True):
        (storage,), token = link.back(made)
        link.wait(token)
        assert torch.equal(torch.empty(0, device=device).set_(storage), wanted)
