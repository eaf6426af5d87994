"""Rotor against brute force over all persistent schedules, its slots, its table, and the graphs that are chains."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from benchmarks.graphs.instances import instance
from hypothesis import given, settings
from hypothesis import strategies as st

from chains import chains, counter_example
from drawn import examples, posed
from remat_ir import Chain, Problem, Status, budget_at, graph_of, plain_peak, verify
from remat_solver import solve
from remat_solver.chain import rotor as rotor_module
from remat_solver.chain import table as table_module
from remat_solver.chain.network import linear_network
from remat_solver.chain.persistent import Persistent
from remat_solver.chain.rotor import RotorOptions, rotor
from remat_solver.chain.table import Least, Table, spans
from remat_solver.deadline import Deadline
from remat_solver.incumbent import Incumbent
from solver.chain_brute import best_cost
from solver.stops import After
from tiers import first

SETTINGS = settings(max_examples=examples(60), deadline=None, derandomize=True)


def long_chain(stages: int, seed: int) -> Chain:
    """A chain with sizes of many megabytes, drawn from a seed."""
    draw = random.Random(seed)
    activation = [draw.randrange(1_000_000, 20_000_000) for _ in range(stages)] + [4]
    forward = [draw.randrange(50_000, 900_000) for _ in range(stages)]
    return Chain(
        forward_ns=tuple(forward),
        backward_ns=tuple(2 * f + draw.randrange(9999) for f in forward),
        forward_workspace_bytes=tuple(draw.randrange(5_000_000) for _ in range(stages)),
        backward_workspace_bytes=tuple(draw.randrange(9_000_000) for _ in range(stages)),
        tape_bytes=tuple(draw.randrange(a, 4 * a + 1) for a in activation[1:]),
        activation_bytes=tuple(activation),
        gradient_bytes=tuple(activation),
    )


@SETTINGS
@given(chains(), st.data())
def test_exact_against_all_persistent_schedules(chain: Chain, data: st.DataObject) -> None:
    budget = data.draw(st.integers(chain.fixed_bytes, plain_peak(chain)))
    best = best_cost(chain, budget)
    answer = solve(Problem(chain, budget), method="rotor", max_gap=0)
    assert answer.cost_ns == best
    if best is not None:
        assert answer.status is Status.OPTIMAL
        assert answer.bound_ns == best
    else:
        assert answer.status in (Status.INFEASIBLE, Status.NOTHING_FOUND)
        assert answer.least_budget_bytes > budget
        assert best_cost(chain, answer.least_budget_bytes) is not None
        assert best_cost(chain, answer.least_budget_bytes - 1) is None


@SETTINGS
@given(chains(), st.data())
def test_revolve_against_all_its_schedules(chain: Chain, data: st.DataObject) -> None:
    budget = data.draw(st.integers(chain.fixed_bytes, plain_peak(chain)))
    answer = solve(Problem(chain, budget), method="revolve", max_gap=0)
    assert answer.cost_ns == best_cost(chain, budget, tapes=False)


@SETTINGS
@given(chains(most_stages=6, most=60), st.integers(1, 40), st.data())
def test_slots_round_to_the_safe_side(chain: Chain, slots: int, data: st.DataObject) -> None:
    least = Least(chain)
    budget = data.draw(st.integers(least.budget_bytes, max(plain_peak(chain), least.budget_bytes)))
    exact = Table(chain, budget, 10**6)
    assert exact.exact
    best = exact.bound_ns(exact.slots)
    up, near = Table(chain, budget, slots), Table(chain, budget, slots, nearest=True)
    plan, bound = up.plan(up.slots), near.bound_ns(near.slots)
    assert bound <= best
    if plan is not None:
        verdict = verify(Problem(chain, budget), plan)
        assert verdict.cost_ns == up.bound_ns(up.slots)
        assert verdict.cost_ns >= best
    answer = solve(Problem(chain, budget), method="rotor", max_gap=0, options={"slots": slots})
    assert answer.cost_ns >= best
    assert answer.bound_ns <= best
    assert verify(Problem(chain, least.budget_bytes), least.plan()).peak_bytes == least.budget_bytes


@SETTINGS
@given(chains(most_stages=6, most=20), st.data())
def test_one_table_answers_every_smaller_budget(chain: Chain, data: st.DataObject) -> None:
    table = Table(chain, plain_peak(chain), 10**6)
    budget = data.draw(st.integers(chain.fixed_bytes, plain_peak(chain)))
    slots = table.slots_within(budget)
    fresh = Table(chain, budget, 10**6)
    plan = table.plan(slots)
    if table.slot_bytes == fresh.slot_bytes and (plain_peak(chain) - budget) % table.slot_bytes == 0:
        assert table.bound_ns(slots) == fresh.bound_ns(fresh.slots)
    if plan is not None:
        assert verify(Problem(chain, budget), plan).cost_ns == table.bound_ns(slots)
    with pytest.raises(ValueError, match="the table reaches a budget of"):
        table.slots_within(plain_peak(chain) + 1)


@pytest.mark.parametrize("fraction", first(1, [0.3, 0.5, 0.8]))
def test_a_long_chain(fraction: float) -> None:
    chain = long_chain(80, seed=5)
    problem = Problem(chain, budget_at(chain, fraction))
    answer = solve(problem, method="rotor", max_gap=0)
    assert answer.plan is not None
    assert answer.restricted_to == ("persistent-schedules",)
    assert answer.gap < 0.01
    # the same table at smaller budgets: every plan fits, none is cheaper than the bound at more memory
    table = Table(chain, problem.budget_bytes)
    last = None
    for part in (10, 9, 8, 7, 6):
        smaller = problem.budget_bytes * part // 10
        plan = table.plan(table.slots_within(smaller))
        if plan is not None:
            cost = verify(Problem(chain, smaller), plan).cost_ns
            assert last is None or cost >= last
            last = cost
    assert last is not None


def test_coarse_costs_still_bound() -> None:
    """Costs so large that the table counts in units of many ns."""
    chain = replace(long_chain(30, seed=8), forward_ns=tuple(10**12 + 7**i % 10**11 for i in range(30)))
    problem = Problem(chain, budget_at(chain, 0.4))
    table = Table(chain, problem.budget_bytes)
    assert table.unit_ns > 1000
    answer = solve(problem, method="rotor", max_gap=0)
    assert 0.99 * answer.cost_ns < answer.bound_ns <= answer.cost_ns


@pytest.mark.parametrize("n", [4, 5, 6, 7, 8])
def test_no_persistent_schedule_is_optimal(n: int) -> None:
    """After RR-9302, Figure 2: the persistent optimum is 3n − 1, the general one 2n + 2."""
    chain = counter_example(n)
    answer = solve(Problem(chain, 8), method="rotor", max_gap=0)
    assert answer.cost_ns == 3 * n - 1 == answer.bound_ns
    assert answer.restricted_to == ("persistent-schedules",)
    assert answer.message.startswith("No persistent schedule costs less")
    assert best_cost(chain, 8, persistent=False) == 2 * n + 2


def test_what_is_no_chain() -> None:
    skip = graph_of([1] * 6, [1] * 6, [(), (0,), (0, 1), (1, 2), (0, 1, 3), (0, 4)])
    assert linear_network(skip) is None
    answer = solve(Problem(skip, 100), method="rotor")
    assert answer.status is Status.NOTHING_FOUND
    assert answer.message == "This graph is not a chain of stages, so it has no chain plan."


def test_a_budget_under_the_least_says_which_would_do() -> None:
    chain = counter_example(5)
    answer = solve(Problem(chain, 6), method="rotor")
    assert answer.status is Status.INFEASIBLE
    assert answer.least_budget_bound_bytes == 7
    assert answer.least_budget_bytes == Least(chain).budget_bytes


@pytest.mark.parametrize("method", ["rotor", "revolve"])
def test_an_input_of_more_slots_than_32_bits_count_changes_nothing(method: str) -> None:
    """It is there throughout and takes none of them, however small what is saved next to it."""
    small = replace(counter_example(4), backward_ns=(1,) * 6)
    large = replace(small, activation_bytes=(3_000_000_000, *small.activation_bytes[1:]))
    budget = Least(small, tapes=method == "rotor").budget_bytes
    there, here = (
        solve(Problem(chain, budget + chain.fixed_bytes), method=method, max_gap=0) for chain in (small, large)
    )
    assert there.cost_ns is not None
    assert here.cost_ns == there.cost_ns


def test_sequential_is_periodic() -> None:
    chain = long_chain(16, seed=2)
    answer = solve(Problem(chain, plain_peak(chain)), method="sequential", options={"segments": 4})
    text = [f"{step.verb.value} {step.stage}" for step in answer.plan.steps]
    assert text[:5] == ["F_ck 1", "F_none 2", "F_none 3", "F_none 4", "F_ck 5"]
    assert text[12:17] == ["F_all 13", "F_all 14", "F_all 15", "F_all 16", "B 16"]
    assert text[20:25] == ["F_all 9", "F_all 10", "F_all 11", "F_all 12", "B 12"]
    # each forward step runs twice, but those of the last segment
    assert answer.cost_ns == chain.total_cost_ns + sum(chain.forward_ns[:12])
    for fraction in (0.4, 0.6, 0.8):
        problem = Problem(chain, budget_at(chain, fraction))
        periodic = solve(problem, method="sequential")
        best = solve(problem, method="rotor")
        assert best.cost_ns is not None
        assert periodic.cost_ns is None or best.cost_ns <= periodic.cost_ns
    assert solve(Problem(chain, budget_at(chain, 0.3)), method="sequential").message.startswith("No number of segments")


def test_spans_hold_each_stage_once_and_bound_the_work_between_looks() -> None:
    for stages, width, work in ((1, 64, 10), (40, 64, 20_000), (40, 1, 1), (1200, 64, 10**8)):
        found = list(spans(stages, width, work))
        assert [s for high, low in found for s in range(high, low - 1, -1)] == list(range(stages, 0, -1))
        for high, low in found:
            sums = sum((stages - s + 1) ** 2 // 2 * width for s in range(low + 1, high + 1))
            assert low == high or sums < work


def test_a_table_is_the_same_however_often_the_clock_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = long_chain(24, 3)
    budget = budget_at(chain, 0.5)
    whole, least, seldom = Table(chain, budget, 150, nearest=True), Least(chain), After()
    Table(chain, budget, 150, nearest=True, stop=seldom)
    monkeypatch.setattr(table_module, "_SUMS", 1)
    monkeypatch.setattr(table_module, "_LEAST_SUMS", 1)
    often = After()
    table = Table(chain, budget, 150, nearest=True, stop=often)
    assert often.polls >= 20 * seldom.polls
    assert (table._table == whole._table).all()
    assert Least(chain).budget_bytes == least.budget_bytes


@pytest.mark.parametrize("polls", [0, 10, 30])
def test_a_cancelled_rotor_offers_what_it_has(polls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the table of least peaks is full that is nothing; after it, the plan of the least peak."""
    monkeypatch.setattr(table_module, "_SUMS", 1)
    monkeypatch.setattr(table_module, "_LEAST_SUMS", 1)
    chain, cancelled = long_chain(24, 3), After(polls)
    incumbent = Incumbent(Problem(chain, budget_at(chain, 0.5)), Deadline(None), cancelled=cancelled)
    rotor(incumbent, RotorOptions())
    assert cancelled.polls == polls + 1
    assert incumbent.stopped()
    assert incumbent.answer("rotor").limit == "cancel"
    assert (incumbent.plan is None) == (polls < 20)


def test_a_plan_that_cannot_be_checked_in_time_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of many steps takes longer to make, check and answer than to find; the time for that is kept."""
    problem = posed(instance("gpt-4"), 0.5)
    assert solve(problem, method="rotor", time_limit_s=60).plan is not None
    monkeypatch.setattr(rotor_module, "_making_s", lambda graph: 60.0)
    answer = solve(problem, method="rotor", time_limit_s=60)
    assert (answer.plan, answer.status, answer.limit) == (None, "nothing_found", "time")
    assert solve(problem, method="rotor", time_limit_s=None).plan is not None


def test_the_plan_of_least_peak_comes_before_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the table is stopped there is a plan already."""
    problem, seen = posed(instance("gpt-4"), 0.5), []

    def table(*arguments: object, **options: object) -> Persistent:
        seen.append(incumbent.cost_ns)
        return Persistent(*arguments, **options)

    monkeypatch.setattr(rotor_module, "Persistent", table)
    incumbent = Incumbent(problem, Deadline(None))
    rotor(incumbent, RotorOptions())
    (before,) = seen
    assert before > incumbent.cost_ns
