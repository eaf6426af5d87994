"""The offload-and-recompute program: honest tensor by tensor, no faster than the bound, repaired where it must be."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chains import chains
from drawn import examples, posed
from remat_ir import Chain, InvalidPlan, Problem, Status, Verb, budget_at, plain_peak, problem_digest, verify
from remat_solver import solve
from remat_solver.offload.method import makespan_bound, repaired_plan
from remat_solver.offload.table import OffloadTable
from solver.chain_brute import best_cost
from solver.offload_brute import all_schedules, tensor_plan

SETTINGS = settings(max_examples=examples(60), deadline=None, derandomize=True)


def linked_chain(stages: int, seed: int, gigabytes_per_s: float = 10.0) -> Chain:
    """A chain whose transfers take about as long as its steps."""
    draw = random.Random(seed)
    activation = [draw.randrange(1_000_000, 8_000_000) for _ in range(stages)] + [4]
    forward = [draw.randrange(200_000, 1_200_000) for _ in range(stages)]
    return Chain(
        forward_ns=tuple(forward),
        backward_ns=tuple(2 * f for f in forward),
        forward_workspace_bytes=(0,) * stages,
        backward_workspace_bytes=tuple(draw.randrange(2_000_000) for _ in range(stages)),
        tape_bytes=tuple(draw.randrange(a, 3 * a + 1) for a in activation[1:]),
        activation_bytes=tuple(activation),
        gradient_bytes=tuple(activation),
        link_bytes_per_s=int(gigabytes_per_s * 1e9),
    )


@SETTINGS
@given(chains(most_stages=4, most=9), st.integers(1, 4), st.integers(0, 999), st.booleans())
def test_no_plan_is_faster_than_the_bound(chain: Chain, beta: int, more: int, leaves: bool) -> None:
    """With transfers or without, tensor by tensor: every schedule of the program, and the best of all without."""
    chain = replace(chain, link_bytes_per_s=beta * 250_000_000, input_may_leave=leaves)
    budget = chain.fixed_bytes + 1 + more % (plain_peak(chain) - chain.fixed_bytes + 1)
    bound = makespan_bound(chain, budget)
    best = best_cost(chain, budget, persistent=False)
    assert best is None or bound <= best
    if chain.stages > 3:
        return
    for schedule in all_schedules(chain):
        try:
            plan = tensor_plan(chain, budget, schedule)
        except InvalidPlan:
            continue
        assert bound <= verify(Problem(chain, budget), plan).cost_ns


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["pofo", "offload-all", "save-on-cpu"])
def test_an_input_that_may_leave_makes_room(method: str) -> None:
    """A large input is moved where it may be, and the plan is one that no chain whose input stays accepts."""
    chain = linked_chain(12, seed=5, gigabytes_per_s=40)
    chain = replace(chain, activation_bytes=(30_000_000, *chain.activation_bytes[1:]), input_may_leave=True)
    stays = replace(chain, input_may_leave=False)
    budget = max(chain.fixed_bytes + 15_000_000, budget_at(chain, 0.3))
    problem, without = Problem(chain, budget), Problem(stays, budget)
    options = {"slots": 50} if method == "pofo" else None
    answer = solve(problem, method=method, options=options)
    assert {step.stage for step in answer.plan.steps if step.verb is Verb.OFFLOAD} >= {0}
    with pytest.raises(InvalidPlan, match="there is no stage 0"):
        verify(without, answer.plan)
    fewer = solve(without, method=method, options=options)
    assert fewer.cost_ns is None or verify(problem, answer.plan).cost_ns < fewer.cost_ns
    assert problem_digest(problem) != problem_digest(without)


@pytest.mark.thorough
def test_the_bound_is_worth_something() -> None:
    problem = posed(linked_chain(24, seed=3, gigabytes_per_s=2), 0.4)
    answer = solve(problem, method="pofo", max_gap=0, options={"slots": 50})
    assert answer.restricted_to == ()
    assert problem.subject.total_cost_ns * 1.005 < answer.bound_ns


@pytest.mark.thorough
def test_sizes_rounded_to_the_nearest_slot_are_repaired() -> None:
    """What does not fit tensor by tensor is moved, too."""
    repaired = 0
    for seed in range(12):
        chain = linked_chain(16, seed=seed)
        problem = Problem(chain, budget_at(chain, 0.35))
        schedule = OffloadTable(chain, problem.budget_bytes, 12, nearest=True).schedule()
        if schedule is None:
            continue
        try:
            plan = repaired_plan(problem, schedule)
        except InvalidPlan:
            continue
        verify(problem, plan)
        try:
            tensor_plan(chain, problem.budget_bytes, schedule)
        except InvalidPlan:
            repaired += 1
    assert repaired > 0


@pytest.mark.thorough
@pytest.mark.parametrize("fraction", [0.3, 0.5, 0.7])
def test_worth_more_than_either_alone(fraction: float) -> None:
    problem = posed(linked_chain(24, seed=3), fraction)
    costs = {}
    for method in ("pofo", "rotor", "offload-all", "save-on-cpu"):
        answer = solve(problem, method=method, max_gap=0, options={"slots": 50} if method == "pofo" else None)
        assert answer.plan is None or verify(problem, answer.plan).cost_ns == answer.cost_ns
        costs[method] = answer.cost_ns or 2**60
    assert costs["pofo"] <= min(costs.values())
    moved = solve(problem, method="pofo", options={"slots": 50}).plan
    assert any(step.verb is Verb.OFFLOAD for step in moved.steps)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_more_slots_are_never_worse(seed: int) -> None:
    """Finer slots alone may round to a worse plan: the best of the coarser ones is kept."""
    problem = posed(linked_chain(6, seed), 0.7)
    costs = [solve(problem, method="pofo", max_gap=0, options={"slots": slots}).cost_ns for slots in (50, 77, 100, 130)]
    fifty, between, hundred, more = (cost for cost in costs if cost is not None)
    assert between <= fifty
    assert more <= hundred <= fifty


@pytest.mark.thorough
def test_save_on_cpu_waits_for_everything() -> None:
    chain = linked_chain(10, seed=1)
    answer = solve(Problem(chain, plain_peak(chain)), method="save-on-cpu", max_gap=0)
    moved = sum(chain.link.to_host_ns(size) for size in chain.tape_bytes[:-1])
    assert answer.cost_ns == chain.total_cost_ns + 2 * moved
    overlapped = solve(Problem(chain, plain_peak(chain)), method="offload-all", max_gap=0)
    assert overlapped.cost_ns < answer.cost_ns


def test_without_a_link() -> None:
    problem = posed(replace(linked_chain(12, seed=2), link_bytes_per_s=None), 0.5)
    assert solve(problem, method="pofo").cost_ns == solve(problem, method="rotor").cost_ns
    answer = solve(problem, method="offload-all")
    assert answer.status is Status.NOTHING_FOUND
    assert "no link to the host" in answer.message


def test_the_hosts_limit_is_optimized() -> None:
    """More host memory is never worse, from rotor's plan, which needs none, to the plan without a limit."""
    chain = linked_chain(12, seed=4)
    problem = Problem(chain, budget_at(chain, 0.4))
    fifty = {"slots": 50}
    free = solve(problem, method="pofo", max_gap=0, options=fifty)
    alone = solve(Problem(replace(chain, link_bytes_per_s=None), problem.budget_bytes), method="rotor", max_gap=0)
    costs = []
    for share in (0.0, 0.1, 0.2, 0.3, 0.6, 1.0):
        limited = replace(chain, host_bytes=int(share * sum(chain.tape_bytes)))
        answer = solve(Problem(limited, problem.budget_bytes), method="pofo", max_gap=0, options=fifty)
        costs.append(verify(Problem(limited, problem.budget_bytes), answer.plan).cost_ns)
    assert costs[0] == alone.cost_ns
    assert costs == sorted(costs, reverse=True)
    assert len(set(costs)) >= 5
    assert costs[-1] == free.cost_ns


