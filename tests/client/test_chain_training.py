"""Stages train by chain plans exactly as they train without a plan, whatever Python is inside them."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import remat
from client.small_models import module_of, numbers
from remat.chains.modules import ChainedModule
from remat.chains.profile import chain_of, stage_cost
from remat.chains.training import carry_out_chain, segments_plan
from remat.errors import CaptureError, InvalidData
from remat.planning.options import SolveOptions
from remat.planning.sources import LocalPlanner
from remat.profiling import measure
from remat_ir import Chain, ChainPlan, ChainStep, InvalidPlan, Problem, Verb, budget_at, plain_chain_plan, verify
from tiers import first

pytestmark = pytest.mark.usefixtures("fresh_cache")


def convolutions(count: int = 8) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2))
        for i in range(count)
    ]


def saving(count: int = 8) -> list[nn.Module]:
    """Stages whose backward steps read what they give, as a chain's tape is taken to have it."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.2), nn.ReLU())
        for i in range(count)
    ]


class MeanSquare(nn.Module):
    """The loss as a stage."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


class Branching(nn.Module):
    """Data-dependent Python, a recurrent network and a hook: nothing that can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(16, 16, batch_first=True)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)[0]
        self.seen.add_(1)
        return y * self.seen if y.sum().item() > 0 else torch.tanh(y) * self.seen


def recurrent(count: int = 5) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Branching() for _ in range(count)]


CASES = {
    "convolutions": (convolutions, numbers(4, 3, 12, 12)),
    "recurrent": (recurrent, numbers(4, 6, 16)),
    "input_with_gradient": (recurrent, numbers(4, 6, 16, requires_grad=True)),
}


def bisection(stages: int) -> ChainPlan:
    """Only the input is kept: each backward step comes after all the forward steps that it needs, by halves."""
    steps: list[ChainStep] = []

    def visit(first: int, last: int) -> None:
        if first == last:
            steps.extend([ChainStep(Verb.F_ALL, first), ChainStep(Verb.B, first)])
            return
        middle = (first + last + 1) // 2
        for stage in range(first, middle):
            steps.extend([ChainStep(Verb.F_CK if stage == first else Verb.F_NONE, stage)])
        visit(middle, last)
        visit(first, middle - 1)

    visit(1, stages)
    return ChainPlan(tuple(steps))


def outcome(stages: nn.ModuleList, call, x: torch.Tensor):  # type: ignore[no-untyped-def]
    x.grad = None
    fired: list[int] = []
    handles = [p.register_hook(lambda g: fired.append(1)) for p in stages.parameters()]
    step = measure.forward_backward(call, (x,), {}, lambda o: o.square().mean())

    def twice() -> torch.Tensor:
        step()
        return step()

    found = measure.outcome(stages, twice)
    for handle in handles:
        handle.remove()
    return found._replace(gradients={**found.gradients, "input": x.grad}), len(fired)


def trained_alike(stages: list[nn.Module], x: torch.Tensor, make: Callable[[list[nn.Module]], Any]) -> Any:
    """What is made of copies of the stages, once it has trained as other copies do without a plan."""
    plain, fresh = (nn.ModuleList(copy.deepcopy(stages)) for _ in range(2))
    made = make(list(fresh))
    expected, found = outcome(plain, nn.Sequential(*plain), x), outcome(fresh, made, x)
    assert measure.differences(expected[0], found[0]) == []
    assert found[1] == expected[1], "one hook call a gradient"
    return made


@pytest.mark.parametrize("name", first(3, sorted(CASES)))
def test_chain_plans_train_exactly_with_one_hook_call_a_gradient(name: str) -> None:
    make, x = CASES[name]
    stages = make()
    chain, needs_grad = chain_of(stages, x)
    for plan in (plain_chain_plan(chain), bisection(len(stages)), segments_plan(len(stages), 3)):
        verify(Problem(chain, 2**50), plan)
        trained_alike(stages, x, partial(ChainedModule, chain=chain, plan=plan, needs_grad=needs_grad))


QUICK = ("rotor", "greedy", "offload-all", "save-on-cpu")
METHODS = (*QUICK, "revolve", "sequential", "search", "pofo")


