"""`remat.optimize` from the caller's side: the same module, its own plan for each kind of call, or an error by name."""

from __future__ import annotations

import logging
import re
import threading
import time
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import remat
from client.small_models import Mlp, numbers
from remat._compat import FakeTensor, FakeTensorMode
from remat.errors import BudgetTooSmall, CaptureError
from remat.planning.budget import budget_bytes, bytes_of, readable
from remat.planning.coordinator import OneProcess
from remat.planning.greedy import greedy_answer
from remat.planning.options import DEFAULT, SolveOptions
from remat.planning.quick import Better
from remat.profiling import measure
from remat.profiling.optimizers import update_memory
from remat.training.module import Rematerialized
from remat.training.optimize import carry_out
from remat.training.step import training_step
from remat_ir import Answer, InvalidData, InvalidPlan, Plan, Problem, budget_at, graph_of, plain_plan, verify


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)])
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x)).square().mean()


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):  # type: ignore[no-untyped-def]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REMAT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        torch.manual_seed(0)
        return remat.optimize(Net(), (numbers(512, 64),), budget=remat.Fraction(0.7), planner="greedy")


def test_it_trains_like_the_original_inside_the_budget(trained) -> None:  # type: ignore[no-untyped-def]
    x = (numbers(512, 64),)
    original = trained.original
    state = {name: t.clone() for name, t in original.state_dict().items()}
    plain = measure.outcome(original, measure.forward_backward(original, x))
    original.load_state_dict(state)
    planned = measure.outcome(trained, measure.forward_backward(trained, x))
    assert measure.differences(plain, planned) == []
    original.load_state_dict(state)
    trained.zero_grad()
    peak = measure.peak_memory(measure.forward_backward(trained, x)).peak_bytes
    found = trained.plan_for(x)
    assert peak == pytest.approx(found.activation_bytes, rel=0.01)
    assert found.predicted_bytes <= found.answer.budget_bytes
    assert peak < 0.75 * measure.peak_memory(measure.forward_backward(original, x)).peak_bytes


def test_it_is_the_same_module_to_whoever_saves_moves_or_reads_it(trained) -> None:  # type: ignore[no-untyped-def]
    original = trained.original
    assert list(trained.state_dict()) == list(original.state_dict())
    assert [n for n, _ in trained.named_parameters()] == [n for n, _ in original.named_parameters()]
    assert trained.norm is original.norm
    trained.eval()
    assert not original.body[0].training
    trained.train()
    assert original.norm.training
    with torch.no_grad():
        assert torch.isfinite(trained(numbers(3, 64)))


def test_another_kind_of_call_gets_a_plan_of_its_own(trained, caplog) -> None:  # type: ignore[no-untyped-def]
    before = len(trained.plans)
    with caplog.at_level(logging.INFO, "remat"):
        found = trained.plan_for((numbers(256, 64),))
    assert found is not trained.plan_for((numbers(512, 64),))
    assert len(trained.plans) == before + 1
    assert "arguments" in caplog.text
    out = trained(numbers(256, 64))
    out.backward()


def test_explain_names_modules_bytes_and_what_is_computed_again(trained) -> None:  # type: ignore[no-untyped-def]
    text = remat.explain(trained)
    assert "body.0" in text
    assert "where the bytes go" in text
    assert "computed again" in text


def test_explain_plans_a_module_that_has_no_plan_yet() -> None:
    model, batch = Mlp(), (numbers(512, 32),)
    with pytest.raises(remat.RematError, match="a budget"):
        remat.explain(model)
    text = remat.explain(model, batch, budget=remat.Fraction(0.8), planner="greedy")
    assert "where the bytes go" in text
    assert "layers.0" in text


def test_a_smaller_call_may_use_the_bytes_of_a_larger_one() -> None:
    trained = remat.optimize(Mlp(), (numbers(512, 32),), budget=remat.Fraction(0.8), planner="greedy")
    trained(numbers(16, 32)).sum().backward()
    large, small = trained.plans.values()
    assert large is not None
    assert small is not None
    room = large.answer.budget_bytes - large.step.graph.fixed_bytes
    assert small.answer.budget_bytes - small.step.graph.fixed_bytes == room


def test_a_budget_below_the_least_says_what_would_do() -> None:
    with pytest.raises(BudgetTooSmall, match="bytes"):
        remat.optimize(Mlp(), (numbers(16, 32),), budget=remat.Fraction(0.01), planner="greedy")


