"""The profile that is kept while a schedule changes is the one that the verifier's replay sees."""

from __future__ import annotations

import random

import numpy as np
from benchmarks.graphs.instances import instance
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from drawn import examples, graphs
from remat_ir import Graph, plan_of, replay
from remat_ir.working_set import pinned_ops
from remat_solver.search.layout import BUDGET, COST, OVER, Ints, profile_of, runs_in
from remat_solver.search.profile import current, keys_of, load, place, remove, sequence_of


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
