"""Gradients that are released, or taken by hooks, as they are made: what the plain loop leaves, and refusals."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import remat
from client.comparing import equal
from client.small_models import FeedForward, module_of, numbers
from remat import _compat
from remat.capture import backward
from remat.capture.operations import Kind
from remat.profiling.measure import peak_memory
from remat.training.backward import MOST_WAITED_S
from remat.training.enable import plans_of
from remat_ir import InvalidData, InvalidPlan, Problem, plan_of, verify
from tiers import first

WIDTH = 32


class Net(nn.Module):
    """Blocks, of which the last is the second again; running statistics; a scalar."""

    def __init__(self, affine: bool = True, tied: bool = False, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(FeedForward(WIDTH, dropout=0.1, affine=affine) for _ in range(layers))
        self.tied = tied
        self.last = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        if self.tied:
            x = self.blocks[1](x)
            x = x @ self.blocks[0].up.weight.t() @ self.blocks[0].up.weight
        return self.last(x).square().mean() + x.sigmoid().mean()


def crossed() -> nn.Module:
    """The gradient of the weight is complete before the gradient of the input reads it."""
    first, weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))
    return module_of(lambda self, x: (self.first(x).tanh() @ self.weight).square().mean(), first=first, weight=weight)


MADE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "SGD foreach maximize": lambda p: torch.optim.SGD(p, lr=0.01, maximize=True, weight_decay=0.1, foreach=True),
    "Adam": torch.optim.Adam,
    "Adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adafactor": torch.optim.Adafactor,
    "Muon": torch.optim.Muon,
}


def enabled(model: nn.Module, optimizer: Any, share: float = 0.6, **options: Any) -> nn.Module:
    budget = remat.Fraction(share)
    return remat.enable(
        model, budget=budget, planner="greedy", optimizer=optimizer, release_gradients=True, self_check=False, **options
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    torch.manual_seed(1)
    losses = []
    for step in range(3):
        loss = model((step + 1) * numbers(128, WIDTH))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.detach())
    yield from losses
    yield from (t.clone() for t in model.state_dict().values())
    for p in model.parameters():
        yield from (t for _, t in sorted(optimizer.state[p].items()) if isinstance(t, torch.Tensor))


def scaler() -> torch.amp.GradScaler:
    made = torch.amp.GradScaler("cpu")
    made.scale(torch.ones(()))
    return made


@pytest.mark.parametrize("name", first(4, MADE))
def test_training_is_that_of_the_plain_loop(name: str) -> None:
    plain, planned = Net(name != "Muon"), Net(name != "Muon")
    optimizers = MADE[name](plain.parameters()), MADE[name](planned.parameters())
    enabled(planned, optimizers[1])
    assert equal(train(plain, optimizers[0]), train(planned, optimizers[1]))
    (plan,) = plans_of(planned).plans
    assert len(plan.step.operations.updates) == len(list(planned.parameters()))
    assert plan.answer.overhead


@pytest.mark.parametrize("share", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("affine", first(1, [True, False]))
def test_tied_weights_are_updated_once_after_their_last_gradient(affine: bool, share: float) -> None:
    plain, planned = Net(affine, tied=True), Net(affine, tied=True)
    optimizers = torch.optim.AdamW(plain.parameters()), torch.optim.AdamW(planned.parameters())
    enabled(planned, optimizers[1], share)
    assert equal(train(plain, optimizers[0]), train(planned, optimizers[1]))


def test_the_peak_is_as_predicted_and_below_all_gradients() -> None:
    model = Net(layers=6)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    enabled(model, optimizer)
    x = numbers(16, WIDTH)
    for _ in range(2):
        model(x).backward()
        optimizer.step()
    found = peak_memory(lambda: model(x).backward())
    (plan,) = plans_of(model).plans
    size = sum(p.numel() * 4 for p in model.parameters())
    assert found.left_bytes == 0
    assert found.peak_bytes < size / 2
    assert found.peak_bytes == pytest.approx(plan.activation_bytes, rel=0.03)
    assert "of them released as they are made" in remat.explain(model)


def test_a_recomputation_from_an_updated_parameter_is_never_run() -> None:
    """The verifier refuses whatever reads a parameter after its update, and before it such a recomputation may run."""
    model = Net(layers=2)
    enabled(model, torch.optim.SGD(model.parameters(), lr=0.1), 1.0)
    plan = plans_of(model).plan_for((numbers(16, WIDTH),))
    step, graph = plan.step, plan.step.graph
    roomy = Problem(graph, graph.fixed_bytes + 2**30)
    refused = 0
    for update in (i for i, op in enumerate(step.operations.ops) if op.kind is Kind.UPDATE):
        makers = {graph.value_op[v]: v for v in graph.op_inputs[update]}
        before = next(v for op, v in makers.items() if step.operations.ops[op].kind is Kind.BEFORE_UPDATE)
        for reader in (i for i in graph.users[before][:-1] if graph.last_stage[i] == update):
            again = plan_of(graph, (*range(update), reader, *range(update, graph.ops)))
            verify(roomy, again)
            step.compile(again, now=True)
            with pytest.raises(InvalidPlan, match=f"which op {update} has consumed"):
                verify(roomy, plan_of(graph, (*range(update + 1), reader, *range(update + 1, graph.ops))))
            refused += 1
    assert refused >= len(step.operations.updates) / 2


def test_parameters_that_cannot_be_released_are_left_to_the_step() -> None:
    class Returns(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), self.blocks[0].up.weight.t()

    plain, planned = Returns(), Returns()
    optimizers = torch.optim.AdamW(plain.parameters()), torch.optim.AdamW(planned.parameters())
    enabled(planned, optimizers[1])
    for model, optimizer in zip((plain, planned), optimizers, strict=True):
        torch.manual_seed(1)
        for _ in range(2):
            loss, weight = model(numbers(64, WIDTH))
            (loss + weight.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert equal(plain.state_dict().values(), planned.state_dict().values())


@pytest.fixture
def job() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    model = Net(layers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    return enabled(model, optimizer, 1.0), optimizer, numbers(16, WIDTH)


def test_a_gradient_before_the_step_is_refused(job: Any) -> None:
    model, _, x = job
    weight = model.blocks[0].up.weight
    weight.grad = torch.zeros_like(weight)
    with pytest.raises(RuntimeError, match="has a gradient before the forward pass"):
        model(x)


def test_a_first_step_that_is_refused_keeps_its_plan() -> None:
    """With the check of first steps, which otherwise takes an error for a step that does not run as traced."""
    model, x = Net(layers=2), numbers(16, WIDTH)
    weight, optimizer = model.blocks[0].up.weight, torch.optim.AdamW(model.parameters())
    remat.enable(model, budget="100%", planner="greedy", optimizer=optimizer, release_gradients=True)
    weight.grad = torch.zeros_like(weight)
    with pytest.raises(RuntimeError, match="has a gradient before the forward pass"):
        model(x)
    optimizer.zero_grad()
    before = weight.detach().clone()
    model(x).backward()
    assert not torch.equal(weight, before), "updated in the backward pass"
    assert len(plans_of(model).plans) == 1


def test_a_second_forward_pass_before_the_backward_pass_is_refused(job: Any) -> None:
    model, _, x = job
    loss = model(x)
    with pytest.raises(RuntimeError, match="an earlier forward pass still waits"):
        model(x)
    del loss
    model(x).backward()


def test_a_second_backward_pass_is_refused(job: Any) -> None:
    model, _, x = job
    loss = model(x)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"backward\(\) runs once|modified by an inplace"):
        loss.backward()


@pytest.mark.parametrize(
    "use",
    [
        lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda model, optimizer: scaler().unscale_(optimizer),
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda model, optimizer: [p.grad.norm() for p in model.parameters()],
        lambda model, optimizer: model.blocks[0].up.weight.square().sum().backward(),
    ],
    ids=["norm", "value", "scaler", "zero", "log", "accumulate"],
)
def test_whoever_uses_a_released_gradient_is_told(job: Any, use: Any) -> None:
    model, optimizer, x = job
    model(x).backward()
    with pytest.raises((RuntimeError, AssertionError)) as told:
        use(model, optimizer)
    assert "this gradient has been released" in str(told.value)
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())


def test_a_parameter_in_another_graph_of_the_same_loss_is_refused(job: Any) -> None:
    model, _, x = job
    with pytest.raises(RuntimeError, match=r"has been released|modified by an inplace"):
        (model(x) + 0.1 * model.blocks[0].up.weight.square().sum()).backward()


def test_a_hook_on_a_gradient_is_refused(job: Any) -> None:
    model, _, x = job
    model.blocks[0].up.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(RuntimeError, match="has a hook on its gradient"):
        model(x)


def test_gradients_that_ranks_would_average_are_refused(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, x = job
    plans_of(model).plan_for((x,))
    monkeypatch.setattr(_compat, "active_ddp", lambda: model)
    with pytest.raises(RuntimeError, match="could average"):
        model(x)


class Coupled(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norm = sum(p.grad.square().sum() for p in group["params"] if p.grad is not None) ** 0.5
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / norm)


class Counting(torch.optim.SGD):
    """Counts its steps in its groups."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        super().step()


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (torch.optim.LBFGS, {}, "LBFGS computes gradients inside its step"),
        (Coupled, {}, "a step of Coupled for one parameter depends on the others"),
        (Counting, {}, "changes the settings of its groups"),
        (lambda p: None, {}, "needs optimizer="),
        (torch.optim.SGD, {"accumulate": 2}, "does not go with accumulate"),
        (torch.optim.SGD, {"clip_grad_norm": True}, "does not go with clip_grad_norm"),
        (torch.optim.SGD, {"mode": "chain"}, "needs a captured step"),
    ],
)
def test_what_cannot_be_released_is_refused_at_the_call(make: Any, options: dict[str, Any], said: str) -> None:
    model = Net(layers=1)
    with pytest.raises(InvalidData, match=said):
        enabled(model, make(model.parameters()), **options)