@pytest.mark.parametrize("planner", ["greedy", "local"])
def test_the_least_budget_and_the_op_that_forces_it_are_named(planner: str) -> None:
    x = (numbers(64, 64),)
    with pytest.raises(BudgetTooSmall) as raised:
        remat.optimize(Mlp(64), x, budget=remat.Fraction(0.02), planner=planner, time_limit_s=10)
    answer = raised.value.answer
    assert answer.least_budget_bytes
    assert str(answer.least_budget_bytes) in str(raised.value)
    assert "gelu" in str(raised.value)
    fits = remat.optimize(Mlp(64), x, budget=answer.least_budget_bytes, planner=planner, time_limit_s=10)
    assert len(fits.plans) == 1


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y * 2 if y.sum().item() > 0 else y


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = Mlp(16), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) * self.calls


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Branching, "item"),
        (Counting, r"Python state .*: self \(at client.test_training.py, line \d+: self.calls \+= 1\)"),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(make, reason: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CaptureError, match=reason):
        remat.optimize(make(), (numbers(4, 16),), budget=remat.Fraction(0.5), planner="greedy")


def test_a_recurrent_network_is_refused_or_exact_but_never_silently_plain() -> None:
    module, x = Recurrent(), (numbers(4, 5, 16),)
    with pytest.raises(CaptureError):
        remat.optimize(module, x, budget=remat.Fraction(1), planner="greedy")


def test_on_failure_plain_runs_the_original_and_says_so(caplog) -> None:  # type: ignore[no-untyped-def]
    module = Branching()
    with caplog.at_level(logging.WARNING, "remat"):
        made = remat.optimize(
            module, (numbers(4, 16),), budget=remat.Fraction(0.5), planner="greedy", on_failure="plain"
        )
    assert "without a plan" in caplog.text
    made(numbers(4, 16)).sum().backward()
    assert module.inner.layers[0].weight.grad is not None


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(CaptureError, match="grad"):
        remat.optimize(Mlp(16).requires_grad_(False), (numbers(4, 16),), budget=remat.Fraction(0.5), planner="greedy")


def test_a_plan_of_another_graph_is_never_run(trained) -> None:  # type: ignore[no-untyped-def]
    found = trained.plan_for((numbers(512, 64),))
    other = plain_plan(graph_of([1] * 3, [1] * 3, [(), (0,), (1,)]))
    problem = Problem(found.step.graph, found.answer.budget_bytes)
    verdict = verify(problem, found.answer.plan)
    with pytest.raises(InvalidPlan):
        carry_out(found.step, problem, _answer(problem, other, verdict.cost_ns, verdict.peak_bytes))
    with pytest.raises(InvalidPlan, match="claimed"):
        carry_out(found.step, problem, _answer(problem, found.answer.plan, verdict.cost_ns - 1, verdict.peak_bytes))


def _answer(problem: Problem, plan: Plan, cost_ns: int, peak_bytes: int) -> Answer:
    from remat_ir import Status

    return Answer(Status.FEASIBLE, "auto", problem.budget_bytes, cost_ns=cost_ns, peak_bytes=peak_bytes, plan=plan)


@pytest.mark.parametrize(
    ("text", "size"), [("12GiB", 12 * 2**30), ("1.5 GB", 1_500_000_000), ("4096", 4096), (7, 7), ("3 kib", 3072)]
)
def test_sizes(text: str | int, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("wrong", ["12 GiBs", "many", "-1", -1, "", "1e9"])
def test_what_is_no_size(wrong: str | int) -> None:
    with pytest.raises(InvalidData, match="budget"):
        bytes_of(wrong)


def test_budgets_count_the_fixed_bytes_once() -> None:
    graph = graph_of([1, 1], [100, 50], [(), (0,)], fixed_bytes=1000)
    assert budget_bytes("2000", graph) == 2000
    assert budget_bytes(2000, graph, slack=1.25) == 1600
    assert budget_bytes(remat.ActivationBytes(80), graph) == 1080
    assert budget_bytes(remat.Fraction(0.5), graph) == 1075
    assert readable(3 * 2**20) == "3.0 MiB"
    for wrong in (2.5, None, True, ["1GiB"]):
        with pytest.raises(InvalidData):
            budget_bytes(wrong, graph)  # type: ignore[arg-type]
    for fraction in (-0.1, 1.5, "half"):
        with pytest.raises(InvalidData):
            remat.Fraction(fraction)  # type: ignore[arg-type]


def test_optimizer_state_is_counted_before_it_exists() -> None:
    module = Mlp(16)
    size = sum(p.numel() * 4 for p in module.parameters())
    adam = torch.optim.AdamW(module.parameters())
    counters = 4 * len(list(module.parameters()))
    assert update_memory(adam).throughout_bytes == 2 * size + counters
    assert update_memory(torch.optim.SGD(module.parameters(), lr=0.1)).throughout_bytes == 0
    assert update_memory(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)).throughout_bytes == size
    module(numbers(2, 16)).sum().backward()
    adam.step()
    assert 2 * size <= update_memory(adam).throughout_bytes <= 2 * size + 64
    assert update_memory(None).throughout_bytes == 0


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *[(kind, {}) for kind in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop")],
        ("Adam", {"amsgrad": True}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("SGD", {"momentum": 0.9, "lr": 0.1}),
    ],
)
def test_the_state_that_the_first_step_makes_is_foreseen(kind: str, settings: dict[str, float]) -> None:
    module = Mlp(64)
    optimizer = getattr(torch.optim, kind)(module.parameters(), **settings)
    foreseen = update_memory(optimizer).throughout_bytes
    module(numbers(2, 64)).sum().backward()
    optimizer.step()
    made = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t))
    counters = 16 * len(list(module.parameters()))
    assert foreseen <= made <= foreseen + counters


