"""Gradients that are released as they are made: what the plain loop leaves behind, and refusals where it would not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import remat
from client.comparing import equal
from client.small_models import numbers
from remat import _compat
from remat.capture import backward
from remat.capture.operations import Kind
from remat.profiling.measure import peak_memory
from remat.training.enable import plans_of
from remat_ir import InvalidData, InvalidPlan, Problem, plan_of, verify
from tiers import first

WIDTH = 32


class Block(nn.Module):
    def __init__(self, affine: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=affine)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=affine), nn.Linear(4 * WIDTH, WIDTH, bias=affine)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks, of which the last is the second again; running statistics; a scalar."""

    def __init__(self, affine: bool = True, tied: bool = False, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(affine) for _ in range(layers))
        self.tied = tied
        self.last = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        if self.tied:
            x = self.blocks[1](x)
            x = x @ self.blocks[0].up.weight.t() @ self.blocks[0].up.weight
        return self.last(x).square().mean() + x.sigmoid().mean()


class Crossed(nn.Module):
    """The gradient of the weight is complete before the gradient of the input reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first(x).tanh() @ self.weight).square().mean()


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


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, rows: int = 128
) -> Iterator[torch.Tensor]:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    torch.manual_seed(1)
    losses = []
    for step in range(3):
        loss = model((step + 1) * numbers(rows, WIDTH))
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


@pytest.mark.parametrize(("name", "found"), [("_last_makers", -1), ("_readers", [])])
def test_where_an_update_stands_is_needed_as_a_whole(name: str, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one half of the rule a step reads a gradient that is not there, or a parameter after its update."""
    monkeypatch.setattr(backward, name, lambda *_: found)
    plain = Crossed()
    planned = copy.deepcopy(plain)
    optimizers = torch.optim.SGD(plain.parameters(), lr=0.1), torch.optim.SGD(planned.parameters(), lr=0.1)
    if name == "_last_makers":
        with pytest.raises(InvalidData):
            enabled(planned, optimizers[1], 1.0)(numbers(16, WIDTH))
        return
    enabled(planned, optimizers[1], 1.0)
    assert not equal(train(plain, optimizers[0]), train(planned, optimizers[1]))


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