@pytest.mark.parametrize(
    ("make", "tenths", "methods"),
    [
        pytest.param(saving, 4, QUICK, marks=pytest.mark.thorough),
        *(pytest.param(saving, tenths, METHODS, marks=pytest.mark.slow) for tenths in (4, 6, 8)),
        pytest.param(convolutions, 4, METHODS, marks=pytest.mark.slow),
    ],
)
def test_the_peak_of_every_plan_is_the_predicted_one_and_its_bits_are_plain(
    make: Callable[[], list[nn.Module]], tenths: int, methods: tuple[str, ...]
) -> None:
    """Also of plans that free or move the input of a live tape, or a tape itself."""
    stages, x = [*make(), MeanSquare()], numbers(32, 3, 32, 32)
    chain, needs_grad = chain_of(stages, x, link_bytes_per_s=2 * 10**9)
    problem = Problem(chain, budget_at(chain, tenths / 10))
    verbs: set[Verb] = set()
    for method in methods:
        answer = LocalPlanner().plan(problem, SolveOptions(method=method, time_limit_s=1))
        if not isinstance(answer.plan, ChainPlan):
            continue
        verbs |= {step.verb for step in answer.plan.steps}
        trained = trained_alike(stages, x, lambda fresh: carry_out_chain(fresh, problem, answer, needs_grad))  # noqa: B023
        # the gradients exist from now on, as the chain's fixed bytes take for granted
        measured = measure.peak_memory(lambda: trained(x).backward()).peak_bytes  # noqa: B023
        predicted = answer.peak_bytes - chain.fixed_bytes
        # a^l is charged while B^l runs, and gone where B^l does not read it: after dropout
        early = 0 if make is saving else max(chain.activation_bytes[1:])
        assert 0.99 * predicted - early <= measured <= predicted, method
    assert {Verb.OFFLOAD, Verb.PREFETCH} <= verbs


@pytest.mark.parametrize(
    "stage", [convolutions()[1], nn.Sequential(nn.Conv2d(8, 32, 1), nn.GELU(), nn.Conv2d(32, 8, 1))]
)
def test_a_run_without_a_tape_fits_its_prediction(stage: nn.Module) -> None:
    """Nothing of what its kernels make stays, but two of them meet in memory; a tape has room for that, a^l has not."""
    x = numbers(16, 8, 32, 32)
    cost, _ = stage_cost(stage, "stage", [x], [True], {}, last=False)

    def run() -> None:
        with torch.no_grad():
            stage(x)

    assert measure.peak_memory(run).peak_bytes <= cost.activation_bytes + cost.untaped_workspace_bytes


