"""What other threads do while a step is planned: draw numbers, none of which is wound back, train, and hook modules."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.nn.modules import module as modules

import remat
from client.small_models import numbers
from remat import generators
from remat._compat import tracing
from remat.chains.saved_state import SavedState
from remat.compile import carrier
from remat.compile.sized import Backend
from remat.profiling.profile import profile_kernels
from remat.training.backward import Release

aten = torch.ops.aten


@contextmanager
def drawing(draw: Callable[[], float]) -> Iterator[list[float]]:
    """Another thread draws all the time, such as one that loads and augments data."""
    drawn: list[float] = []
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(0.002):
            drawn.append(draw())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield drawn
        time.sleep(0.1)
    finally:
        ended.set()
        thread.join()


def net(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 8)) for _ in range(4))
    )


def step_graph() -> None:
    model = net(0.5)
    planned = remat.optimize(model, torch.ones(16, 8), budget="95%", planner="greedy")
    planned(torch.ones(24, 8)).sum().backward()  # another size is planned in the middle of training


def stages() -> None:
    remat.optimize_chain(net(0.5), torch.ones(16, 8), budget="100%", planner="greedy")


def released() -> None:
    model = net()
    Release(torch.optim.Adam(model.parameters()))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("plan", "draw"),
    [
        (step_graph, np.random.random),  # Dynamo itself winds Python's numbers back when it compiles
        (stages, np.random.random),
        (stages, random.random),
    ],
)
def test_no_number_comes_twice_in_a_thread_that_draws_while_a_step_is_planned(
    plan: Callable[[], None], draw: Callable[[], float]
) -> None:
    with drawing(draw) as drawn:
        plan()
    assert len(drawn) > 10
    assert len(set(drawn)) == len(drawn)


def states() -> tuple[Any, ...]:
    numpy = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numpy[1].tolist(), numpy[2:]


@pytest.mark.parametrize("plan", [step_graph, stages, released])
def test_planning_draws_no_number_of_the_processs(plan: Callable[[], None]) -> None:
    model_made = states()
    seeded = torch.random.get_rng_state()
    plan()  # imports, and makes its model
    torch.random.set_rng_state(seeded)
    assert states()[1:] == model_made[1:]


X = torch.ones(4, 4)
Q = torch.ones(1, 2, 4, 4)
DRAWS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "bernoulli": (aten.bernoulli.p, (X, 0.5)),
    "dropout": (aten.native_dropout.default, (X, 0.5, True)),
    "rand": (aten.rand.default, ([4],)),
    "rand_like": (aten.rand_like.default, (X,)),
    "randint": (aten.randint.low, (0, 9, [4])),
    "randperm": (aten.randperm.default, (9,)),
    "multinomial": (aten.multinomial.default, (X, 2)),
    "attention": (aten._scaled_dot_product_attention_math.default, (Q, Q, Q, None, 0.5)),
    "normal": (aten.normal_functional.default, (X,)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", DRAWS)
def test_every_random_kernel_is_measured_by_other_numbers_than_the_processs(name: str) -> None:
    target, args = DRAWS[name]
    assert generators.draws(target)
    torch.manual_seed(0)
    before, noted = torch.get_rng_state(), states()
    target(*args)
    assert not torch.equal(before, torch.get_rng_state()), "this kernel draws no number"
    torch.set_rng_state(before)
    call = generators.call(target, args, {})
    call(), call()
    with generators.Own() as own:
        target(*args)
    assert own.drew
    assert states() == noted


@pytest.mark.thorough
def test_profiles_of_random_kernels_leave_torchs_generator_to_the_other_threads() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(64, 64)
    kernels = []
    for name in ("bernoulli", "rand_like", "dropout"):
        target, args = DRAWS[name]
        kernels.append(graph.call_function(target, (x, *args[1:])))
        kernels[-1].meta["val"] = target(torch.ones(64, 64), *args[1:])
    before = states()
    profile_kernels(kernels)
    assert states() == before


@pytest.mark.thorough
def test_a_stage_that_runs_again_winds_nothing_back_that_it_has_not_drawn_from() -> None:
    stage = nn.Dropout(0.5)
    random.seed(1)
    np.random.seed(1)
    saved = SavedState(stage, X.device)
    first = stage(X)
    saved.check("stage 1")
    drawn: list[float] = []

    def another() -> None:
        drawn.extend((random.random(), np.random.random()))

    another()
    with saved.restored():
        thread = threading.Thread(target=another)
        thread.start()
        thread.join()
        assert torch.equal(stage(X), first)
    another()
    one, other = random.Random(1), np.random.RandomState(1)
    assert drawn == [n for _ in range(3) for n in (one.random(), other.random_sample())]


PLANNING, TRAINED, WAITS = threading.Event(), threading.Event(), threading.Event()
TRACING, CALLED, LASTS = threading.Event(), threading.Event(), threading.Event()


@torch.library.custom_op("remat_tests::met", mutates_args=())
def met(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@met.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    """Once it is asked to, the trace waits until the other thread has trained a step, or is about to."""
    if WAITS.is_set():
        PLANNING.set()
        assert TRAINED.wait(240)
    if LASTS.is_set() and is_fx_symbolic_tracing():
        LASTS.clear()
        TRACING.set()
        assert CALLED.wait(240)
        time.sleep(1)
    return torch.empty_like(x)


class Meeting(nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        y: torch.Tensor = self.layers(x) + met(x.detach())
        return y.square().mean()


@pytest.mark.thorough
def test_another_thread_trains_while_a_call_is_planned_ahead() -> None:
    """The raise that ends a planned call is of that thread's alone."""
    model = remat.enable(Meeting(), budget="100%", planner="greedy", on_failure="raise")
    known, new = numbers(4, 8), numbers(6, 8)
    model(known).backward()
    alone = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    raised: list[BaseException] = []

    def trains() -> None:
        try:
            assert PLANNING.wait(240)
            model(known).backward()
        except BaseException as error:
            raised.append(error)
        finally:
            TRAINED.set()

    other = threading.Thread(target=trains)
    other.start()
    WAITS.set()
    try:
        planned = remat.plans_of(model).plan_for((new,))
    finally:
        WAITS.clear()
        other.join()
    assert not raised
    assert planned is not None
    assert len(remat.plans_of(model).plans) == 2
    assert float(model.calls) == 2, "the planned call has not run"
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(map(torch.equal, found, alone))
    assert len(found) == len(alone) == 4


