"""One budget for a step of several graphs or calls: divided by what is outstanding, and held."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from client.comparing import equal, gradients
from drawn import examples
from remat.compile.sized import Backend
from remat.planning import division
from remat.planning.division import Option, Row, divide, least_bytes, peak_by
from remat.profiling.measure import peak_memory
from tiers import first

pytestmark = pytest.mark.usefixtures("anew")


def stretch(layers: int, width: int = 64) -> nn.Sequential:
    kinds = ((nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width)),)
    return nn.Sequential(*(copy.deepcopy(part) for _ in range(layers) for part in kinds[0]))


class Broken(nn.Module):
    """A forward that Dynamo cuts into three graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(stretch(n, 128) for n in (2, 3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[0](x)
        torch._dynamo.graph_break()
        x = self.parts[1](x).tanh()
        torch._dynamo.graph_break()
        return self.parts[2](x).square().mean()


class Residual(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(stretch(1) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


Loop = Callable[[Any, Any, torch.Tensor], None]


def dcgan(g: Any, d: Any, x: torch.Tensor) -> None:
    d(x).square().mean().backward()
    fake = g(x)
    d(fake.detach()).square().mean().backward()
    d(fake).square().mean().backward()


def gradient_midway(g: Any, d: Any, x: torch.Tensor) -> None:
    h = g(x)
    (gradient,) = torch.autograd.grad(h.square().mean(), next(g.parameters()), retain_graph=True)
    d(h * (1 + gradient.norm())).square().mean().backward()


def retained(g: Any, d: Any, x: torch.Tensor) -> None:
    h = g(x)
    loss = h.square().mean()
    loss.backward(retain_graph=True)
    (loss + d(h).square().mean()).backward()


def in_flight(g: Any, d: Any, x: torch.Tensor) -> None:
    losses = [d(g(x)).square().mean()]
    for _ in range(3):
        losses.append(d(g(x)).square().mean())
        losses.pop(0).backward()
    losses.pop().backward()


def cleared(*modules: nn.Module) -> None:
    for module in modules:
        for p in module.parameters():
            p.grad = torch.zeros_like(p)


def backend(budget: Any, **options: Any) -> Backend:
    found = remat.backend(budget, planner="greedy", **options)
    assert isinstance(found, Backend)
    return found


@pytest.mark.parametrize("share", first(1, ["60%", "55%", "75%"]))
def test_the_peak_of_a_broken_forward_is_the_predicted_one(share: str) -> None:
    """To the byte, within a share of the whole step; gradients are those of eager, before and after."""
    model, x = Broken(), torch.randn(256, 128)
    plain, behind = copy.deepcopy(model), backend(share)
    run = torch.compile(model, backend=behind)

    def step(call: Any) -> torch.Tensor:
        loss = call(x)
        loss.backward()
        return loss.detach()

    expected = step(plain)
    for _ in range(4):
        model.zero_grad()
        assert torch.equal(step(run), expected)
        assert equal(gradients(model), gradients(plain))
    found = behind.division
    assert (found.calls, len(behind.answers)) == (3, 3)
    assert found.overhead > 0
    model.zero_grad(), plain.zero_grad()
    whole = peak_memory(lambda: step(plain)).peak_bytes
    measured = peak_memory(lambda: step(run)).peak_bytes
    assert measured == found.predicted_bytes <= found.allowed_bytes
    assert found.allowed_bytes == pytest.approx(float(share[:-1]) / 100 * whole, rel=0.001)


def test_gradients_released_in_a_forward_that_breaks_share_the_budget() -> None:
    """Each graph steps its own parameters in its backward pass; the parameters are those of the plain loop."""
    model, x = Broken(), torch.randn(256, 128)
    plain = copy.deepcopy(model)
    steps = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
    remat.enable(model, budget="60%", planner="greedy", optimizer=steps[1], release_gradients=True)

    def train(each: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        each(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        train(plain, steps[0])
        train(model, steps[1])
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
    found = model.forward.backend.division
    assert (found.calls, found.overhead > 0) == (3, True)
    measured = peak_memory(lambda: model(x).backward()).peak_bytes
    assert 0.98 * found.predicted_bytes <= measured <= found.predicted_bytes


def is_recorded() -> bool:
    """Whether a profiler is at work in this thread."""
    return bool(torch.autograd._profiler_enabled())


def test_no_recording_goes_on_through_evaluation_or_after_the_last_step() -> None:
    """It would note all that runs, where a profiler of the caller's may begin; the budget is divided all the same."""
    peak_memory(lambda: None)  # ends what another test may have left on
    model, x = Broken(), torch.randn(256, 128)
    remat.enable(model, budget="60%", planner="greedy")
    for _ in range(5):
        model.zero_grad()
        model(x).backward()
        with torch.no_grad():
            model(x)
        assert not is_recorded()
    division = model.forward.backend.division
    assert (division.calls, division.overhead > 0) == (3, True)
    for batch in (torch.randn(32, 128), x, x, torch.randn(32, 128)):  # of a new size: a step is watched again
        model(batch).backward()
    assert is_recorded()
    remat.disable(model)
    assert not is_recorded()


@pytest.mark.thorough
def test_a_step_with_a_call_without_gradients_is_watched_to_its_end() -> None:
    """Its first call has an input that was computed: of two steps in a row the first does not count."""
    before, x, behind = nn.Linear(64, 64), torch.randn(64, 64), backend("100%")
    runs = [torch.compile(stretch(1), backend=behind, dynamic=False) for _ in range(2)]
    for _ in range(16):
        with torch.no_grad():
            runs[0](x)
        runs[1](runs[0](before(x))).square().mean().backward()
    assert behind.division is not None


@pytest.mark.thorough
@pytest.mark.parametrize("loop", [dcgan, gradient_midway, retained, in_flight])
def test_a_loop_with_several_calls_outstanding_stays_inside_the_budget(loop: Loop) -> None:
    """Where each call by itself would take the whole of it."""
    g, d, x = Residual(), Residual(), torch.randn(1024, 64)
    plain = copy.deepcopy((g, d))
    cleared(g, d, *plain)
    loop(*plain, x)
    expected = gradients(*plain)
    cleared(*plain)
    budget = int(0.6 * peak_memory(lambda: loop(*plain, x)).peak_bytes)
    behind = backend(remat.ActivationBytes(budget))
    run = [torch.compile(each, backend=behind, dynamic=False) for each in (g, d)]
    for _ in range(6):
        cleared(g, d)
        loop(*run, x)  # type: ignore[call-arg]
        assert equal(gradients(g, d), expected)
    cleared(g, d)
    assert peak_memory(lambda: loop(*run, x)).peak_bytes <= budget  # type: ignore[call-arg]
    assert behind.division.overhead > 0


@pytest.mark.thorough
def test_one_call_a_step_has_the_whole_budget_and_is_not_watched() -> None:
    model, behind = Residual(), backend("80%")
    run = torch.compile(model, backend=behind)
    for _ in range(3):
        run(torch.randn(256, 64)).square().mean().backward()
    assert not behind.shared.several
    assert behind.division is None
    assert behind.answers[0].overhead


class Skipping(nn.Module):
    """Returns a view of its input, behind which there is a call of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x).tanh(), x.view(16, 4, 64)


@pytest.mark.thorough
def test_a_view_of_an_input_does_not_take_the_call_before_for_this_one() -> None:
    """With the last loss at hand, as in a usual loop: neither module has more than one call in a step."""
    behind = [backend("100%"), backend("100%")]
    runs = [torch.compile(make(), backend=own) for make, own in zip((Residual, Skipping), behind, strict=True)]
    for _ in range(3):
        y, skipped = runs[1](runs[0](torch.randn(64, 64)))
        loss = y.square().sum() + skipped.square().sum()
        loss.backward()
        assert [own.shared.calls.outstanding() for own in behind] == [(), ()]
    assert loss.grad_fn is not None
    assert not any(own.shared.several for own in behind)


@pytest.mark.thorough
def test_evaluation_with_gradients_and_an_exception_leave_the_budget_held() -> None:
    """Losses that nobody backpropagates end with their nodes; a forward that fails is gone with its exception."""
    model, x = Broken(), torch.randn(256, 128)
    plain, behind = copy.deepcopy(model), backend("60%")
    run = torch.compile(model, backend=behind)

    def step(call: Any) -> None:
        call(x).backward()

    def failing() -> None:
        loss = run(x)
        raise ArithmeticError(loss.item())

    step(plain)
    for _ in range(3):
        step(run)
    for _ in range(5):
        loss = run(x)
        loss.item()
    del loss
    with pytest.raises(ArithmeticError):
        failing()
    assert behind.shared.calls.outstanding() == ()
    for _ in range(6):
        model.zero_grad()
        step(run)
    assert equal(gradients(model), gradients(plain))
    model.zero_grad()
    found = behind.division
    assert peak_memory(lambda: step(run)).peak_bytes <= found.allowed_bytes


@pytest.mark.thorough
def test_two_models_in_one_thread_and_one_in_two_threads() -> None:
    models, x = [Broken(), Broken()], torch.randn(64, 128)
    plain = copy.deepcopy(models)
    runs = [torch.compile(model, backend=backend("75%"), dynamic=False) for model in models]
    for _ in range(4):
        losses = [run(x) for run in runs]
        for loss in losses:
            loss.backward()
    expected = [each(x) for each in plain]
    for loss in expected:
        loss.backward()
    for model, other in zip(models, plain, strict=True):
        assert equal([g / 4 for g in gradients(model)], gradients(other))

    def work(_: int) -> list[Any]:
        return [torch.autograd.grad(runs[0](x), list(models[0].parameters())) for _ in range(4)]

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(work, range(2)):
            assert all(equal(each, gradients(plain[0])) for each in found)


@pytest.mark.thorough
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("checkpointed", [2, 3])
def test_a_users_checkpoint_around_planned_blocks(reentrant: bool, checkpointed: int) -> None:
    """Blocks inside and outside of it, with dropout: what runs twice runs by one plan."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(stretch(1), nn.Dropout(0.1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x)

    blocks = nn.ModuleList(Block() for _ in range(3))
    plain, behind = copy.deepcopy(blocks), backend(remat.ActivationBytes("600KiB"))
    for block in blocks:
        block.compile(backend=behind, dynamic=False)

    def step(model: nn.ModuleList, seed: int) -> None:
        torch.manual_seed(seed)
        x = torch.randn(64, 64).requires_grad_()
        for n, block in enumerate(model):
            x = checkpoint(block, x, use_reentrant=reentrant) if n < checkpointed else block(x)
        x.square().mean().backward()

    for seed in range(5):
        blocks.zero_grad(), plain.zero_grad()
        step(blocks, seed)
        step(plain, seed)
        assert equal(gradients(blocks), gradients(plain))


def test_a_share_that_is_too_small_for_one_block_may_be_enough_for_all() -> None:
    """A share is one of the step: the first block alone is no reason to refuse it."""
    blocks = nn.Sequential(*(stretch(1) for _ in range(3)))
    x, behind = torch.randn(256, 64), backend("60%")
    plain = copy.deepcopy(blocks)
    with pytest.raises(remat.BudgetTooSmall):
        remat.optimize(copy.deepcopy(plain[0]), x, budget="60%", planner="greedy", mode="graph")
    run = [torch.compile(block, backend=behind) for block in blocks]
    for _ in range(4):
        blocks.zero_grad(), plain.zero_grad()
        run[2](run[1](run[0](x))).square().mean().backward()
        plain(x).square().mean().backward()
        assert equal(gradients(blocks), gradients(plain))
    assert behind.division.calls == 3


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("5%", r"are fixed: a share of [0-9.]+%"),
        (remat.ActivationBytes("1KiB"), r"3 calls of a step fits .*; [0-9.]+ [KMG]?i?B is enough"),
    ],
)
def test_a_budget_that_no_choice_fits_is_refused_with_one_that_is_enough(budget: Any, said: str) -> None:
    run, x = torch.compile(Broken(), backend=backend(budget)), torch.randn(256, 128)
    for _ in range(2):  # the second is watched
        run(x).backward()
    with pytest.raises(remat.BudgetTooSmall, match=said):
        run(x)


NUMBERS = st.integers(0, 50)
OPTION = st.builds(Option, NUMBERS, NUMBERS, NUMBERS, st.integers(1, 50))


@st.composite
def moments(draw: st.DrawFn) -> tuple[list[Row], dict[division.Stack, list[Option]]]:
    """Some calls, in any order, nested or not."""
    calls = [(n,) for n in range(draw(st.integers(1, 3)))]
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        held = draw(st.lists(st.sampled_from(calls), max_size=3))
        call = draw(st.sampled_from([None, *calls]))
        kind: Any = "between" if call is None else draw(st.sampled_from(["forward", "backward"]))
        rows.append(Row(kind, call, tuple(held), draw(st.integers(-20, 50))))
    return rows, {call: draw(st.lists(OPTION, min_size=1, max_size=3)) for call in calls}


def cost(options: dict[division.Stack, list[Option]], chosen: dict[division.Stack, int], rows: list[Row]) -> int:
    runs = {call: max(1, sum(r.call == call and r.kind == "forward" for r in rows)) for call in options}
    return sum(options[call][i].cost_ns * runs[call] for call, i in chosen.items())


@settings(max_examples=examples(150), deadline=None)
@given(moments(), st.integers(0, 200))
def test_a_division_is_the_best_of_all(made: tuple[list[Row], dict[division.Stack, list[Option]]], budget: int) -> None:
    """Of HiGHS' to within its gap; without it, one that fits."""
    rows, options = made
    picks = itertools.product(*(range(len(ways)) for ways in options.values()))
    ways = [dict(zip(options, pick, strict=True)) for pick in picks]
    fit = [w for w in ways if peak_by(rows, {c: options[c][i] for c, i in w.items()}) <= budget]
    found = divide(rows, options, budget)
    assert (found is not None) == bool(fit)
    if found is not None:
        assert found in fit
        assert cost(options, found, rows) <= 1.002 * min(cost(options, way, rows) for way in fit)
    weights = dict.fromkeys(options, 1)
    without = division._greedy(rows, options, weights, budget)
    assert without is None or without in fit
    assert divide(rows, options, least_bytes(rows, options)) is not None


def test_nested_passes_are_divided_exactly_without_a_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the dynamic program, with what HiGHS finds."""
    stacks: list[division.Stack] = [(1,), (1, 2), (1, 2, 3)]
    rows = [Row("forward", s, tuple(stacks[:n]), 3 * n) for n, s in enumerate(stacks)]
    rows += [Row("backward", s, tuple(stacks[:n]), 7) for n, s in enumerate(stacks)]
    rows += [Row("between", None, tuple(stacks[: n + 1]), 2) for n in range(3)]
    ways = [Option(10, 30, 40, 100), Option(25, 30, 35, 70), Option(60, 60, 60, 50)]
    options = dict.fromkeys(stacks, ways)
    found = {budget: divide(rows, options, budget) for budget in range(50, 260, 15)}
    assert any(each is None for each in found.values())

    def absent(*_: Any) -> Any:
        raise ImportError

    monkeypatch.setattr(division, "_solved", absent)
    for budget, best in found.items():
        other = divide(rows, options, budget)
        assert (other is None) == (best is None)
        if other is not None and best is not None:
            assert cost(options, other, rows) == cost(options, best, rows)
            assert peak_by(rows, {c: options[c][i] for c, i in other.items()}) <= budget
