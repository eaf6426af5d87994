"""`remat.optimize` from the caller's side: the same module, its own plan for each kind of call, or an error by name."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

import remat
from client.comparing import step_differences
from client.small_models import FeedForward, Mlp, numbers
from client.test_chain_training import MeanSquare
from remat._compat import FakeTensor, FakeTensorMode
from remat.errors import BudgetTooSmall
from remat.planning.budget import budget_bytes, bytes_of
from remat.planning.greedy import greedy_answer
from remat.profiling import measure
from remat.profiling.optimizers import update_memory
from remat.training.optimize import carry_out
from remat.training.step import training_step
from remat_ir import Answer, InvalidPlan, Plan, Problem, budget_at, graph_of, plain_plan, readable, verify
from tiers import first

pytestmark = pytest.mark.usefixtures("fresh_cache")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)])
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x)).square().mean()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):  # type: ignore[no-untyped-def]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REMAT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        torch.manual_seed(0)
        return remat.optimize(Net(), (numbers(512, 64),), budget=remat.Fraction(0.7), planner="greedy")


def test_it_trains_like_the_original_inside_the_budget(trained) -> None:  # type: ignore[no-untyped-def]
    x = (numbers(512, 64),)
    original = remat.disable(copy.deepcopy(trained))
    state = {name: t.clone() for name, t in original.state_dict().items()}
    assert step_differences(original, trained, x) == []
    trained.load_state_dict(state)
    trained.zero_grad()
    peak = measure.peak_memory(measure.forward_backward(trained, x)).peak_bytes
    found = remat.plans_of(trained).plan_for(x)
    assert peak == pytest.approx(found.activation_bytes, rel=0.01)
    assert found.predicted_bytes <= found.answer.budget_bytes
    assert peak < 0.75 * measure.peak_memory(measure.forward_backward(original, x)).peak_bytes


def test_it_is_the_same_module() -> None:
    model = Net()
    assert remat.optimize(model, (numbers(8, 64),), budget="100%", planner="greedy") is model
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in Net().named_parameters()]
    with torch.no_grad():
        assert torch.isfinite(model(numbers(3, 64)))
    with pytest.raises(RuntimeError, match="enabled on this Net already"):
        remat.optimize(model, (numbers(8, 64),), budget="100%", planner="greedy")
    assert "forward" not in vars(remat.disable(model))


def test_explain_names_modules_bytes_and_what_is_computed_again(trained) -> None:  # type: ignore[no-untyped-def]
    text = remat.explain(trained)
    assert "body.0" in text
    assert "where the bytes go" in text
    assert "computed again" in text


def test_a_smaller_call_may_use_the_bytes_of_a_larger_one() -> None:
    trained = remat.optimize(Mlp(), (numbers(512, 32),), budget=remat.Fraction(0.8), planner="greedy")
    trained(numbers(16, 32)).sum().backward()
    large, small = remat.plans_of(trained).plans
    room = large.answer.budget_bytes - large.step.graph.fixed_bytes
    assert small.answer.budget_bytes - small.step.graph.fixed_bytes == room


@pytest.mark.parametrize("planner", first(1, ["greedy", "local"]))
def test_the_least_budget_and_the_op_that_forces_it_are_named(planner: str) -> None:
    x = (numbers(64, 64),)
    with pytest.raises(BudgetTooSmall) as raised:
        remat.optimize(Mlp(64), x, budget=remat.Fraction(0.02), planner=planner, time_limit_s=10)
    answer = raised.value.answer
    assert answer.least_budget_bytes
    assert f"{readable(answer.least_budget_bytes, up=True)} is enough" in str(raised.value)
    assert "gelu" in str(raised.value)
    fits = remat.optimize(Mlp(64), x, budget=answer.least_budget_bytes, planner=planner, time_limit_s=10)
    assert len(remat.plans_of(fits).plans) == 1


def test_nothing_to_train_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = Mlp(16).requires_grad_(False)
    remat.optimize(model, (numbers(4, 16),), budget=remat.Fraction(0.5), planner="greedy")
    assert "nothing of this Mlp is planned" in caplog.text
    assert not model(numbers(4, 16)).requires_grad


def test_a_plan_of_another_graph_is_never_run(trained) -> None:  # type: ignore[no-untyped-def]
    found = remat.plans_of(trained).plan_for((numbers(512, 64),))
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
    ("text", "size"),
    [("12GiB", 12 * 2**30), ("1.5 GB", 1_500_000_000), ("4096", 4096), (7, 7), ("3 kib", 3072), ("1e3 MB", 10**9)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert bytes_of(text) == size


def test_budgets_count_the_fixed_bytes_once() -> None:
    graph = graph_of([1, 1], [100, 50], [(), (0,)], fixed_bytes=1000)
    assert budget_bytes("2000", graph) == 2000
    assert budget_bytes(2000, graph, slack=1.25) == 1600
    assert budget_bytes(remat.ActivationBytes(80), graph) == 1080
    assert budget_bytes(remat.Fraction(0.5), graph) == 1075
    assert readable(3 * 2**20) == "3 MiB"


@pytest.mark.parametrize(
    ("kind", "settings"),
    first(
        5,
        [
            ("SGD", {"lr": 0.1}),
            ("Adam", {"amsgrad": True}),
            ("RMSprop", {"momentum": 0.9, "centered": True}),
            ("SGD", {"momentum": 0.9, "lr": 0.1}),
            *[
                (kind, {})
                for kind in ("AdamW", "Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop")
            ],
        ],
    ),
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
    assert foreseen <= update_memory(optimizer).throughout_bytes <= foreseen + counters, "once it is there"


def test_explain_says_what_is_fixed() -> None:
    module = Mlp(64)
    optimizer = torch.optim.AdamW(module.parameters())
    trained = remat.optimize(
        module, (numbers(64, 64),), budget=remat.Fraction(1), planner="greedy", optimizer=optimizer
    )
    (planned,) = remat.plans_of(trained).plans
    size = sum(p.numel() * 4 for p in module.parameters())
    counters = 4 * len(list(module.parameters()))
    expected = {"parameters": size, "inputs": 64 * 64 * 4, "optimizer state": 2 * size + counters}
    assert {name: n for name, n in planned.step.fixed.items() if n} == expected
    assert sum(expected.values()) == planned.step.graph.fixed_bytes
    for name, amount in (("parameters", "48.8 KiB"), ("inputs", "16 KiB"), ("optimizer state", "97.5 KiB")):
        assert re.search(rf"^{name} +{amount}", remat.explain(trained), re.MULTILINE)


def test_a_model_that_is_never_allocated_is_captured_profiled_and_planned() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = nn.Sequential(*(FeedForward(256) for _ in range(5)), MeanSquare())
        x = torch.randn(2048, 256)
    assert all(isinstance(p, FakeTensor) for p in module.parameters())
    step = training_step(module, (x,), {})
    assert step.graph.fixed_bytes == sum(p.numel() * 4 for p in module.parameters()) + 2048 * 256 * 4
    assert step.profiled.signatures < step.graph.ops
    answer = greedy_answer(Problem(step.graph, budget_at(step.graph, 0.6)), time_limit_s=10, max_gap=0.01)
    assert isinstance(answer.plan, Plan)


def test_the_plan_used_least_lately_goes_first() -> None:
    """With room for two kinds of calls, the third takes the place of the one that was not used since."""
    trained = remat.optimize(Mlp(8), (numbers(2, 8),), budget=remat.Fraction(1), planner="greedy", most_plans=2)
    plans = remat.plans_of(trained)
    first, second = (plans.plan_for((numbers(rows, 8),)) for rows in (2, 3))
    assert plans.plan_for((numbers(2, 8),)) is first
    plans.plan_for((numbers(4, 8),))
    assert len(plans.plans) == 2
    assert plans.plan_for((numbers(2, 8),)) is first
    assert plans.plan_for((numbers(3, 8),)) is not second
