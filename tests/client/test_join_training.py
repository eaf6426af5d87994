"""Branches that meet in a head train by plans of their graph, and of joins, exactly as without a plan."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import remat
from client.comparing import equal
from client.small_models import Joined, module_of, numbers
from client.test_chain_training import Branching, outcome
from drawn import examples
from remat.chains.modules import JoinedModule
from remat.chains.profile import ProfiledJoin, StageCost, join_of
from remat.chains.stages import Stage
from remat.chains.training import branches_by, carry_out_join, homogenized
from remat.errors import CaptureError
from remat.planning.options import SolveOptions
from remat.planning.sources import LocalPlanner
from remat.profiling import measure
from remat_ir import Join, Problem, join_in_bytes, plain_plan, verify
from remat_solver.join.table import JoinTable

pytestmark = pytest.mark.usefixtures("fresh_cache")

Branches = list[list[nn.Module]]


class Distance(nn.Module):
    """The loss of embeddings that should lie close, or of an anchor that should lie closer to the second."""

    def forward(self, first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        parts = [(first - other).square().mean((1, 2, 3)) for other in others]
        return parts[0].mean() if len(parts) == 1 else (1.0 + parts[0] - parts[1]).relu().mean()


def block(width: int = 8) -> nn.Module:
    """A stage whose backward step reads what it gives, as a graph's backward ops are taken to do."""
    return nn.Sequential(nn.Conv2d(8, width, 3, padding=1), nn.BatchNorm2d(width), nn.Dropout(0.1), nn.ReLU())


def siamese(branches: int) -> tuple[Branches, nn.Module]:
    """The same modules in every branch."""
    torch.manual_seed(0)
    tower = [block() for _ in range(5)]
    return [tower] * branches, Distance()


def unequal(branches: int) -> tuple[Branches, nn.Module]:
    """Branches of their own weights and different lengths, a module shared at their ends."""
    torch.manual_seed(0)
    last = block()
    return [[*(block() for _ in range(3 + 2 * j)), last] for j in range(branches)], Distance()


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(8, width, 3, padding=1), nn.GELU(), nn.Conv2d(width, 8, 1), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def heterogeneous(branches: int) -> tuple[Branches, nn.Module]:
    torch.manual_seed(0)
    return [[block(), Wide(24), Wide(8)], [Wide(12), Wide(4), block(), Wide(20)]][:branches], Distance()


CASES: dict[str, tuple[Callable[[int], tuple[Branches, nn.Module]], int]] = {
    "siamese of two": (siamese, 2),
    "siamese of three": (siamese, 3),
    "unequal lengths": (unequal, 2),
    "three unequal lengths": (unequal, 3),
    "heterogeneous": (heterogeneous, 2),
}


def inputs(branches: int) -> list[torch.Tensor]:
    return [numbers(16, 8, 32, 32) * (j + 1) for j in range(branches)]


def check(planned: JoinedModule, reference: Joined, xs: list[torch.Tensor]) -> None:
    """The same loss, gradients, buffers, random state and number of hook calls, in a first and in a second step."""
    found = []
    for module in (reference, planned):
        for x in xs:
            x.grad = None
        made, hooks = outcome(module, lambda _, module=module: module(*xs), xs[0])
        found.append((made, hooks, [x.grad for x in xs]))
    (one, one_hooks, one_inputs), (other, other_hooks, other_inputs) = found
    assert measure.differences(one, other) == []
    assert one_hooks == other_hooks
    assert equal(one_inputs, other_inputs)


QUICK = {("siamese of two", "join"), ("siamese of three", "join"), ("heterogeneous", "auto")}
RUNS = [
    pytest.param(name, method, marks=() if (name, method) in QUICK else pytest.mark.slow)
    for name in sorted(CASES)
    for method in ("join", "greedy", "auto")
]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "method"), RUNS)
def test_branches_train_exactly_within_the_budget(name: str, method: str) -> None:
    make, branches = CASES[name]
    whole, xs = Joined(*make(branches)), inputs(branches)
    reference = copy.deepcopy(whole)
    lists = [list(branch) for branch in whole.branches]
    planned = remat.optimize_chain(
        lists, xs, head=whole.head, budget=remat.Fraction(0.6), planner="local", method=method, time_limit_s=1
    )
    assert planned.answer.cost_ns > planned.graph.total_cost_ns
    check(planned, reference, xs)
    measured = measure.peak_memory(lambda: planned(*xs).backward()).peak_bytes
    predicted = (planned.answer.peak_bytes or 0) - planned.graph.fixed_bytes
    assert 0.99 * predicted <= measured <= predicted