def test_explain_says_what_is_fixed() -> None:
    module = Mlp(64)
    optimizer = torch.optim.AdamW(module.parameters())
    trained = remat.optimize(
        module, (numbers(64, 64),), budget=remat.Fraction(1), planner="greedy", optimizer=optimizer
    )
    (planned,) = trained.plans.values()
    assert planned is not None
    size = sum(p.numel() * 4 for p in module.parameters())
    counters = 4 * len(list(module.parameters()))
    expected = {"parameters": size, "inputs": 64 * 64 * 4, "optimizer state": 2 * size + counters}
    assert {name: n for name, n in planned.step.fixed.items() if n} == expected
    assert sum(expected.values()) == planned.step.graph.fixed_bytes
    for name, amount in (("parameters", "48.8 KiB"), ("inputs", "16.0 KiB"), ("optimizer state", "97.5 KiB")):
        assert re.search(rf"^{name} +{amount}", remat.explain(trained), re.MULTILINE)


def test_a_model_that_is_never_allocated_is_captured_profiled_and_planned() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(256, 1024), nn.Linear(1024, 256), nn.LayerNorm(256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    class Tall(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    with FakeTensorMode(allow_non_fake_inputs=True):
        module, x = Tall(), torch.randn(2048, 256)
    assert all(isinstance(p, FakeTensor) for p in module.parameters())
    step = training_step(module, (x,), {})
    assert step.graph.fixed_bytes == sum(p.numel() * 4 for p in module.parameters()) + 2048 * 256 * 4
    assert step.profiled.signatures < step.graph.ops
    answer = greedy_answer(Problem(step.graph, budget_at(step.graph, 0.6)), time_limit_s=10, max_gap=0.01)
    assert isinstance(answer.plan, Plan)


class Slow:
    """A planner that has its answer when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def plan(self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: object = None) -> Answer:
        assert self.go.wait(60)
        plan = plain_plan(problem.graph)
        verdict = verify(Problem(problem.graph, 2**50), plan)
        return _answer(problem, plan, verdict.cost_ns, verdict.peak_bytes)


def test_a_better_plan_takes_over_between_steps() -> None:
    torch.manual_seed(0)
    x, planner = (numbers(512, 64),), Slow()
    module = Net()
    step = training_step(module, x, {})
    problem = Problem(step.graph, budget_at(step.graph, 0.7))
    quick = greedy_answer(problem, time_limit_s=10, max_gap=0.01)
    whole = Problem(step.graph, budget_at(step.graph, 1))
    coming = OneProcess().later(whole, lambda: planner.plan(whole))
    better = Better(coming, OneProcess(), lambda _: True, lambda answer: carry_out(step, whole, answer))
    found = replace(carry_out(step, problem, quick), better=better)
    trained = Rematerialized(module, lambda call, known: found)
    assert trained.plan_for(x) is found
    loss = trained(*x)
    planner.go.set()
    assert better.wait(60) is not None
    loss.backward()
    later = trained.plan_for(x)
    assert later is not None
    assert later is not found
    assert later.answer.cost_ns < found.answer.cost_ns
    trained.zero_grad()
    trained(*x).backward()
    assert all(p.grad is not None for p in trained.parameters())


def test_the_plan_used_least_lately_goes_first() -> None:
    """With room for two kinds of calls, the third takes the place of the one that was not used since."""
    trained = remat.optimize(Mlp(8), (numbers(2, 8),), budget=remat.Fraction(1), planner="greedy", most_plans=2)
    first, second = trained.plan_for((numbers(2, 8),)), trained.plan_for((numbers(3, 8),))
    assert trained.plan_for((numbers(2, 8),)) is first
    trained.plan_for((numbers(4, 8),))
    assert len(trained.plans) == 2
    assert trained.plan_for((numbers(2, 8),)) is first
    assert trained.plan_for((numbers(3, 8),)) is not second


def test_side_effects_are_seen_whoever_restores_the_state_of_warnings_meanwhile() -> None:
    """A suspended `catch_warnings` may end at any moment, in a thread or by the garbage collector."""
    over = threading.Event()

    def restore() -> None:
        while not over.is_set():
            with warnings.catch_warnings():
                time.sleep(0.001)

    others = threading.Thread(target=restore)
    others.start()
    try:
        for _ in range(3):
            with pytest.raises(CaptureError, match="Python state"):
                remat.optimize(Counting(), (torch.randn(4, 16),), budget=remat.Fraction(1), planner="greedy")
    finally:
        over.set()
        others.join()
