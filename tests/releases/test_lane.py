"""What has to hold on every release of torch: `make test-torch TORCH=2.15.0` runs this folder on one."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
import torch.distributed as dist
import torch.multiprocessing as mp
from functorch.compile import nop
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager

import remat
from client.small_models import CASES, Case, mean_square
from client.test_adoption import Net
from client.test_exact import WithLoss, everything_again, peak
from client.test_takeover import Job
from client.transferring import LINK, Mover
from remat.profiling import measure
from remat.training.enable import plans_of
from remat_ir import Answer, Offload, Problem

Call = Callable[..., Any]
ROOT = Path(__file__).parents[2]


class Again:
    """A planner whose plans compute before each op of the backward pass all that it needs anew."""

    def plan(self, problem: Problem, options: Any = None, *, on_progress: Any = None) -> Answer:
        return Answer.of_plan(problem, everything_again(SimpleNamespace(graph=problem.graph)), method="again")


AGAIN: dict[str, Any] = {"budget": "1GiB", "planner": Again()}


def stock(module: nn.Module) -> Call:
    """AOTAutograd without any recomputation, which `backend="aot_eager"` does not say of its own partition."""
    return torch.compile(module, backend=aot_autograd(fw_compiler=nop, bw_compiler=nop), dynamic=False)


def in_place(module: nn.Module) -> Call:
    module.compile(backend="remat", options=AGAIN, dynamic=False)
    return module


SPELLINGS: dict[str, Callable[[Case], Call]] = {
    "optimize": lambda case: remat.optimize(case.module, case.args, case.kwargs, **AGAIN),
    "enable": lambda case: remat.enable(case.module, **AGAIN),
    "backend": lambda case: torch.compile(case.module, backend=remat.backend(**AGAIN), dynamic=False),
    "by name": lambda case: torch.compile(case.module, backend="remat", options=AGAIN, dynamic=False),
    "by name, in place": lambda case: in_place(case.module),
}
NAMES = (
    "attention_with_dropout",
    "autocast_inside",
    "batch_norm_and_dropout",
    "batch_norm_used_twice",
    "buffer_that_is_read_and_overwritten",
    "custom_autograd_function",
    "frozen_parameters",
    "in_place_ops",
    "loss_and_unused_output",
    "mlp_with_dropout",
    "outputs_that_alias",
    "parameters_in_bfloat16",
    "random_numbers_of_all_kinds",
    "tied_weights",
)


def outcome(case: Case, call: Call) -> measure.Outcome:
    """Two steps, whose gradients add up."""
    step = measure.forward_backward(call, case.args, case.kwargs, case.loss)
    return measure.outcome(case.module, lambda: (step(), step())[1])


def with_stock(name: str) -> tuple[Case, measure.Outcome]:
    """A module, the same each time, and what it leaves behind in stock."""
    torch.manual_seed(0)
    case = CASES[name]()
    plain = case._replace(module=copy.deepcopy(case.module))
    return case, outcome(plain, stock(plain.module))


PAIRS = [(name, list(SPELLINGS)[(i + j) % len(SPELLINGS)]) for i, name in enumerate(NAMES) for j in range(2)]
"""Each module by two of the spellings, and each spelling by five or six modules."""


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "spelling"), PAIRS)
def test_a_module_trains_bit_for_bit(name: str, spelling: str) -> None:
    case, expected = with_stock(name)
    assert measure.differences(expected, outcome(case, SPELLINGS[spelling](case))) == []


def steps(model: nn.Module, call: Call) -> list[torch.Tensor]:
    """Four steps under bf16 autocast with a GradScaler: the losses, all weights and buffers, the generator."""
    torch.manual_seed(5)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-2), torch.amp.GradScaler("cpu", init_scale=256.0)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(step)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.detach())
    return [*found, *(p.detach() for p in model.parameters()), *model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_autocast_and_a_scaler_around_it(spelling: str) -> None:
    torch.manual_seed(0)
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    expected = steps(plain, stock(plain))
    with torch.autocast("cpu", torch.bfloat16):  # `optimize` captures now
        call = SPELLINGS[spelling](Case(model, (torch.randn(4, 3, 12, 12),), {}, None))
    assert all(map(torch.equal, expected, steps(model, call)))


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["enable", "backend"])
def test_a_better_plan_takes_over(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """The steps before and after are equal, to each other and to the plain one."""
    Job(way, contextlib.nullcontext).takes_over(caplog)


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["enable", "by name"])
def test_values_move_to_the_host_and_back(way: str) -> None:
    case, expected = with_stock("mlp_with_dropout")
    asked: dict[str, Any] = {"budget": "100%", "planner": Mover(1), "link": LINK}
    call: Call = case.module
    if way == "enable":
        remat.enable(case.module, **asked)
    else:
        call = torch.compile(case.module, backend="remat", options=asked, dynamic=False)
    assert measure.differences(expected, outcome(case, call)) == []
    if way == "enable":
        (made,) = plans_of(case.module).plans
        assert any(isinstance(step, Offload) for step in made.answer.plan.steps)


@pytest.mark.thorough
def test_the_peak_is_the_predicted_one() -> None:
    """Of a step in which all that can be is computed again: at most half of the plain one's."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12)))
    case = Case(WithLoss(Case(layers, (), {}, mean_square)), (torch.randn(2048, 64),), {}, None)
    plain = peak(case, case.module)
    remat.enable(case.module, budget="40%", planner="greedy")
    measured = peak(case, case.module)
    (made,) = plans_of(case.module).plans
    assert measured == pytest.approx(made.activation_bytes, rel=0.01)
    assert made.activation_bytes < 0.5 * plain