def test_the_plain_plan_and_inputs_with_gradients() -> None:
    """Also a recurrent stage with Python that depends on data, which runs with grad always."""
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    towers: Branches = [[Branching(), shared, Branching()] for _ in range(2)]
    xs = [numbers(3, 4, 16, requires_grad=True) + j for j in range(2)]
    xs = [x.detach().requires_grad_() for x in xs]

    head = module_of(lambda self, a, b: (a * b).square().mean())
    for order in ([1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 0]):
        reference, fresh = (copy.deepcopy(Joined(towers, head)) for _ in range(2))
        lists = [list(branch) for branch in fresh.branches]
        profiled = join_of(lists, fresh.head, xs)
        problem = Problem(profiled.graph(order), 2**50)
        answer = LocalPlanner().plan(problem, SolveOptions(method="checkpoint-all"))
        planned = carry_out_join(lists, fresh.head, profiled, order, problem, answer)
        check(planned, reference, xs)
        with torch.no_grad():
            assert torch.isfinite(planned(*xs))


@pytest.mark.thorough
def test_the_graph_of_branches_has_a_plain_plan_in_every_order() -> None:
    branches, head = unequal(2)
    profiled = join_of(branches, head, inputs(2))
    for order in ([1] * 6 + [0] * 4, [0, 1] * 4 + [1, 1]):
        graph = profiled.graph(order)
        verify(Problem(graph, 2**50), plain_plan(graph))


def test_what_is_no_join_is_refused() -> None:
    for branches in ([], [[nn.Identity()]], [[nn.Identity()], []]):
        with pytest.raises(CaptureError, match="two or more branches"):
            remat.optimize_chain(branches, inputs(len(branches)), head=Distance(), budget=remat.Fraction(0.5))
    branches, head = siamese(2)
    with pytest.raises(remat.BudgetTooSmall):
        remat.optimize_chain(branches, inputs(2), head=head, budget=remat.Fraction(0.01), planner="local")


def measured(lengths: list[int]) -> ProfiledJoin:
    """Equal stages, whose tapes take no more than what they give."""
    stages: list[Stage] = []
    ends: list[int] = []
    for branch, length in enumerate(lengths):
        cut = branch
        for _ in range(length):
            stages.append(Stage(nn.Identity(), (cut,), len(lengths) + len(stages)))
            cut = stages[-1].makes
        ends.append(cut)
    stages.append(Stage(nn.Identity(), tuple(ends), len(lengths) + len(stages)))
    costs = [StageCost(2, 3, 0, 0, 0, 10, 10, (10,) * len(stage.reads), False) for stage in stages]
    inputs = (10,) * len(lengths)
    return ProfiledJoin(tuple(stages), tuple(costs), tuple(lengths), inputs, (0,) * len(stages))


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.lists(st.integers(2, 5), min_size=2, max_size=3), st.integers(0, 9))
def test_plans_of_the_join_of_equal_steps_are_plans_of_the_graph(lengths: list[int], more: int) -> None:
    profiled = measured(lengths)
    join = homogenized(profiled, 99)
    assert join == Join(tuple(lengths), 2, 5, 5, slots=99, slot_bytes=10)
    slots = 2 * len(lengths) + 1 + more
    steps = JoinTable(join.lengths, slots).plan(slots)
    assert steps is not None
    order, graph, plan = branches_by(profiled, steps)
    assert sorted(order) == [j for j, length in enumerate(lengths) for _ in range(length)]
    in_bytes, of_join = join_in_bytes(join, steps)
    # a forward step that stands right before its backward step anyway runs once
    assert verify(Problem(graph, 10**9), plan).cost_ns <= verify(Problem(in_bytes, 10**9), of_join).cost_ns
