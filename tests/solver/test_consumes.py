"""Values that are consumed: every method and every bound against brute force, and mutants that forget the rule."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from remat_ir import Graph, Problem, Status, budget_at, plain_peak, plan_of, verify
from remat_ir.graph import working_set
from remat_ir.greedy import greedy_plan, least_memory, peak_of
from remat_ir.proof import prove
from remat_solver import solve
from remat_solver.bounds import pair_need
from remat_solver.contradiction import LOG
from remat_solver.methods import METHODS
from remat_solver.methods.least import least_budget
from solver.brute import agrees, optimum
from solver.little import Written, little_graph
from solver.proof_rows import Struck, relaxation
from tiers import first

QUICK = ("greedy", "search", "staged", "transfers")
ON_GRAPHS = sorted(name for name, method in METHODS.items() if "graph" in method.takes)
ENGINES = {"auto", "lp-rounding", "search", "staged", *(name for name in ON_GRAPHS if name.startswith("milp"))}


def released(seed: int, layers: int) -> Graph:
    """A training step whose parameters are updated inside its backward pass, some before they are last wanted.

    Per layer: the parameter as it was before its update, of no bytes; a forward op; a backward op that makes the
    gradients of input and parameter; the update, which consumes parameter and gradient. Then an op needs room, and the
    last one reads activations.
    """
    draw, on = random.Random(seed), Written()
    once: list[int] = []
    before, acts, consumed = [], [], []
    for _ in range(layers):
        once.append(len(on.costs))
        before += on.op(0, [], 0)
        acts += on.op(draw.randint(1, 5), [before[-1], *acts[-1:]], draw.randint(2, 9))
    spare = on.op(draw.randint(4, 9), [], draw.randint(5, 9))  # what may be made again at any time
    split = len(on.costs)
    above: list[int] = []
    for layer in reversed(range(layers)):
        read = [before[layer], *acts[max(0, layer - 1) : layer + 1], *above]
        *above, gradient = on.op(draw.randint(1, 5), read, draw.randint(1, 4), 3)
        once.append(len(on.costs))
        on.op(0, [before[layer], gradient])
        consumed += [before[layer], gradient]
    room = on.op(1, above, 1)
    on.op(1, [*room, *spare, acts[draw.randrange(layers)]], 1)
    return on.graph(
        op_workspace_bytes=(*[0] * (len(on.costs) - 2), 8, 0),
        once=tuple(once),
        consumes=tuple(sorted(consumed)),
        backward_from=split,
    )


HELD = Graph(
    op_cost_ns=(0, 1, 1, 0, 1, 1, 1),
    op_inputs=((), (0,), (1,), (0, 2), (2,), (3,), (1, 4)),
    value_op=(0, 1, 2, 4, 5),
    value_bytes=(0, 10, 1, 10, 1),
    once=(0, 3),
    consumes=(0,),
    backward_from=3,
)
"""Op 1 may not run again after op 3, so its value is there while op 4 runs: 21 bytes, and 11 without the rule."""

SUBJECTS = (
    [HELD]
    + [released(seed, 3 if seed == 1 else 2) for seed in (0, 1, 2, 4)]
    + [graph for seed in range(60) if (graph := little_graph(seed, 6)).consumes and graph.values <= 11][:8]
)
PROBLEMS = [
    Problem(graph, budget)
    for graph in SUBJECTS
    for least in (working_set(replace(graph, consumes=())).least_bytes,)
    for budget in sorted({least + (plain_peak(graph) - least) * k // 4 for k in range(4)})
]


@cache
def best(number: int) -> int | None:
    """What the cheapest plan of a problem costs."""
    return optimum(PROBLEMS[number]).cost_ns


@pytest.mark.thorough
def test_the_rule_matters_on_these_problems() -> None:
    least = [best(number) for number in range(len(PROBLEMS))]
    free = [optimum(Problem(replace(p.graph, consumes=()), p.budget_bytes)).cost_ns for p in PROBLEMS]
    assert sum(a is None and b is not None for a, b in zip(least, free, strict=True)) >= 3
    assert sum(a is not None and a != b for a, b in zip(least, free, strict=True)) >= 3
    assert sum(cost is not None for cost in least) >= 15


@pytest.mark.parametrize(
    ("method", "every"),
    first(
        len(QUICK),
        [
            *((method, 3) for method in QUICK),
            *((method, 1) for method in ON_GRAPHS if method not in ENGINES),
            *((method, 3) for method in sorted(ENGINES - set(QUICK))),
        ],
    ),
)
def test_every_method_keeps_to_it(method: str, every: int) -> None:
    """No plan that the verifier refuses, none cheaper than brute force, no bound above it, no plan denied."""
    options: dict[str, Any] = {"iterations": 20_000} if method == "search" else {}
    for number, problem in list(enumerate(PROBLEMS))[::every]:
        answer, least = solve(problem, method=method, time_limit_s=3, max_gap=0, options=options), best(number)
        agrees(problem, answer, least)
        if answer.claimed_bound_ns is not None and not answer.restricted_to:
            assert least is None or answer.claimed_bound_ns <= least


@pytest.mark.thorough
def test_least_budgets_and_bounds_on_them() -> None:
    for number, problem in enumerate(PROBLEMS):
        graph, least = problem.graph, best(number)
        if least is not None:
            assert max(working_set(graph).least_bytes, pair_need(graph).least_bytes) <= problem.budget_bytes
        plan = least_memory(graph)
        verify(Problem(graph, peak_of(graph, plan)), plan)
    for graph in SUBJECTS[::5]:
        found = least_budget(graph, time_limit_s=2)
        assert optimum(Problem(graph, found.least_budget_bytes)).cost_ns is not None
        assert optimum(Problem(graph, found.least_budget_bound_bytes - 1)).cost_ns is None


def test_what_cannot_be_made_again_is_held() -> None:
    assert working_set(HELD).least_bytes == 21
    assert working_set(replace(HELD, consumes=())).least_bytes == 11
    assert greedy_plan(HELD, 20) is None
    assert optimum(Problem(replace(HELD, consumes=()), 20)).cost_ns == 6
    answer = solve(Problem(HELD, 20), method="staged", time_limit_s=10)
    assert answer.status is Status.INFEASIBLE
    assert answer.proof is not None
    assert prove(Problem(HELD, answer.least_budget_bound_bytes - 1), answer.proof).bound_ns is None


def forgetful(graph: Graph) -> tuple[int, ...]:
    """`Graph.last_stage` as it would be without `consumes`."""
    return LAST(replace(graph, consumes=()))


def too_strict(graph: Graph) -> tuple[int, ...]:
    """`Graph.last_stage` as if a reader could not run in the stage of the consumer itself."""
    without = forgetful(graph)
    return tuple(max(op, a - (a < b)) for op, (a, b) in enumerate(zip(LAST(graph), without, strict=True)))


LAST: Callable[[Graph], tuple[int, ...]] = Graph.last_stage.func


def mutated(monkeypatch: pytest.MonkeyPatch, last_stage: Callable[[Graph], tuple[int, ...]]) -> list[Problem]:
    monkeypatch.setattr(Graph, "last_stage", property(last_stage))
    return [Problem(replace(p.graph), p.budget_bytes) for p in PROBLEMS]


@pytest.mark.parametrize("method", first(1, ["search", "staged", "milp-tight"]))
def test_who_forgets_it_offers_plans_that_the_verifier_refuses(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """They are dropped, and the method is named: in the log, and in the answer."""
    refused = 0
    monkeypatch.setattr(LOG, "handlers", [])
    for problem in mutated(monkeypatch, forgetful)[8:16]:
        options: dict[str, Any] = {"iterations": 20_000} if method == "search" else {}
        refused += method in solve(problem, method=method, time_limit_s=10, max_gap=0, options=options).dropped_methods
    assert refused


@pytest.mark.parametrize("last_stage", [LAST, too_strict])
def test_a_checker_that_is_too_strict_denies_a_plan(monkeypatch: pytest.MonkeyPatch, last_stage: Any) -> None:
    """A reader runs again in the stage of the consumer itself: only with one stage less its R is taken to be 0."""
    plan = plan_of(HELD, (0, 1, 2, 1, 3, 4, 5, 6))
    verify(Problem(HELD, 100), plan)
    monkeypatch.setattr(Graph, "last_stage", property(last_stage))
    on = relaxation(Problem(replace(HELD), 100), tuple(range(HELD.ops)), ())
    struck = Struck(HELD, plan)
    ran = [c for c in range(2, on.stages) if struck.at(on, ("run", c, c, 1))]
    assert ran == [3]
    assert (on.run(3, 3, 1) == 0) == (last_stage is too_strict)


def test_budgets_of_training_graphs_are_kept() -> None:
    for seed in range(4):
        graph = released(100 + seed, 12)
        for share in (0.4, 0.6, 0.8):
            plan = greedy_plan(graph, budget_at(graph, share))
            if plan is not None:
                verify(Problem(graph, budget_at(graph, share)), plan)
