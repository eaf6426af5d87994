"""The local search: valid plans, known optima, the same plan for the same seed; its profile is what replay sees."""

from __future__ import annotations

import random
import threading

import numpy as np
from benchmarks.graphs.instances import instance
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from drawn import examples, graphs, posed
from remat_ir import (
    Graph,
    Plan,
    Problem,
    Status,
    budget_at,
    graph_of,
    plain_peak,
    plain_plan,
    plan_of,
    replay,
    verify,
)
from remat_ir.graph import pinned_ops, working_set
from remat_ir.greedy import greedy_plan
from remat_solver import solve
from remat_solver.deadline import Deadline
from remat_solver.incumbent import Incumbent
from remat_solver.kernels import loading
from remat_solver.search.layout import BUDGET, COST, OVER, Ints, profile_of, runs_in
from remat_solver.search.local import SLICE, Search, least_plan, polish
from remat_solver.search.profile import current, keys_of, load, place, remove, sequence_of
from solver.brute import optimum as brute_optimum


def test_a_search_finds_most_optima_of_small_graphs_and_never_beats_one() -> None:
    """One recomputation per op and stage misses a few optima; a search that misses many is broken."""
    found, missed = 0, 0

    @settings(deadline=None, derandomize=True, max_examples=120)
    @given(graphs(most_ops=6), st.integers(0, 10))
    def try_one(graph: Graph, tenths: int) -> None:
        nonlocal found, missed
        least, plain = working_set(graph).least_bytes, plain_peak(graph)
        problem = Problem(graph, least + tenths * (plain - least) // 10)
        answer = solve(problem, method="search", options={"iterations": 4000}, max_gap=0, time_limit_s=None)
        optimum = brute_optimum(problem).cost_ns
        if optimum is None:
            assert answer.plan is None
            return
        if answer.plan is not None:
            assert verify(problem, answer.plan).cost_ns == answer.cost_ns >= optimum
        if answer.cost_ns == optimum:
            found += 1
        else:
            missed += 1

    try_one()
    assert found >= 50
    assert found >= 9 * missed


def test_the_same_seed_gives_the_same_plan() -> None:
    problem = posed(instance("unet-4-whole"), 0.5)
    plans: list[Plan | None] = []
    for seed in (3, 3, 4):
        options = {"iterations": 60_000, "seed": seed}
        plans.append(solve(problem, method="search", options=options, time_limit_s=None).plan)
    assert plans[0] is not None
    assert plans[0] == plans[1]


def test_a_search_improves_the_greedy_plan() -> None:
    problem = posed(instance("densenet-24"), 0.3)
    first = solve(problem, method="greedy")
    better = solve(problem, method="search", options={"iterations": 100_000}, time_limit_s=None)
    assert first.status is better.status is Status.FEASIBLE
    assert better.overhead < 0.9 * first.overhead


def test_polishing_takes_a_plan_over_the_budget_back_into_it() -> None:
    graph = instance("unet-2")
    budget = budget_at(graph, 0.6)
    sequence = polish(graph, budget, range(graph.ops), moves=30_000)
    assert sequence is not None
    search = Search(graph, budget)
    assert search.adopt(sequence)
    plan = search.plan()
    assert plan.computes == sequence
    assert verify(Problem(graph, budget), plan).peak_bytes <= budget


def test_sizes_near_the_largest_integer_do_not_overflow() -> None:
    inputs = [[]] + [[i - 1] for i in range(1, 20)] + [[19]] + [[19 + k, 19 - k] for k in range(1, 20)]
    problem = posed(graph_of([10] * 40, [2**53 // 41] * 40, inputs, backward_from=20), 0.5)
    answer = solve(problem, method="search", options={"iterations": 20_000}, time_limit_s=None)
    assert verify(problem, answer.plan).peak_bytes <= problem.budget_bytes


def test_a_smaller_budget_is_found_than_the_plain_plan_needs() -> None:
    """Downwards from the plain plan, which stays where there is nothing to do; answers without a plan say as much."""
    graph = instance("dag-250")
    loading().wait()
    plain, high, low = plain_plan(graph), plain_peak(graph), working_set(graph).least_bytes
    found = least_plan(graph, low, plain, Deadline(4), lambda: False)
    peak = verify(Problem(graph, high), found).peak_bytes
    assert low <= peak < 0.7 * high
    within = least_plan(graph, (peak + high) // 2, plain, Deadline(20), lambda: False)
    assert verify(Problem(graph, (peak + high) // 2), within).peak_bytes > low
    assert least_plan(graph, high, plain, Deadline(20), lambda: False) == plain
    assert least_plan(graph, low, plain, Deadline(20), lambda: True) == plain
    answer = solve(Problem(graph, low), method="auto", time_limit_s=8)
    assert answer.plan is not None or (answer.least_budget_bytes or high) < 0.9 * high


def test_a_search_rests_while_a_claim_is_certified() -> None:
    graph = instance("unet-2")
    problem = Problem(graph, budget_at(graph, 0.5))
    moves = []
    for claims in (True, False):
        incumbent = Incumbent(problem, Deadline(60), 0.0, certify=True)
        plan = greedy_plan(graph, problem.budget_bytes)
        assert plan is not None
        incumbent.offer(plan, "greedy")
        assert incumbent.cost_ns is not None
        if claims:
            incumbent.raise_bound(incumbent.cost_ns, "an engine")
        search = Search(graph, problem.budget_bytes)
        ending = threading.Timer(1.0, incumbent.close)
        ending.start()
        search.run(incumbent)
        moves.append(search.moves)
    assert moves[0] <= SLICE < moves[1]


# --- the profile that is kept while a schedule changes


@njit  # what compiled functions alone call
def _change(profile: Ints, stage: int, op: int, room: bool) -> None:
    if runs_in(profile, op, stage):
        remove(profile, stage, op)
    elif room:
        place(profile, stage, op)


def _check(graph: Graph, profile: Ints) -> None:
    keys, memory = current(profile)
    assert keys.tolist() == sorted(set(keys.tolist()))
    sequence = sequence_of(graph, keys)
    seen = [moment for moment in replay(graph, plan_of(graph, sequence)) if moment.op is not None]
    assert [moment.peak_bytes - graph.fixed_bytes for moment in seen] == memory.tolist()
    assert seen[-1].cost_ns == profile[COST]
    assert np.maximum(memory - profile[BUDGET], 0).sum() == profile[OVER]
    assert keys_of(graph, sequence).tolist() == keys.tolist()


def _walk(graph: Graph, budget: int, moves: int, every: int, seed: int) -> None:
    rng = random.Random(seed)
    profile = profile_of(graph, budget, seed)
    load(profile, keys_of(graph, range(graph.ops)))
    _check(graph, profile)
    free = [op for op in range(graph.ops - 1) if op not in pinned_ops(graph)]
    for number in range(moves if free else 0):
        op = rng.choice(free)
        stage = rng.randint(op + 1, min(graph.ops - 1, graph.last_stage[op]))
        _change(profile, stage, op, len(current(profile)[0]) < 4 * graph.ops + 500)
        if number % every == 0:
            _check(graph, profile)
    _check(graph, profile)
    keys, before = current(profile)
    load(profile, keys)
    assert current(profile)[1].tolist() == before.tolist()


@settings(deadline=None, derandomize=True, max_examples=examples(80))
@given(graphs(most_ops=12), st.integers(0, 40), st.integers(0, 1000))
def test_placing_and_removing_keeps_the_profile(graph: Graph, budget: int, seed: int) -> None:
    _walk(graph, budget + graph.fixed_bytes, moves=30, every=1, seed=seed)


def test_placing_and_removing_keeps_the_profile_over_many_blocks() -> None:
    for name in ("unet-4-whole", "tape-64"):
        graph = instance(name)
        _walk(graph, 2 << 30, moves=1500, every=250, seed=1)
