"""A better plan takes over under the state of torch that the step runs in: the steps before and after are equal."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import remat
from client.comparing import gradients
from client.planners import OnDemand
from client.small_models import module_of, numbers
from remat.training.enable import plans_of
from tiers import first

WIDTH = 32

pytestmark = pytest.mark.usefixtures("anew")


class Mixed(nn.Module):
    """Dropout, a batch norm, and a part that leaves autocast, as norms and losses often do.

    Args:
        attends: with attention and its dropout, which a CPU computes by products of float32 under autocast.
    """

    def __init__(self, attends: bool = False) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH) if attends else None
        self.out, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inner:
            x = torch.relu(layer(x))
        if self.qkv is not None:
            q, k, v = (t.view(-1, 8, 4, WIDTH // 4).transpose(1, 2) for t in self.qkv(x).split(WIDTH, -1))
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).transpose(1, 2).reshape(-1, WIDTH)
        with torch.autocast("cpu", enabled=False):
            y = self.out(self.norm(x.float()))
        return F.dropout(y, 0.1).square().mean()


class Job:
    """A model that trains by one of the two ways, at a size whose better plan is still to come.

    Args:
        way: "optimize", "enable", or "backend", by torch.compile.
        state: the state of torch that its forward passes run in.
    """

    def __init__(
        self, way: str, state: Callable[[], Any], make: Callable[[], nn.Module] = Mixed, needs_grad: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.model, self.planner, self.state = make(), OnDemand(), state
        self.small, self.large = (numbers(rows, WIDTH, requires_grad=needs_grad) for rows in (256, 512))
        asking: dict[str, Any] = {"budget": remat.Fraction(1), "planner": self.planner, "max_gap": 0}
        self.run: Any
        self.plain = torch.compile(copy.deepcopy(self.model), backend="aot_eager", dynamic=False)
        if way == "optimize":
            with state():
                self.run = remat.optimize(self.model, (self.small,), **asking)
        elif way == "enable":
            self.run = remat.enable(self.model, **asking)
        else:
            self.backend = remat.backend(**asking)
            self.run = torch.compile(self.model, backend=self.backend, dynamic=False)
        self.step(self.small)

    def step(self, x: torch.Tensor | None = None, run: Any = None) -> dict[str, torch.Tensor]:
        """What a step at the large size gives; the buffers are put back, and each begins at the same random state."""
        model = self.run if run is None else run
        buffers = copy.deepcopy(dict(model.named_buffers()))
        for p in model.parameters():
            p.grad = None
        torch.manual_seed(3)
        with self.state():
            loss = model(self.large if x is None else x)
        loss.backward()
        found = {"loss": loss.detach(), "state": torch.get_rng_state()}
        found |= {n.removeprefix("_orig_mod."): b.clone() for n, b in model.named_buffers()}
        found |= {n.removeprefix("_orig_mod.") + ".grad": p.grad for n, p in model.named_parameters()}
        with torch.no_grad():
            for name, b in model.named_buffers():
                b.copy_(buffers[name])
        return found

    def arrives(self, caplog: pytest.LogCaptureFixture, step: Callable[[], Any]) -> None:
        """Run steps until the better plan has taken over."""
        self.planner.go.set()
        with caplog.at_level(logging.INFO, "remat"):
            for _ in range(6000):
                if any("a better plan takes over" in r.getMessage() for r in caplog.records if r.name == "remat"):
                    return
                step()
                time.sleep(0.01)
        raise AssertionError("no better plan has taken over")

    def takes_over(self, caplog: pytest.LogCaptureFixture, step: Callable[[], Any] | None = None) -> dict[str, Any]:
        """What a step gives, before and after a better plan has taken over, and without a plan."""
        before = self.step()
        self.arrives(caplog, step or self.step)
        after = self.step()
        assert equal(before, after) == []
        assert equal(self.step(run=self.plain), after) == []
        return after

    def is_found(self) -> None:
        """Let the better plan be there."""
        self.planner.go.set()
        better = next(p.better for p in plans_of(self.model).plans if p.better is not None)
        assert better.wait(60) is not None


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, t in one.items() if t.dtype != other[name].dtype or not torch.equal(t, other[name])]


class Doubled(TorchFunctionMode):
    """Every relu twice as large: applied twice, four times."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * 2 if func is torch.relu else made