class Apart(nn.Module):
    """What it gives is a view of its input, and what it saves another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1)[:, ::2].square() + x.exp().transpose(0, 1)[:, 1::2]


def checkpointed() -> nn.Module:
    inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    return module_of(lambda self, x: torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False), inner=inner)


AFTERWARDS = {
    "linear": lambda: nn.Linear(16, 16),
    "views": Apart,
    "identity": nn.Identity,
    "flatten": lambda: nn.Unflatten(1, (4, 4)),
    "recurrent": Branching,
    "in place on its own": lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Dropout(0.5)),
    "checkpointed itself": checkpointed,
}


def row(text: str) -> ChainPlan:
    return ChainPlan(tuple(ChainStep(Verb(verb), int(at)) for verb, at in (pair.split() for pair in text.split(", "))))


FREES = "F_ck 1, F_ck 2, F_all 3, free 2, F_all 4, free 1, F_ck 1, F_all 2, B 4, B 3, F_all 1, B 2, B 1"
MOVES = (
    "F_all 1, F_all 2, offload 1, wait 1, drop 1, F_all 3, offload 2, wait 2, drop 2, F_all 4, "
    "offload 3, wait 3, drop 3, prefetch 3, wait 3, B 4, prefetch 2, wait 2, B 3, prefetch 1, wait 1, B 2, B 1"
)


@pytest.mark.parametrize("text", [FREES, MOVES], ids=["frees", "moves"])
@pytest.mark.parametrize("name", first(2, sorted(AFTERWARDS)))
def test_a_tape_survives_its_input(name: str, text: str) -> None:
    torch.manual_seed(0)
    stages = [nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.GELU()), AFTERWARDS[name](), MeanSquare()]
    x = numbers(3, 16) if name != "recurrent" else numbers(3, 5, 16)
    chain, needs_grad = chain_of(stages, x, link_bytes_per_s=10**9)
    trained_alike(stages, x, partial(ChainedModule, chain=chain, plan=row(text), needs_grad=needs_grad))


def test_what_is_overwritten_after_it_was_saved_is_told_as_autograd_does() -> None:
    spoils = module_of(lambda self, x: x.exp().add_(1))
    stages = [nn.Linear(8, 8), spoils, MeanSquare()]
    chain = Chain((1,) * 3, (1,) * 3, (0,) * 3, (0,) * 3, (1,) * 3, (1,) * 4, (0, 1, 1, 1), link_bytes_per_s=1)
    for plan in (plain_chain_plan(chain), row("F_ck 1, F_all 2, free 1, F_all 3, B 3, F_all 1, B 2, B 1")):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            ChainedModule(stages, chain, plan)(numbers(2, 8)).backward()


def test_a_forward_pass_without_a_backward_leaves_nothing() -> None:
    stages, x = [*convolutions(3), MeanSquare()], numbers(4, 3, 16, 16)
    chain, _ = chain_of(stages, x, link_bytes_per_s=10**9)
    trained = ChainedModule(stages, chain, row(MOVES))
    trained(x).backward()
    gc.collect()
    gc.disable()  # nothing waits for the collector
    try:
        assert measure.peak_memory(lambda: bool(trained(x).isnan())).left_bytes <= 64
    finally:
        gc.enable()


@pytest.mark.parametrize("plan", [plain_chain_plan, lambda chain: bisection(chain.stages)])
def test_a_module_that_comes_several_times(plan) -> None:  # type: ignore[no-untyped-def]
    """Tied weights: their gradients are added up in autograd's order, and accumulated and hooked once."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.GELU())
    stages, x = [block, nn.Linear(16, 16), block, block, MeanSquare()], numbers(6, 16)
    chain, needs_grad = chain_of(stages, x)
    trained_alike(stages, x, partial(ChainedModule, chain=chain, plan=plan(chain), needs_grad=needs_grad))


def test_a_chain_takes_a_budget_or_segments() -> None:
    stages, x = convolutions(6), numbers(4, 3, 12, 12)

    def planned(stages: list[nn.Module], **asked: Any) -> nn.Module:
        return remat.optimize_chain(nn.Sequential(*stages), x, **asked)

    trained_alike(stages, x, partial(planned, segments=3))
    trained_alike(stages, x, partial(planned, budget=remat.Fraction(0.6), planner="greedy"))
    wrong: list[dict[str, Any]] = [{}, {"segments": 2, "budget": "1GiB"}]
    for asked in wrong:
        with pytest.raises(InvalidData, match="takes a budget, or a number of segments"):
            planned(stages, **asked)


def test_a_chain_offloads_where_it_is_allowed_to() -> None:
    stages, x = [*convolutions(5), MeanSquare()], numbers(4, 3, 16, 16)
    asked: dict[str, Any] = {"planner": "local", "method": "save-on-cpu", "offload": True}
    planned = partial(remat.optimize_chain, x=x, budget=remat.Fraction(0.6), **asked)
    trained = trained_alike(stages, x, planned)
    assert trained.chain.link_bytes_per_s
    assert any(step.verb is Verb.OFFLOAD for step in trained.plan.steps)
    # a host that holds nothing leaves the plan that the client falls back on
    narrow = planned(stages, host_bytes=99)
    assert narrow.chain.host_bytes == 99
    assert not any(step.verb is Verb.OFFLOAD for step in narrow.plan.steps)


def test_stages_that_cannot_run_twice_are_refused() -> None:
    with pytest.raises(CaptureError, match="overwrites its input"):
        chain_of([nn.Linear(4, 4), nn.ReLU(inplace=True)], numbers(2, 4))
    with pytest.raises(CaptureError, match="not one tensor"):
        chain_of([nn.LSTM(4, 4)], numbers(2, 3, 4))
    chain = Chain((1,), (1,), (0,), (0,), (1,), (1, 1), (0, 1))
    with pytest.raises(InvalidPlan, match="stages"):
        ChainedModule(convolutions(2), chain, plain_chain_plan(chain))


def test_a_chain_runs_backward_once() -> None:
    stages, x = convolutions(2), numbers(2, 3, 8, 8)
    chain, _ = chain_of(stages, x)
    loss = ChainedModule(stages, chain, plain_chain_plan(chain))(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()
