"""State of Python's and of its own that a stage has, its hooks, and what changes around a step of planned stages."""

from __future__ import annotations

import copy
import logging
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import remat
from client.comparing import equal
from client.test_chain_training import bisection
from client.test_training_loops import numbers
from remat.chains.hooks import copied_apart
from remat.chains.modules import ChainedModule
from remat.chains.profile import chain_of
from remat.planning.coordinator import Coordinator
from remat.planning.quick import Better
from remat_ir import Answer, Problem
from tiers import first

COUNT = 4


class Stage(nn.Module):
    """A linear layer, and state of the module's own."""

    def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.drop, self.run = nn.Linear(8, 8), nn.Dropout(0.3), forward
        self.count, self.log, self.state = 0, [1.0], torch.ones(8)
        self.own, self.generator = random.Random(3), np.random.default_rng(3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, self.linear(x).tanh())


def counts(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.count += 1
    self.log.append(self.count + self.log[-1])
    return y * self.log[-1]


def carries(self: Any, y: torch.Tensor) -> torch.Tensor:
    """A state that goes from call to call, as recurrent models and caches have it."""
    y = y * self.state
    self.state, self.new = y.detach().mean(0), True
    return y


def draws(self: Any, y: torch.Tensor) -> torch.Tensor:
    y = y * random.random() if random.random() < 0.5 else y * np.random.rand()
    return y * self.own.random() * self.generator.random()


def by_mode(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.seen.add_(1)
    return self.drop(y) * self.seen if self.training else y


def by_grad(self: Any, y: torch.Tensor) -> torch.Tensor:
    """Other kernels without grad in eval mode, as torch's own transformer layers have them."""
    return y * (1.0 if self.training or torch.is_grad_enabled() else 1.5)


def remembers(self: Any, y: torch.Tensor) -> torch.Tensor:
    """Containers inside others and under two names, one of limited length, and buffers made or replaced on the way."""
    y = y * 2 if hasattr(self, "mask") else y
    if not hasattr(self, "recent"):
        self.recent, self.nested = deque([1.0], maxlen=2), {"deep": ([1.0],)}
        self.alias, self.rngs = self.nested["deep"][0], [random.Random(5)]
        self.register_buffer("mask", None)
        self.register_buffer("other", self.seen)
    self.alias.append(self.alias[-1] + len(self.recent))
    self.recent.append(self.nested["deep"][0][-1])
    self.other += 1
    if self.mask is None:
        self.mask = torch.full((), 0.5)
        y = y * 1.5
    self.mask = self.mask * 0.9
    return y * self.rngs[0].random() * self.alias[-1] * self.recent[0] * self.seen.clone() * self.mask


def pairs(self: Any, y: torch.Tensor) -> torch.Tensor:
    """Every other normal number is the second half of a pair, for which nothing is drawn."""
    y = y * random.gauss(1, 0.1) * np.random.normal(1, 0.1)
    return y * random.gauss(1, 0.1) if random.random() < 0.5 else y


def plain(self: Any, y: torch.Tensor) -> torch.Tensor:
    return self.drop(y)


def stages(forward: Callable[..., torch.Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Stage(forward) for _ in range(COUNT)))


def by_plan(model: nn.Sequential) -> ChainedModule:
    """A plan that keeps the input alone, so that stages run up to three times."""
    chain, needs_grad = chain_of(list(model), numbers(), repetitions=1)
    return ChainedModule(list(model), chain, bisection(COUNT), needs_grad=needs_grad)


def twice(run: Any) -> list[Any]:
    losses = [run(numbers()).square().sum() for _ in range(2)]
    for loss in losses:
        loss.backward()
    return [loss.detach() for loss in losses]


def last_first(run: Any) -> list[Any]:
    """What the last backward pass runs again leaves another state than is there."""
    losses = [run(numbers()).square().sum() for _ in range(2)]
    for loss in reversed(losses):
        loss.backward()
    return [loss.detach() for loss in losses]


def evaluated_between(run: Any) -> list[Any]:
    loss = run(numbers()).square().sum()
    run.eval()
    loss.backward()
    return [loss.detach()]


def evaluated(run: Any) -> list[Any]:
    run.eval()
    return twice(run)


def frozen(run: Any) -> list[Any]:
    run.requires_grad_(False)
    y = run(numbers())
    return [y, torch.tensor(y.requires_grad)]


def left(model: nn.Sequential, run: Any, scene: Callable[[Any], list[Any]]) -> list[Any]:
    """What a scene gives, gradients, buffers, the stages' own state, and what is drawn next."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    found = [*scene(run), *(p.grad for p in model.parameters()), *model.buffers()]
    found += [t for stage in model for t in (stage.state, torch.tensor([*stage.log, stage.count, stage.own.random()]))]
    found += [torch.tensor(stage.generator.random()) for stage in model]
    return [*found, torch.rand(2), torch.tensor([random.random(), np.random.rand()])]


SCENES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[Any], list[Any]]]] = {
    "counters and lists": (counts, twice),
    "counters and lists, the last pass first": (counts, last_first),
    "a state that is carried": (carries, twice),
    "random numbers of Python's, numpy's and its own": (draws, twice),
    "containers in containers and buffers of several names": (remembers, twice),
    "containers in containers, the last pass first": (remembers, last_first),
    "halves of pairs of normal numbers": (pairs, twice),
    "eval before the backward pass": (by_mode, evaluated_between),
    "eval after planning": (by_grad, evaluated),
    "nothing to train": (plain, frozen),
}


@pytest.mark.parametrize("name", first(5, SCENES))
def test_a_stage_that_runs_again_sees_what_it_saw(name: str) -> None:
    forward, scene = SCENES[name]
    model = stages(forward)
    planned = copy.deepcopy(model)
    expected, found = left(model, model, scene), left(planned, by_plan(planned), scene)
    assert equal(expected, found)


class Found:
    """A better answer that is there."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def done(self) -> bool:
        return True

    def result(self) -> Answer:
        return self.answer


def test_a_better_plan_knows_the_modes_in_which_stages_were_measured() -> None:
    """One that takes over in eval mode runs by kernels with grad there, as the plan before it did."""
    model = stages(by_grad)
    planned = by_plan(copy.deepcopy(model))
    answer = Answer.of_plan(Problem(planned.chain, 2**40), planned.plan, method="greedy")
    planned.better = Better(Found(answer), Coordinator(), lambda _: True, lambda found: found)
    x = numbers()
    assert torch.equal(planned.eval()(x), model.eval()(x))
    assert planned.answer is answer


def writes(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.state.mul_(2)
    return y * self.state.clone()


def clamps(self: Any, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.linear.bias.mul_(0.5)
    return y


def step(run: Any) -> None:
    run(numbers()).sum().backward()


def between(change: Callable[[Any, torch.Tensor], object]) -> Callable[[Any], None]:
    def scene(run: Any) -> None:
        x = numbers()
        loss = run(x).sum()
        with torch.no_grad():
            change(run.stages[0].linear, x)
        loss.backward()

    return scene


def functional(run: Any) -> None:
    given = {name: p.detach().clone().requires_grad_() for name, p in run.named_parameters()}
    torch.func.functional_call(run, given, (numbers(),)).sum().backward()


def replaced(run: Any) -> None:
    run.stages[1] = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    step(run)


def of_input(run: Any) -> None:
    x = numbers().requires_grad_()
    torch.autograd.grad(run(x).sum(), x)


REFUSED: dict[str, tuple[Callable[..., torch.Tensor], Callable[[Any], None], str]] = {
    "a tensor written in place": (writes, step, r"stage 1 \(Stage\) writes in place to state, which is no buffer"),
    "a parameter written in forward": (clamps, step, r"stage 1 \(Stage\) writes in place to linear.bias"),
    "a parameter written": (plain, between(lambda m, x: m.bias.mul_(2)), "linear.bias of stage 1, from which.*inplace"),
    "a parameter's storage": (
        plain,
        between(lambda m, x: setattr(m.weight, "data", m.weight * 2)),
        "linear.weight of stage 1 was replaced between the forward and",
    ),
    "a parameter replaced": (
        plain,
        between(lambda m, x: setattr(m, "weight", nn.Parameter(m.weight * 2))),
        "linear.weight of stage 1 was replaced",
    ),
    "functional_call": (plain, functional, "of stage 1 was replaced"),
    "the input written": (plain, between(lambda m, x: x.zero_()), "input 1 of stage 1, from which .*inplace"),
    "a stage replaced": (plain, replaced, "stage 2 is not the Stage that was planned, but a Sequential"),
    "gradients of some": (plain, of_input, "torch.autograd.grad and backward.inputs=….*call backward"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_computed_from_something_else_is_refused(name: str) -> None:
    forward, scene, said = REFUSED[name]
    with pytest.raises((RuntimeError, remat.CaptureError), match=said):
        scene(by_plan(stages(forward)))


def keeps(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.penalty = y.square().mean()
    return y


def test_a_tensor_with_a_graph_that_a_stage_keeps_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    by_plan(stages(plain))
    assert not caplog.records
    model = stages(keeps)
    by_plan(model)
    assert "stage 1 (Stage) keeps a tensor with a graph in penalty: by a plan no gradient flows" in caplog.text
    step(model)
    with pytest.raises(remat.CaptureError, match=r"stage 1 \(Stage\) is measured on a copy, and cannot be copied"):
        by_plan(model)


def test_a_stage_that_is_replaced_in_a_planned_sequential_counts() -> None:
    model = stages(plain)
    planned = remat.optimize(model, numbers(), budget=remat.Fraction(1.0), planner="greedy", mode="chain")
    step(planned)
    model[1] = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.0))
    x, expected = numbers(), copy.deepcopy(model)
    expected = remat.disable(expected)
    torch.manual_seed(2)
    found = planned(x)
    torch.manual_seed(2)
    assert torch.equal(found, expected(x))


SEEN: list[Any] = []
log = logging.getLogger("hooks of stages")


class Recorder:
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.calls = 0

    def look(self, module: nn.Module, given: Any, made: Any) -> None:
        self.seen.append(made)
        self.calls += 1

    def __call__(self, module: nn.Module, given: Any, made: Any) -> None:
        self.look(module, given, made)


def recording(module: nn.Module, given: Any, made: Any) -> None:
    SEEN.append(made)
    log.warning("called")


def counting(seen: dict[str, int], module: nn.Module, given: Any, made: Any) -> None:
    seen["calls"] = seen.get("calls", 0) + 1


@pytest.mark.parametrize("order", ["planned first", "trained first"])
def test_hooks_of_stages_are_called_by_the_steps_alone(order: str, caplog: pytest.LogCaptureFixture) -> None:
    stages = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    closed: list[Any] = []
    counts: dict[str, int] = {}
    recorder, bound = Recorder(), Recorder()
    SEEN.clear()

    def closing(module: nn.Module, given: Any, made: Any) -> None:
        closed[len(closed) :] = [made]

    hooks: list[Any] = [recording, closing, lambda m, i, o: closed.append(o), partial(counting, counts), recorder]
    for hook in (*hooks, bound.look):
        stages[1].register_forward_hook(hook)
    stages[0].register_forward_pre_hook(lambda m, given: closed.append(given))
    stages[2].register_full_backward_hook(lambda m, i, o: closed.append(o))
    chain = remat.optimize_chain(stages, torch.ones(4, 8), budget="100%", planner="greedy")
    assert (SEEN, closed, counts, recorder.calls, bound.calls) == ([], [], {}, 0, 0)
    assert not [r for r in caplog.records if r.name == log.name]
    for _ in range(2):
        chain(torch.ones(4, 8)).sum().backward()
    assert (len(SEEN), len(closed), counts, recorder.calls, bound.calls) == (2, 2 * 4, {"calls": 2}, 2, 2)


def test_hooks_that_compute_run_in_a_copy() -> None:
    """Among them those of torch's own norms, and one that reads the module that it is on."""
    x = torch.randn(4, 8)
    layer = nn.utils.spectral_norm(nn.Linear(8, 8))
    layer.register_forward_hook(lambda module, given, made: made * 2)

    def in_place(module: nn.Module, given: Any, made: torch.Tensor) -> None:
        made.add_(1)

    def of_the_layer(module: nn.Module, given: Any, made: torch.Tensor) -> torch.Tensor:
        assert module is layer
        return made + layer.bias

    layer.register_forward_hook(in_place)
    layer.register_forward_hook(of_the_layer)
    layer.eval()
    with torch.no_grad():
        assert torch.equal(copied_apart(layer)(x), layer(x))