def amp(**options: Any) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


@contextlib.contextmanager
def put(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


@contextlib.contextmanager
def grad_inside_no_grad() -> Iterator[None]:
    with torch.no_grad(), torch.enable_grad():
        yield


@contextlib.contextmanager
def forward_alone() -> Iterator[None]:
    with amp(), torch._functorch.config.patch(backward_pass_autocast="off"):
        yield


STATES: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "autocast": amp,
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "autocast without its cache": lambda: amp(cache_enabled=False),
    "autocast's dtype alone": lambda: put(
        lambda: torch.get_autocast_dtype("cpu"), lambda d: torch.set_autocast_dtype("cpu", d), torch.float16
    ),
    "grad mode": grad_inside_no_grad,
    "default device": lambda: torch.device("meta"),
    "default dtype": lambda: put(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "function mode": Doubled,
    "saved-tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "deterministic": lambda: put(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "mkldnn off": lambda: torch.backends.mkldnn.flags(enabled=False),
    "autocast, by a config off in backward": forward_alone,
    "config: donated buffers": lambda: torch._functorch.config.patch(donated_buffer=True),
}
"""What a forward pass runs in, its backward pass outside of it."""

WHOLE: dict[str, Callable[[], Any]] = {
    "matmul precision": lambda: put(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "threads": lambda: put(torch.get_num_threads, torch.set_num_threads, 2),
}
"""What both passes must run in, where kernels round by it and a plan runs them again in the backward pass."""

CASES = [("optimize", name) for name in (*STATES, *WHOLE)]
"""Every state by one way."""
CASES += [("backend", name) for name in ("autocast", "function mode", "saved-tensor hooks", "threads")]


@pytest.mark.parametrize(("way", "name"), first(2, CASES))
def test_the_steps_before_and_after_are_equal(way: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    with WHOLE.get(name, contextlib.nullcontext)():
        job = Job(way, STATES.get(name, contextlib.nullcontext), lambda: Mixed(attends=name.startswith("autocast")))
        after = job.takes_over(caplog)
        if STATES.get(name) is forward_alone:
            assert "inner.0.weight.grad" in equal(after, other_gradients(job, amp)), "the setting has an effect"
    assert job.planner.threads[1:] == ["remat-planner"]


def other_gradients(job: Job, state: Callable[[], Any]) -> dict[str, torch.Tensor]:
    """Of the plain step under another state."""
    torch.compiler.reset()
    before, job.state = job.state, state
    try:
        return job.step(run=job.plain)
    finally:
        job.state = before


WAYS = ("optimize", "enable", "backend")


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_an_evaluation_under_inference_mode_comes_before_each_step(way: str, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(way, contextlib.nullcontext)

    def evaluated() -> dict[str, torch.Tensor]:
        job.model.eval()
        with torch.inference_mode():
            assert job.run(job.large).is_inference()
        job.model.train()
        return job.step()

    job.takes_over(caplog, evaluated)


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["optimize", "enable"])
@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_a_tensor_made_under_inference_mode_trains_as_without_a_plan(way: str, kind: str) -> None:
    """Autograd saves none for a backward pass, as a plan must: the graph runs as Dynamo captured it."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            with torch.inference_mode():
                shift = torch.ones(WIDTH)
                self.shift: Any = nn.Parameter(shift) if kind == "parameter" else nn.Buffer(shift)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.linear(torch.relu(x + self.shift)))

    plain, model, x = Shifted(), Shifted(), numbers(4, WIDTH)
    model.linear.load_state_dict(plain.linear.state_dict())
    asking: Any = {"budget": "100%", "planner": "greedy"}
    run = remat.enable(model, **asking) if way == "enable" else remat.optimize(model, x, **asking)
    for each in (plain, run):
        each(x).sum().backward()  # eager PyTorch saves nothing of a sum's
    assert all(map(torch.equal, gradients(plain.linear), gradients(model.linear)))


class Layers(nn.Module):
    """Linear layers, each inside of a `torch.func.vmap` over the rows if asked for."""

    def __init__(self, over_rows: bool = False) -> None:
        super().__init__()
        self.over_rows, self.layers = over_rows, nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(torch.func.vmap(layer)(x) if self.over_rows else layer(x))
        return x.square().mean()


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_a_step_with_transforms_of_functions_inside_takes_over(way: str, caplog: pytest.LogCaptureFixture) -> None:
    Job(way, contextlib.nullcontext, lambda: Layers(over_rows=True)).takes_over(caplog)


def functional(job: Job, run: Any) -> list[torch.Tensor]:
    given = dict(run.named_parameters())
    loss = torch.func.functional_call(run, given, (job.large,))
    return list(torch.autograd.grad(loss, list(given.values())))


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_a_functional_call_takes_over(way: str, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(way, contextlib.nullcontext, Layers)
    before = functional(job, job.run)
    job.arrives(caplog, lambda: functional(job, job.run))
    for run in (job.run, job.plain):
        assert all(torch.equal(a, b) for a, b in zip(before, functional(job, run), strict=True))


TRANSFORMS: dict[str, Callable[[Job, Any], torch.Tensor]] = {
    "vmap": lambda job, run: torch.func.vmap(run)(torch.stack([job.large, job.large])),
    "vmap over something else": lambda job, run: torch.func.vmap(lambda n: n * run(job.large))(torch.arange(2.0)),
    "grad": lambda job, run: torch.func.grad(run)(job.large),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("way", ["optimize", "enable"])
def test_a_call_inside_a_transform_runs_as_it_is_and_takes_nothing_over(
    way: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With the better plan there: it takes over at the next call outside, and is compiled outside."""
    job = Job(way, contextlib.nullcontext, Layers)
    before = job.step()
    job.is_found()
    plain = remat.disable(copy.deepcopy(job.model))
    with caplog.at_level(logging.INFO, "remat"):
        assert torch.equal(TRANSFORMS[name](job, job.run), TRANSFORMS[name](job, plain))
    assert "takes over" not in caplog.text
    job.arrives(caplog, job.step)
    assert equal(before, job.step()) == []
    assert remat.check(job.run, job.large).planned_calls == 1


@pytest.mark.thorough
@pytest.mark.parametrize("name", TRANSFORMS)
def test_dynamo_runs_a_call_inside_a_transform_as_it_is(name: str) -> None:
    """And that code from then on, with any backend: `remat.check` says that no plan ran."""
    job = Job("backend", contextlib.nullcontext, Layers)
    before = job.step()
    assert remat.check(job.run, job.large).planned_calls == 1
    assert torch.equal(TRANSFORMS[name](job, job.run), TRANSFORMS[name](job, copy.deepcopy(job.model)))
    assert remat.check(job.run, job.large).planned_calls == 0
    assert equal(before, job.step()) == []


READ: list[tuple[str, Any]] = []
"""In which thread a graph was traced, and torch's settings there."""


@torch.library.custom_op("remat_tests::described", mutates_args=())
def described(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@described.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    dynamo, functorch, fx = torch._dynamo.config, torch._functorch.config, torch.fx.experimental._config
    found = dynamo.record_runtime_overhead, functorch.view_replay_for_aliased_outputs, fx.backed_size_oblivious
    READ.append((threading.current_thread().name, found))
    return torch.empty_like(x)


described.register_autograd(lambda _, g: g)


@pytest.mark.slow
def test_settings_of_the_call_are_in_force_where_a_step_is_traced_once(caplog: pytest.LogCaptureFixture) -> None:
    """Of torch's three modules of settings that tracing reads; the better plan comes of the same trace."""

    class Described(Mixed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(described(x))

    dynamo, functorch, fx = torch._dynamo.config, torch._functorch.config, torch.fx.experimental._config
    patched = not dynamo.record_runtime_overhead, not functorch.view_replay_for_aliased_outputs, True

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with (
            dynamo.patch(record_runtime_overhead=patched[0], fake_tensor_cache_enabled=False),
            functorch.patch(view_replay_for_aliased_outputs=patched[1]),
            fx.patch(backed_size_oblivious=patched[2]),
        ):
            yield

    job = Job("backend", settings, Described)
    READ.clear()
    before = job.step()
    assert set(READ) == {(threading.main_thread().name, patched)}
    READ.clear()
    job.arrives(caplog, job.step)
    assert READ == []
    assert equal(before, job.step()) == []


@pytest.mark.thorough
def test_two_kinds_of_calls_under_different_autocast_each_take_over_under_their_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The better plan of the one is there while the other one runs: each is compiled at its own next call."""
    job = Job("enable", amp)
    before = job.step()
    job.is_found()
    job.state = contextlib.nullcontext
    plain = job.step()  # a kind of its own, planned while the better plan of the other is there
    assert equal(job.step(run=job.plain), plain) == []
    job.state = amp
    job.arrives(caplog, job.step)
    assert equal(before, job.step()) == []


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["enable", "backend"])
def test_a_checkpoint_around_the_model_runs_twice_by_one_plan(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """The plan arrives between its two runs, and with two calls outstanding."""
    job = Job(way, contextlib.nullcontext)
    x = job.large

    def step(between: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
        torch.manual_seed(3)
        first = checkpoint(job.run, x, use_reentrant=False)
        between()
        second = checkpoint(job.run, x, use_reentrant=False)
        between()
        return list(torch.autograd.grad(first + 2 * second, list(job.model.parameters())))

    def arrive() -> None:
        job.planner.go.set()
        time.sleep(0.3)

    expected = step()
    with caplog.at_level(logging.INFO, "remat"):
        found = step(arrive)
    assert "takes over" not in caplog.text
    job.arrives(caplog, step)
    for grads in (found, step()):
        assert all(torch.equal(a, b) for a, b in zip(expected, grads, strict=True))


@pytest.mark.thorough
def test_a_reentrant_checkpoint_goes_over_too(caplog: pytest.LogCaptureFixture) -> None:
    """All its planned calls are made in backward passes, each by the plan that is there then."""
    job = Job("enable", contextlib.nullcontext, needs_grad=True)
    x = job.large

    def step() -> list[torch.Tensor]:
        job.model.zero_grad()
        torch.manual_seed(3)
        checkpoint(job.run, x, use_reentrant=True).backward()
        return [p.grad.clone() for p in job.model.parameters() if p.grad is not None]

    expected = step()
    job.arrives(caplog, step)
    assert all(torch.equal(a, b) for a, b in zip(expected, step(), strict=True))


def test_a_step_that_has_begun_ends_by_its_plan(caplog: pytest.LogCaptureFixture) -> None:
    """Its backward pass is run after the plan of the next call has taken over."""
    job = Job("backend", amp)
    expected = job.step()
    torch.manual_seed(3)
    with amp():
        loss = job.run(job.large)
    (better,) = [planned.better for planned in job.backend.planned if planned.better]
    job.planner.go.set()
    better.wait(60)  # a call beside one that is outstanding shares its budget, and waits for no better plan
    job.arrives(caplog, job.step)
    found = torch.autograd.grad(loss, list(job.model.parameters()))
    for (name, _), gradient in zip(job.model.named_parameters(), found, strict=True):
        assert torch.equal(gradient, expected[name + ".grad"])


@pytest.mark.thorough
def test_units_are_compiled_under_the_autocast_of_their_calls() -> None:
    """A model that turns autocast on in its own forward: its units' plans are chosen outside of it."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with amp():
            return sum(block(x) for block in self.blocks)

    torch.manual_seed(0)
    model = module_of(forward, blocks=nn.ModuleList(Mixed(attends=True) for _ in range(2)))
    x = numbers(256, WIDTH)
    plain = copy.deepcopy(model)
    for block in plain.blocks:
        block.compile(backend="aot_eager")
    remat.enable(model.blocks, budget="70%", planner="greedy")
    for _ in range(5):
        model(x).backward()
    division = model.blocks[0].forward.backend.division
    assert division.overhead > 0
    found = []
    for run in (plain, model):
        run.zero_grad()
        torch.manual_seed(3)
        run(x).backward()
        found.append({n: p.grad for n, p in run.named_parameters()})
    assert equal(*found) == []
