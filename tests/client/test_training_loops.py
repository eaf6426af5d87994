"""What callers do around a planned step, and change in it: it ends as without a plan, or is refused with a reason."""

from __future__ import annotations

import copy
import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import remat
from client.comparing import equal
from client.small_models import module_of
from remat.compile.alone import capture
from remat.planning.options import SolveOptions
from remat_ir import Answer, Problem, plain_plan
from remat_ir.greedy import checkpointed
from tiers import first

Scene: TypeAlias = Callable[[Any, Any], list[Any]]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (4, 8))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.3, norm: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(8, 12), nn.Linear(12, 8), nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(12) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.drop(self.norm(self.one(x)).tanh()).tanh())


def of(forward: Callable[..., Any], **attributes: Callable[[], Any]) -> Callable[[], nn.Module]:
    """A module with this forward, a `net` without dropout, and attributes of its own."""
    return lambda: module_of(forward, net=Net(0.0), **{name: value() for name, value in attributes.items()})


def train(run: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    loss: torch.Tensor = run(*(args if args or kwargs else (numbers(),)), **kwargs).square().sum()
    loss.backward()
    return loss.detach()


def two_calls(m: Any, run: Any) -> list[Any]:
    first, second = run(numbers()).sum(), run(numbers()).square().sum()
    second.backward()
    first.backward()
    (run(numbers()).sum() + 2 * run(numbers()).square().sum()).backward()
    return []


def chosen_inputs(m: Any, run: Any) -> list[Any]:
    x = numbers().requires_grad_()
    (found,) = torch.autograd.grad(run(x).square().sum(), x)
    run(x).square().sum().backward(inputs=[m.one.weight])
    return [found, x.grad]


def elsewhere(m: Any, run: Any) -> list[Any]:
    loss = run(numbers()).square().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    with torch.autograd.detect_anomaly(check_nan=False):
        loss = run(numbers()).square().sum()
        with torch.no_grad():
            loss.backward()
    return []


def hooks(m: Any, run: Any) -> list[Any]:
    m.register_full_backward_hook(lambda module, into, out: (into[0] * 3,))
    x, seen = numbers().requires_grad_(), []
    torch.autograd.graph.register_multi_grad_hook(list(m.parameters()), lambda found: seen.append(len(found)))
    y = run(x)
    y.register_hook(lambda gradient: gradient * 2)
    y.square().sum().backward()
    return [x.grad, torch.tensor(seen)]


def hooks_of_nodes(m: Any, run: Any) -> list[Any]:
    """Around the node that accumulates a gradient, next to those that would have it given inside the backward pass."""
    node = torch.autograd.graph.get_gradient_edge(m.one.weight).node
    node.register_prehook(lambda found: (found[0] * 2,))
    seen: list[torch.Tensor] = []
    for parameter in m.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    train(run)
    return [sum(t.sum() for t in seen)]


def sizes(m: Any, run: Any) -> list[Any]:
    return [train(run, x) for x in (numbers(0, 8), numbers(2, 3, 8), numbers(8).expand(4, 8), numbers(1, 8))]


def saved_elsewhere(m: Any, run: Any) -> list[Any]:
    with torch.autograd.graph.save_on_cpu():
        loss = run(numbers()).square().sum()
    loss.backward()
    x = numbers().requires_grad_()
    for reentrant in (True, False):
        train(lambda t, r=reentrant: checkpoint(run, t, use_reentrant=r), x)
    return [x.grad]


def other_modes(m: Any, run: Any) -> list[Any]:
    train(run)
    with torch.inference_mode():
        y = run(numbers())
    m.load_state_dict({name: value * 2 for name, value in m.state_dict().items()}, assign=True)
    m.zero_grad()
    train(run)
    kept = [p.grad for p in m.parameters()]
    m.double().zero_grad()
    return [y.clone(), *kept, train(run, numbers().double())]


def parametrized(m: Any, run: Any) -> list[Any]:
    train(run)
    nn.utils.parametrizations.weight_norm(m.one)
    return [train(run)]


def functional(m: Any, run: Any) -> list[Any]:
    """Steps of gradient descent on what stands in for the parameters: it is no leaf from the second one on."""
    given, x = dict(m.named_parameters()), numbers()
    for _ in range(2):
        loss = functional_call(run, given, (x,)).square().mean()
        found = torch.autograd.grad(loss, list(given.values()))
        given = {name: p - 0.1 * g for (name, p), g in zip(given.items(), found, strict=True)}
    functional_call(run, given, (x,)).square().mean().backward()
    return []


def transformed(m: Any, run: Any) -> list[Any]:
    x = numbers()
    found = torch.func.grad(lambda given: functional_call(run, given, (x,)).sum())(dict(m.named_parameters()))
    return list(found.values())


def batched(m: Any, run: Any) -> list[Any]:
    x = numbers().requires_grad_()
    y = run(x)
    return list(torch.autograd.grad(y, x, torch.randn(3, *y.shape), is_grads_batched=True))


def outputs(m: Any, run: Any) -> list[Any]:
    found = run(numbers())
    loss = found["y"].square().sum() + found["part"].sum() + found["weight"].sum() + found["fft"].conj().imag.sum()
    loss.backward()
    assert found["text"] == ("a", 3, None)
    return [found["x"], found["index"]]


def several(self: Any, x: torch.Tensor) -> dict[str, Any]:
    y = self.net(x)
    part, fft = y[1:], torch.fft.fft(y)
    given: dict[str, Any] = {"text": ("a", 3, None), "x": x, "index": y.argmax(-1), "weight": self.net.one.weight}
    return {"y": y, "part": part, "fft": fft, **given}


def orders(m: Any, run: Any) -> list[Any]:
    return [
        train(run, numbers(), a=numbers(), b=numbers()),
        train(run, numbers(), b=numbers(), a=numbers()),
        train(run, a=numbers(), x=numbers(), b=numbers()),
        train(run, numbers(), numbers(), b=None),
        train(run, numbers().requires_grad_(), numbers(), None),
    ]


def overwritten(m: Any, run: Any) -> list[Any]:
    x, y = numbers(), numbers()
    return [train(run, x, numbers()), train(run, y, y), x, y]


def repeated(m: Any, run: Any) -> list[Any]:
    return [train(run) for _ in range(3)]


def stepped(m: Any, run: Any) -> list[Any]:
    optimizer = torch.optim.SGD(m.parameters(), 1.0)
    for _ in range(2):
        optimizer.zero_grad()
        train(run)
        optimizer.step()
    return list(m.parameters())


def drawn(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.net(x * random.uniform(1, 5)).tanh() * random.randint(1, 9)


def clamped(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.net.one.weight.clamp_(-0.1, 0.1)
    return self.net(x)


def counted(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count.add_(1)
    return self.net(x) * self.count


def adding(self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return self.net(a + b)


def aliased_later(m: Any, run: Any) -> list[Any]:
    train(run, numbers(), numbers())
    m.zero_grad()
    x = numbers()
    return [train(run, x, x.view(4, 8))]


def aliased_first(m: Any, run: Any) -> list[Any]:
    x = numbers(5, 8)
    return [train(run, x[1:], x[:-1])]


def frozen(m: Any, run: Any) -> list[Any]:
    m.requires_grad_(False)
    return [run(numbers())]


SCENES: dict[str, tuple[Callable[[], nn.Module], Scene]] = {
    "two calls before a backward pass": (lambda: Net(norm=True), two_calls),
    "gradients of some": (Net, chosen_inputs),
    "another thread, anomaly mode, no_grad": (Net, elsewhere),
    "hooks": (Net, hooks),
    "hooks of nodes": (Net, hooks_of_nodes),
    "sizes": (Net, sizes),
    "hooks of what is saved, checkpoints around it": (Net, saved_elsewhere),
    "inference mode, assign=True, double": (Net, other_modes),
    "a parametrization added": (Net, parametrized),
    "functional_call": (Net, functional),
    "a batch of gradients": (lambda: Net(0.0), batched),
    "outputs of all kinds": (of(several), outputs),
    "orders of arguments": (of(lambda s, x, a, b=None: s.net(x * a - (0 if b is None else b))), orders),
    "an argument is overwritten": (of(adding), overwritten),
    "an overwritten argument shares memory later": (of(adding), aliased_later),
    "an overwritten argument shares memory": (of(adding), aliased_first),
    "nothing to train": (Net, frozen),
    "torch.func": (lambda: Net(0.0), lambda m, run: [torch.func.grad(lambda x: run(x).sum())(numbers())]),
    "functional_call in a transform": (lambda: Net(0.0), transformed),
    "numbers of Python's": (of(drawn), repeated),
    "a weight is written in forward": (of(clamped), stepped),
    "a tensor counts": (of(counted, count=lambda: torch.zeros(())), repeated),
}


def played(make: Callable[[], nn.Module], scene: Scene, plans: bool) -> list[torch.Tensor | None]:
    """What a scene leaves: gradients, buffers, what it gives, the loss of what is drawn next."""
    torch.manual_seed(0)
    model = make()
    if plans:
        remat.enable(model, budget="1GiB", planner=Given(checkpointed), mode="graph")
    torch.manual_seed(1)
    random.seed(1)
    found = scene(model, model)
    kept = [p.grad for p in model.parameters()]
    return [*kept, *model.buffers(), *found, torch.rand(2), torch.tensor(random.random())]


@pytest.mark.parametrize("name", first(8, SCENES))
def test_a_step_is_that_of_the_plain_module(name: str) -> None:
    plain, planned = (played(*SCENES[name], plans) for plans in (False, True))
    for one, other in zip(plain, planned, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one.stride() == other.stride() and torch.equal(one, other))


def test_nothing_that_a_call_was_given_is_kept() -> None:
    """Neither its arguments, nor tensors that others have taken the place of, nor the module itself.

    The name of its compiled function stays among this module's globals, as after plain `torch.compile`.
    """
    holding = module_of(lambda self, x: F.relu(self.net(x)) * self.factor, net=Net(), factor=torch.ones(8))
    model: Any = remat.enable(holding, budget="1GiB", planner=Given(checkpointed), mode="graph")
    x = numbers()
    train(model, x)
    gone = [weakref.ref(t) for t in (x, model.factor, model.net.one.weight)]
    del x
    model.factor = torch.zeros(8)
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    train(model)
    gc.collect()
    assert [ref() is None for ref in gone] == [True] * 3
    left = weakref.ref(model)
    del model, holding
    gc.collect()
    assert left() is None


def test_a_loss_that_is_kept_keeps_nothing_that_its_backward_pass_has_read() -> None:
    """A usual loop has the last loss while it makes the next one; `retain_graph` leaves all for another pass."""
    model = enabled(checkpointed)
    for again in (True, False):
        x = numbers(64, 32)
        made = weakref.ref(x)
        loss = model(x).square().sum()
        del x
        if again:
            loss.backward(retain_graph=True)
            assert made() is not None
        loss.backward()
        gc.collect()
        assert made() is None
        assert loss.grad_fn is not None


def test_nothing_of_a_call_that_was_captured_alone_is_kept() -> None:
    """Dynamo keeps what compiled a graph until it is reset: a batch next to it would be one that training lacks."""
    model, x = Net(), numbers()
    traced = capture(model, (x,))
    assert any(given is x for given in traced.inputs)
    gone = [weakref.ref(x), weakref.ref(model)]
    del x, model, traced
    gc.collect()
    assert [ref() is None for ref in gone] == [True] * 2


class Given:
    """Plans that keep the least, or everything."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def plan(self, problem: Problem, options: SolveOptions, *, on_progress: Any = None) -> Answer:
        return Answer.of_plan(problem, self.make(problem.graph), method="greedy")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.alpha = nn.Linear(32, 32), nn.Linear(32, 32), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.two(torch.tanh(self.one(x)))) * torch.sigmoid(x) * self.alpha


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def step(model: nn.Module, run: Any, between: Callable[[Any], object] = lambda model: None) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = run(torch.linspace(-1, 1, 64 * 32).reshape(64, 32)).square().sum()
    between(model)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def enabled(make: Callable[..., Any]) -> nn.Sequential:
    return remat.enable(blocks(), budget="1GiB", planner=Given(make), mode="graph", self_check=False)


def swap(model: Any) -> None:
    model[1].one.weight.data = model[1].one.weight.data * 1.5


def write(model: Any) -> None:
    with torch.no_grad():
        model[1].two.weight.mul_(1.5)


def write_unseen(model: Any) -> None:
    model[1].two.weight.data.mul_(1.5)


@pytest.mark.parametrize("make", [checkpointed, plain_plan])
def test_a_write_in_place_before_backward_is_refused_by_autograd(make: Callable[..., Any]) -> None:
    model = enabled(make)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model, model, write)


def test_a_storage_that_is_put_in_anothers_place_before_backward_is_refused_by_name() -> None:
    """Where the plan computes from it again; elsewhere the step is that of `aot_eager`, which reads the new one."""
    model = enabled(checkpointed)
    before = step(model, model)
    with pytest.raises(remat.CaptureError, match=r"1\.one\.weight was given another storage between the forward and"):
        step(model, model, swap)
    plain, kept = blocks(), enabled(plain_plan)
    torch._dynamo.reset()
    stock = torch.compile(plain, backend="aot_eager", fullgraph=True)
    assert equal(step(plain, stock), before)
    assert equal(step(plain, stock, swap), step(kept, kept, swap))
    swap(plain)
    swap(kept)
    assert equal(step(plain, stock), step(kept, kept)), "between steps it may change"


def test_a_write_that_autograd_does_not_see_is_read_by_what_is_computed_again() -> None:
    """As documented: nothing sees it. A plan that computes nothing again gives what `aot_eager` does."""
    plain, kept, again = blocks(), enabled(plain_plan), enabled(checkpointed)
    torch._dynamo.reset()
    stock = torch.compile(plain, backend="aot_eager", fullgraph=True)
    expected = step(plain, stock, write_unseen)
    assert equal(expected, step(kept, kept, write_unseen))
    assert not equal(expected, step(again, again, write_unseen))


@pytest.mark.parametrize("dtype", first(1, [torch.bfloat16, torch.float32, torch.float64]))
def test_a_write_that_autograd_does_not_see_is_refused_where_checksums_are_asked_for(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a weight, and of a bias that the plain step would not read again; between steps it may be written."""
    monkeypatch.setenv("REMAT_CHECK_WRITES", "1")
    model = enabled(checkpointed).to(dtype)

    def write_bias(model: Any) -> None:
        model[1].one.bias.data.add_(1)

    run = lambda x: model(x.to(dtype))  # noqa: E731
    for write, name in ((write_unseen, "two.weight"), (write_bias, "one.bias")):
        step(model, run)
        with pytest.raises(remat.CaptureError, match=rf"1\.{name} was written to through \.data between"):
            step(model, run, write)
    plain = blocks().to(dtype)
    plain.load_state_dict(model.state_dict())
    torch._dynamo.reset()
    stock = torch.compile(plain, backend="aot_eager", fullgraph=True)
    assert equal(step(plain, lambda x: stock(x.to(dtype))), step(model, run))


@pytest.mark.parametrize("way", first(1, ["enable", "optimize"]))
def test_a_shallow_copy_runs_by_its_own_attributes_or_not_at_all(way: str) -> None:
    """As replicas of data parallel are."""
    x, model = torch.ones(4, 32), Block()
    given: dict[str, Any] = {"budget": remat.Fraction(1.0), "planner": "greedy"}
    run = remat.enable(model, **given) if way == "enable" else remat.optimize(model, (x,), **given)
    expected = run(x)
    copied: Any = copy.copy(run)
    copied.alpha = 3.0
    with pytest.raises(remat.CaptureError, match="this Block is a shallow copy of the one"):
        copied(x)
    remat.disable(copied)
    assert torch.equal(copied(x), expected * 3)
    assert torch.equal(run(x), expected), "the source is as it was"
    with pytest.raises(remat.CaptureError, match="shallow copy"):
        run._replicate_for_data_parallel()(x)