@pytest.mark.thorough
def test_steps_of_two_threads_are_traced_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two traces at once would leave torch.fx's own methods on all modules, and every later call would raise."""
    models = [remat.enable(Meeting(), budget="100%", planner="greedy", on_failure="raise") for _ in range(2)]
    export, together = tracing.aot_export_joint_with_descriptors, threading.Barrier(2)
    met: list[bool] = []
    raised: list[BaseException] = []

    def meeting(*args: Any, **kwargs: Any) -> Any:
        with suppress(threading.BrokenBarrierError):
            together.wait(10)
            met.append(True)
        return export(*args, **kwargs)

    def trains(model: nn.Module) -> None:
        try:
            model(numbers(4, 8)).backward()
        except BaseException as error:
            raised.append(error)

    monkeypatch.setattr(tracing, "aot_export_joint_with_descriptors", meeting)
    threads = [threading.Thread(target=trains, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not met
    assert not raised
    assert [len(remat.plans_of(model).plans) for model in models] == [1, 1]


@pytest.mark.thorough
def test_a_module_is_compiled_once_for_threads_that_call_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans of one of two compilations would be lost, and its call be taken for one without a plan."""
    model = remat.enable(Meeting(), budget="100%", planner="greedy", on_failure="raise")
    functions, together = carrier.logging_functions, threading.Barrier(2)
    times = 0

    def meeting(module: nn.Module) -> Any:
        nonlocal times
        times += 1
        with suppress(threading.BrokenBarrierError):
            together.wait(5)
        return functions(module)

    monkeypatch.setattr(carrier, "logging_functions", meeting)
    threads = [threading.Thread(target=lambda: model(numbers(4, 8)).backward()) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert times == 1
    assert remat.plans_of(model).calls == (2, 0)


@pytest.mark.thorough
def test_a_thread_trains_while_another_traces_a_step() -> None:
    """Its call waits: Dynamo would take the trace for one around it, and raise."""
    known, new = (remat.enable(Meeting(), budget="100%", planner="greedy", on_failure="raise") for _ in range(2))
    x = numbers(4, 8)
    known(x).backward()
    raised: list[BaseException] = []

    def trains() -> None:
        try:
            assert TRACING.wait(240)
            CALLED.set()
            known(x).backward()
        except BaseException as error:
            raised.append(error)

    other = threading.Thread(target=trains)
    other.start()
    LASTS.set()
    new(x).backward()
    other.join()
    assert not LASTS.is_set()
    assert not raised
    assert float(known.calls) == 2
    assert remat.plans_of(known).calls == (2, 0)


@pytest.mark.thorough
def test_hooks_of_all_modules_are_those_that_other_threads_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread works while AOTAutograd's export runs, which is otherwise a matter of luck."""
    removed = modules.register_module_forward_hook(lambda *_: None)
    added: list[Any] = []
    export = tracing.aot_export_joint_with_descriptors

    def other() -> None:
        added.append(modules.register_module_forward_hook(lambda *_: None))
        removed.remove()

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return export(*args, **kwargs)

    monkeypatch.setattr(tracing, "aot_export_joint_with_descriptors", meanwhile)
    try:
        remat.optimize(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.ones(4, 8), budget="100%", planner="greedy")
        there = set(modules._global_forward_hooks)
        assert (added[0].id in there, removed.id in there) == (True, False)
    finally:
        for handle in (*added, removed):
            modules._global_forward_hooks.pop(handle.id, None)


@pytest.mark.thorough
@pytest.mark.parametrize("ahead", [True, False])
def test_a_capture_that_hooks_end_is_made_again(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """Another thread removes a hook of all modules between Dynamo's trace and its guards, which look for it."""
    removed = [modules.register_module_forward_hook(lambda *_: None) for _ in range(2)]
    compiled, ended = Backend.__call__, 0

    def meanwhile(self: Backend, *args: Any) -> Any:
        nonlocal ended
        if removed:
            ended += 1
            thread = threading.Thread(target=removed.pop().remove)
            thread.start()
            thread.join()
        return compiled(self, *args)

    monkeypatch.setattr(Backend, "__call__", meanwhile)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.ones(4, 8)
    if ahead:
        remat.optimize(model, x, budget="100%", planner="greedy")
    else:
        remat.enable(model, budget="100%", planner="greedy")
    model(x).sum().backward()
    assert ended == 2
    assert len(remat.plans_of(model).plans) == 1