@pytest.mark.thorough
def test_an_input_that_may_leave_counts_for_the_hosts_limit() -> None:
    """Rotor's plan, which comes first, is one of the chain whose input stays."""
    chain = replace(linked_chain(8, seed=3, gigabytes_per_s=2), input_may_leave=True)
    chain = replace(chain, host_bytes=sum(chain.tape_bytes) // 4)
    problem = Problem(chain, budget_at(chain, 0.55))
    answer = solve(problem, method="pofo", max_gap=0, options={"slots": 20})
    assert verify(problem, answer.plan).cost_ns == answer.cost_ns


@pytest.mark.thorough
def test_auto_takes_the_link_into_account() -> None:
    problem = posed(linked_chain(16, seed=6), 0.4)
    moved = solve(problem, method="pofo", options={"slots": 50})
    assert moved.cost_ns is not None
    seen: list[tuple[int | None, str]] = []
    auto = solve(
        problem,
        method="auto",
        time_limit_s=200,
        on_progress=lambda progress: seen.append((progress.cost_ns, progress.source)),
        cancelled=lambda: any(cost is not None and cost <= moved.cost_ns for cost, _ in seen),
    )
    assert seen[0][1] == "rotor"
    assert auto.cost_ns <= moved.cost_ns
    assert auto.bound_ns <= auto.cost_ns
