"""Hooks that take gradients as they are made: what the plain loop leaves behind, in less memory than it takes."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import remat
from client.small_models import numbers
from client.test_release import MADE, WIDTH, Crossed, Net
from remat import _compat
from remat.capture import backward
from remat.profiling.measure import peak_memory
from remat.training.enable import plans_of
from tiers import first

NAMES = ("SGD", "SGD momentum", "AdamW", "AdamW fused", "Adafactor")


class Job:
    """A model whose parameters each have an optimizer in a hook, and what the hooks saw."""

    def __init__(self, model: nn.Module, name: str = "SGD momentum", frees: bool = True, share: float = 0.0) -> None:
        self.model, self.frees = model, frees
        self.own = {p: MADE[name]([p]) for p in model.parameters()}
        self.handles = {p: p.register_post_accumulate_grad_hook(self.hook) for p in model.parameters()}
        self.seen: list[torch.Tensor] = []
        if share:
            remat.enable(model, budget=remat.Fraction(share), planner="greedy", self_check=False)

    def hook(self, parameter: torch.Tensor) -> None:
        """Step, and free."""
        self.seen.append(parameter.grad.norm())
        self.own[parameter].step()
        if self.frees:
            parameter.grad = None

    def run(self, loss: Callable[[nn.Module, torch.Tensor], torch.Tensor], steps: int = 3) -> list[torch.Tensor]:
        """Train; what is left of it."""
        torch.manual_seed(1)
        for step in range(steps):
            loss(self.model, (step + 1) * numbers(128, WIDTH)).backward()
            if not self.frees:
                self.model.zero_grad()
        states = [t for o in self.own.values() for s in o.state.values() for t in s.values() if torch.is_tensor(t)]
        gradients = [torch.zeros(()) if p.grad is None else p.grad for p in self.model.parameters()]
        seen = torch.stack(self.seen).sort().values
        return [*(t.clone() for t in self.model.state_dict().values()), *states, *gradients, seen]


def simple(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def pair(make: Callable[[], nn.Module], share: float = 0.6, **options: Any) -> tuple[Job, Job]:
    return Job(make(), **options), Job(make(), share=share, **options)


def same(jobs: tuple[Job, Job], loss: Any = simple, steps: int = 3) -> bool:
    found = [job.run(loss, steps) for job in jobs]
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def delivered(model: nn.Module) -> list[int]:
    """Of each plan, the latest last: how many gradients are given away as they are made."""
    return [len(plan.step.operations.updates) for plan in plans_of(model).plans if plan]


@pytest.mark.parametrize(("name", "tied"), first(3, [("AdamW", True), *((name, False) for name in NAMES)]))
def test_training_is_that_of_the_plain_loop(name: str, tied: bool) -> None:
    jobs = pair(lambda: Net(tied=tied), name=name)
    assert same(jobs)
    assert delivered(jobs[1].model) == [len(list(jobs[1].model.parameters()))]
    assert all(p._post_accumulate_grad_hooks for p in jobs[1].model.parameters())


@pytest.mark.parametrize("share", [0.7, 1.0])
def test_it_takes_no_more_than_plain_training_and_what_was_predicted(share: float) -> None:
    jobs, x, peaks = pair(lambda: Net(layers=6), share, name="SGD"), numbers(64, WIDTH), []
    for job in jobs:
        job.model(x).backward()
        peaks.append(peak_memory(lambda job=job: job.model(x).backward()).peak_bytes)
    (plan,) = plans_of(jobs[1].model).plans
    assert peaks[1] <= peaks[0]
    assert peaks[1] == pytest.approx(plan.activation_bytes, rel=0.03)


def test_gradients_that_hooks_leave_there_are_counted_from_the_next_step_on() -> None:
    jobs = pair(lambda: Net(layers=2), 1.0, frees=False)
    assert same(jobs)
    first, then = plans_of(jobs[1].model).plans
    assert first.step.operations.updates
    assert not then.step.operations.updates
    assert not first.gradient_bytes
    assert then.gradient_bytes == sum(4 * p.numel() for p in jobs[1].model.parameters())


def test_no_op_reads_a_parameter_after_its_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook may step the parameter: without the rule the gradient of the input is another step's."""
    plain = Crossed()
    jobs = pair(lambda: copy.deepcopy(plain), 1.0)
    assert same(jobs)
    monkeypatch.setattr(backward, "_readers", lambda *_: [])
    assert not same(pair(lambda: copy.deepcopy(plain), 1.0))