@pytest.mark.slow
def test_an_install_does_not_replace_the_torch_that_is_there() -> None:
    """What `pip install '.[torch,solver]'` would install here, older as this torch may be, is not a torch."""
    pip = (sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-")
    there = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    done = subprocess.run((*pip, f"{ROOT}[torch,solver]"), check=False, capture_output=True, text=True, env=there)
    assert done.returncode == 0, done.stderr
    named = {each["metadata"]["name"].lower() for each in json.loads(done.stdout)["install"]}
    assert "remat" in named
    assert "torch" not in named


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "share"), [("mlp_with_dropout", "85%"), ("batch_norm_and_dropout", "90%")])
def test_torch_carries_out_a_plan_by_tags(name: str, share: str) -> None:
    """Its own partition of the tagged graph, by a pass that a backend sets, as autoparallel's does.

    The step is that of stock, and the peak of the partition is the plan's.
    """
    from remat.tags.passes import TagPass

    case, expected = with_stock(name)
    tags = TagPass(share, planner="greedy")

    def backend(module: Any, inputs: Any) -> Any:
        with functorch.patch(joint_custom_pass=tags, enable_autograd_cache=False):
            return aot_eager(module, inputs)

    call = torch.compile(case.module, backend=backend, dynamic=False)
    assert measure.differences(expected, outcome(case, call)) == []
    assert tags.tagged
    assert tags.tagged[0].again
    assert tags.peaks == [found.peak_bytes for found in tags.tagged]


def _rank(rank: int, address: str, found: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=2)
    results = []
    for planned in (False, True):
        torch.manual_seed(0)
        model: nn.Module = Net()
        if planned:
            remat.enable(model, **AGAIN | {"budget": remat.ActivationBytes("1GiB")})
        call = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)  # several buckets
        torch.manual_seed(1 + rank)
        for _ in range(3):
            call(torch.randn(4, 3, 12, 12)).backward()
        results.append([*(p.grad for p in model.parameters()), *model.buffers()])
    found[rank] = all(map(torch.equal, *results)), len(plans_of(model).plans)
    dist.destroy_process_group()


@pytest.mark.thorough
def test_two_ranks_train_as_plain_ones_do(tmp_path: Any) -> None:
    with mp.Manager() as manager:
        found = manager.dict()
        mp.spawn(_rank, (str(tmp_path / "rendezvous"), found), nprocs=2)
        assert dict(found) == {0: (True, 1), 1: (True, 1)}