def test_evaluation_and_a_saved_state_are_as_ever(job: Any) -> None:
    model, optimizer, x = job
    for _ in range(2):
        model(x).backward()
        with torch.no_grad():
            model(x)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    model(x).backward()
    assert all(state["step"] == 3 for state in optimizer.state.values())


HOOKED = ("SGD", "SGD momentum", "AdamW", "AdamW fused", "Adafactor")


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


def pair(make: Callable[[], nn.Module], share: float = 0.6, **options: Any) -> tuple[Job, Job]:
    return Job(make(), **options), Job(make(), share=share, **options)


def same(jobs: tuple[Job, Job], loss: Any = lambda model, x: model(x), steps: int = 3) -> bool:
    found = [job.run(loss, steps) for job in jobs]
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def delivered(model: nn.Module) -> list[int]:
    """Of each plan, the latest last: how many gradients are given away as they are made."""
    return [len(plan.step.operations.updates) for plan in plans_of(model).plans if plan]


@pytest.mark.parametrize(("name", "tied"), first(3, [("AdamW", True), *((name, False) for name in HOOKED)]))
def test_hooks_leave_behind_what_the_plain_loop_does(name: str, tied: bool) -> None:
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


@pytest.mark.parametrize("released", [False, True])
def test_a_batch_is_let_go_of_once_its_backward_pass_has_run(released: bool) -> None:
    """The caller may keep the loss; what hands gradients to parameters needs these alone."""
    model = Net(layers=2)
    if released:
        enabled(model, torch.optim.AdamW(model.parameters()), 1.0)
    else:
        Job(model, share=1.0)
    x = numbers(16, WIDTH)
    batch, loss = weakref.ref(x), model(x)
    del x
    loss.backward()
    assert plans_of(model).plans[0].step.operations.updates
    gc.collect()
    assert batch() is None
    assert loss.grad_fn is not None


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
    plain = crossed()
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