def test_hooks_of_some_parameters_run_at_the_end() -> None:
    jobs = pair(lambda: Net(layers=2))
    for job in jobs:
        first = next(iter(job.handles))
        job.handles[first].remove()
    assert same(jobs, steps=1)
    assert delivered(jobs[1].model) == [0]


def sum_of_two(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x) + model(x.cos())


def earlier_one_waits(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    waits = model(x.cos())
    loss = model(x)
    loss.waits = waits
    return loss


def after_a_look(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    norms = [g.norm() for g in torch.autograd.grad(model(x), list(model.parameters()))]
    return model(x * torch.stack(norms).sum().sigmoid())


def after_gradients_of_others(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return model(x)


@pytest.mark.parametrize("loss", [sum_of_two, earlier_one_waits, after_a_look, after_gradients_of_others])
def test_a_gradient_in_parts_is_complete_before_hooks_see_it(loss: Any) -> None:
    jobs = pair(lambda: Net(layers=2))
    assert same(jobs, steps=1)
    assert same(jobs, loss)
    assert delivered(jobs[1].model)[0]


def test_hooks_on_the_gradient_itself_see_it_first() -> None:
    jobs = pair(lambda: Net(layers=2))
    assert same(jobs, steps=1)
    for job in jobs:
        for p in job.model.parameters():
            p.register_hook(lambda gradient: gradient.sign())
    assert same(jobs)


def test_ranks_average_before_hooks_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = pair(lambda: Net(layers=2))
    assert same(jobs, steps=1)
    monkeypatch.setattr(_compat, "active_ddp", lambda: jobs[1].model)
    order: list[int] = []
    for number, p in enumerate(jobs[1].model.parameters()):
        p.register_post_accumulate_grad_hook(lambda _, number=number: order.append(number))
    jobs[1].model(numbers(128, WIDTH)).backward()
    assert sorted(order) == list(range(len(order)))


def penalized(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x) + sum(p.square().sum() for p in model.parameters())


def test_a_part_of_a_gradient_from_outside_is_refused() -> None:
    job = Job(Net(layers=2), share=0.6)
    with pytest.raises(RuntimeError, match="a part of its gradient"):
        job.run(penalized)


def test_a_parameter_in_two_planned_modules_of_one_loss_is_refused() -> None:
    one, other = Net(layers=1), Net(layers=1)
    other.blocks[0].up.weight = one.blocks[0].up.weight
    jobs = Job(one, share=0.9), Job(other, share=0.9)
    jobs[1].handles[one.blocks[0].up.weight].remove()
    with pytest.raises(RuntimeError, match=r"a part of its gradient|modified by an inplace"):
        jobs[0].run(lambda model, x: model(x) + jobs[1].model(x))


def test_a_backward_pass_of_another_thread_begins_after_one_that_gives_gradients() -> None:
    """Its gradients would be added to ones that hooks are about to take: nobody but autograd itself guards these."""
    model = Net().eval()  # without random numbers
    x, y = numbers(128, WIDTH), 2 * numbers(128, WIDTH)
    totals = {p: torch.zeros_like(p) for p in model.parameters()}
    inside, began = threading.Event(), threading.Event()

    def take(parameter: torch.Tensor) -> None:
        if threading.current_thread() is first and not inside.is_set():
            inside.set()
            began.wait(30)
            time.sleep(0.2)  # the other pass is about to begin, or would have added its gradients by now
        totals[parameter] += parameter.grad
        parameter.grad = None

    def other() -> None:
        inside.wait(30)
        loss = model(y)
        loss.register_hook(lambda _: began.set())
        loss.backward()

    expected = {p: sum(torch.autograd.grad(model(given), p)[0] for given in (x, y)) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    remat.enable(model, budget=remat.Fraction(0.6), planner="greedy", self_check=False)
    first = threading.current_thread()
    inside.set()
    model(x).backward()  # planned; nothing is compiled while the threads run
    assert delivered(model)[-1] > 0
    for total in totals.values():
        total.zero_()
    inside.clear()
    threads = [threading.Thread(target=lambda: model(x).backward()), threading.Thread(target=other)]
    first = threads[0]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert began.is_set()
    for parameter, total in totals.items():
        assert parameter.grad is None
        assert torch.allclose(total, expected[parameter], rtol=1e-4, atol=1e-4)
