"""The brute force itself: against plain enumeration, and its spaces against each other."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings

from drawn import examples
from remat_ir import InvalidPlan, Problem, plan_of, verify
from remat_ir.graph import pinned_ops
from solver.brute import ANY_ORDER, FIXED_ORDER, FORWARD_OPS, ONE_PER_STAGE, optimum
from solver.little import little_problems, problems


def enumerated(problem: Problem) -> int | None:
    """The least cost over all sets of recomputations, one per op and stage, as least-memory plans."""
    graph = problem.graph
    free = [(stage, op) for stage in range(graph.ops) for op in range(stage) if op not in pinned_ops(graph)]
    best = None
    for chosen in product((False, True), repeat=len(free)):
        extra = {where for where, taken in zip(free, chosen, strict=True) if taken}
        sequence = [op for stage in range(graph.ops) for op in range(stage + 1) if op == stage or (stage, op) in extra]
        cost = sum(graph.op_cost_ns[op] for op in sequence)
        if best is None or cost < best:
            try:
                best = verify(problem, plan_of(graph, sequence)).cost_ns
            except InvalidPlan:
                continue
    return best


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(problem=problems(most_ops=5))
def test_equals_enumeration(problem: Problem) -> None:
    assert optimum(problem, ONE_PER_STAGE).cost_ns == enumerated(problem)


@pytest.mark.parametrize("rich", [False, True])
def test_a_larger_space_is_never_worse(rich: bool) -> None:
    for seed in range(12):
        for problem in little_problems(seed, 6, rich=rich, budgets=3):
            costs = [
                optimum(problem, space, sweeps).cost_ns
                for space, sweeps in (
                    (ANY_ORDER, 1),
                    (FIXED_ORDER, 1),
                    (ONE_PER_STAGE, 2),
                    (ONE_PER_STAGE, 1),
                    (FORWARD_OPS, 1),
                )
            ]
            known = [float("inf") if cost is None else cost for cost in costs]
            assert known == sorted(known)
