"""Stages train by chain plans exactly as they train plainly, whatever Python is inside them."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

import remat
from client.small_models import numbers
from remat import measure
from remat.chain import ChainedModule
from remat.chain_profile import chain_of
from remat.chain_training import carry_out_chain, optimize_chain, segments_plan
from remat.errors import CaptureError
from remat_ir import Answer, Chain, ChainPlan, InvalidPlan, Problem, Status, verify
from remat_ir.chain_plan import ChainStep, Verb, plain_chain_plan
from remat_ir.problem import plain_peak


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    torch.set_num_threads(1)


def convolutions(count: int = 8) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2))
        for i in range(count)
    ]


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
    step = measure.training_step(call, (x,), {}, lambda o: o.square().mean())

    def twice() -> torch.Tensor:
        step()
        return step()

    found = measure.outcome(stages, twice)
    for handle in handles:
        handle.remove()
    return found._replace(gradients={**found.gradients, "input": x.grad}), len(fired)


@pytest.mark.parametrize("name", sorted(CASES))
def test_chain_plans_train_exactly_with_one_hook_call_a_gradient(name: str) -> None:
    make, x = CASES[name]
    stages = make()
    chain, graded = chain_of(stages, x)
    plain_stages = nn.ModuleList(copy.deepcopy(stages))
    plain = outcome(plain_stages, nn.Sequential(*plain_stages), x)
    for plan in (plain_chain_plan(chain), bisection(len(stages)), segments_plan(len(stages), 3)):
        verify(Problem(chain, 2**50), plan)
        fresh = copy.deepcopy(stages)
        found = outcome(nn.ModuleList(fresh), ChainedModule(fresh, chain, plan, graded=graded), x)
        assert measure.differences(plain[0], found[0]) == []
        assert found[1] == plain[1]


@pytest.mark.parametrize("tenths", [4, 6, 8])
def test_the_peak_of_a_chain_is_the_predicted_one(tenths: int) -> None:
    stages, x = convolutions(), numbers(16, 3, 32, 32)
    # a persistent plan: one that frees the input of a live tape is held up by autograd, which has saved that input
    trained = optimize_chain(stages, x, budget=remat.Fraction(tenths / 10), planner="local", method="rotor")
    assert trained.answer is not None
    assert trained.answer.method == "rotor"

    def run() -> None:
        trained(x).mean().backward()

    run()  # the gradients exist from now on, as the chain's fixed bytes take for granted
    measured = measure.peak_memory(run).peak_bytes
    assert trained.answer is not None
    predicted = trained.answer.peak_bytes - trained.chain.fixed_bytes
    assert measured <= predicted * 1.01
    assert measured >= predicted * 0.93
    assert predicted <= plain_peak(trained.chain) - trained.chain.fixed_bytes


def test_checkpoint_sequential_takes_a_budget_or_segments() -> None:
    stages, x = nn.Sequential(*convolutions(6)), numbers(4, 3, 12, 12)
    reference = copy.deepcopy(stages)
    torch.manual_seed(1)
    expected = reference(x)
    expected.sum().backward()
    for segments, budget in ((3, None), (None, remat.Fraction(0.6))):
        fresh = copy.deepcopy(stages)
        torch.manual_seed(1)
        found = remat.checkpoint_sequential(fresh, segments, x, budget=budget, planner="greedy")
        found.sum().backward()
        assert torch.equal(found, expected)
        for mine, theirs in zip(fresh.parameters(), reference.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
        for mine, theirs in zip(fresh.buffers(), reference.buffers(), strict=True):
            assert torch.equal(mine, theirs)
    with pytest.raises(ValueError, match="budget"):
        remat.checkpoint_sequential(stages, None, x)


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


def test_random_chain_plans_train_exactly() -> None:
    stages, x = convolutions(5), numbers(2, 3, 8, 8)
    chain, graded = chain_of(stages, x)
    plain_stages = nn.ModuleList(copy.deepcopy(stages))
    plain = outcome(plain_stages, nn.Sequential(*plain_stages), x)
    for seed in range(4):
        plan = segments_plan(5, random.Random(seed).randint(1, 5))
        fresh = copy.deepcopy(stages)
        found = outcome(nn.ModuleList(fresh), ChainedModule(fresh, chain, plan, graded=graded), x)
        assert measure.differences(plain[0], found[0]) == []


def test_a_plan_that_autograd_holds_up_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Freeing the input of a live tape frees nothing, since autograd has saved it: the caller hears of it."""
    stages, x = convolutions()[:2], numbers(4, 3, 16, 16)
    chain, graded = chain_of(stages, x)
    steps = [(Verb.F_CK, 1), (Verb.F_ALL, 2), (Verb.FREE, 1), (Verb.F_ALL, 1), (Verb.B, 2), (Verb.B, 1)]
    plan = ChainPlan(tuple(ChainStep(verb, stage) for verb, stage in steps))
    problem = Problem(chain, 2**50)
    verdict = verify(problem, plan)
    answer = Answer(Status.FEASIBLE, "auto", 2**50, cost_ns=verdict.cost_ns, peak_bytes=verdict.peak_bytes, plan=plan)
    carry_out_chain(stages, problem, answer, graded)
    assert "autograd has saved them" in caplog.text