def test_a_part_of_a_gradient_from_outside_is_refused() -> None:
    job = Job(Net(layers=2), share=0.6)
    with pytest.raises(RuntimeError, match="a part of its gradient"):
        job.run(lambda model, x: model(x) + sum(p.square().sum() for p in model.parameters()))


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


def failed_once() -> tuple[Net, torch.Tensor, list[torch.Tensor]]:
    """A planned model whose backward pass has raised in its first hook, the loss, and what later hooks take."""
    model, taken, fails = Net(layers=2), list[torch.Tensor](), threading.Event()

    def take(parameter: torch.Tensor) -> None:
        if fails.is_set():
            raise ArithmeticError
        taken.append(parameter)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    remat.enable(model, budget=remat.Fraction(1.0), planner="greedy", self_check=False)
    fails.set()
    loss = model(numbers(64, WIDTH))
    with pytest.raises(ArithmeticError):
        loss.backward()
    assert delivered(model)[-1] > 0
    fails.clear()
    model.zero_grad()
    return model, loss, taken


def test_a_backward_pass_that_raised_keeps_no_other_thread_waiting() -> None:
    """Although the thread that ran it lives on."""
    model, loss, taken = failed_once()
    del loss
    x = numbers(64, WIDTH)
    other = threading.Thread(target=lambda: model(x).backward(), daemon=True)
    other.start()
    other.join(MOST_WAITED_S / 2)
    assert not other.is_alive()
    assert len(taken) == len(list(model.parameters()))


@pytest.mark.parametrize("planned", [True, False])
def test_after_a_backward_pass_that_raised_the_next_one_gives_all_gradients(planned: bool) -> None:
    """By a plan or without one, while the loss is still there, and with it what autograd keeps of the parameters."""
    model, loss, taken = failed_once()
    if not planned:
        remat.disable(model)
    for step in (1, 2):
        model(numbers(64, WIDTH)).backward()
        assert len(taken) == step * len(list(model.parameters()))
    assert loss.grad_fn is not None
    assert all(parameter.grad is None for parameter in model.parameters())
