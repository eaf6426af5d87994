"""pytorch 197871: `dp_knapsack_sliding_hirschberg` saves more than its budget allows.

`patches/knapsack.patch` mends it: of a segment's capacity, one too many goes to the two halves together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from torch._functorch._activation_checkpointing.knapsack import dp_knapsack, dp_knapsack_sliding_hirschberg

from benchmarks.upstream.common import concluded
from remat_ir import Problem, graph_of, verify
from remat_solver import solve

UNIT = 10_000
"""The solvers count memory in units of 1 / UNIT."""
INSTANCES = 300


def instance(seed: int) -> tuple[list[int], list[float], int]:
    """Weights in units, values, and a budget in units."""
    draw = random.Random(seed)
    count = draw.randint(2, 9)
    weights = [draw.randint(1, 30) for _ in range(count)]
    return weights, [float(draw.randint(1, 50)) for _ in range(count)], draw.randint(1, sum(weights))


def over(solver: Callable[..., Any], seed: int) -> bool:
    """Whether a solver's choice weighs more than the budget."""
    weights, values, budget = instance(seed)
    _, saved, _ = solver([w / UNIT for w in weights], values, budget / UNIT)
    return sum(weights[i] for i in saved) > budget


def best(weights: Sequence[int], values: Sequence[float], budget: int) -> float:
    """The optimum, by trying all."""
    count = range(len(weights))
    sets = (chosen for size in range(len(weights) + 1) for chosen in combinations(count, size))
    return max(sum(values[i] for i in s) for s in sets if sum(weights[i] for i in s) <= budget)


def by_tags(seed: int) -> bool:
    """The same choice as a step: values of these sizes, each saved, or computed again when a backward op reads it.

    The backward ops make nothing, and a value that is computed again needs as much as when it is saved. So the budget
    is that of the sizes plus the largest value. The tagged plan keeps to it; this is the whole claim.
    """
    weights, values, budget = instance(seed)
    count = len(weights)
    inputs: list[list[int]] = [[] for _ in weights] + [[i] for i in reversed(range(count))]
    graph = graph_of([int(v) for v in values] + [1] * count, [*weights, *[0] * count], inputs, backward_from=count)
    problem = Problem(graph, budget + max(weights))
    answer = solve(problem, method="tags", time_limit_s=5)
    return answer.plan is not None and verify(problem, answer.plan).peak_bytes <= problem.budget_bytes


def main() -> int:
    """How many of a few hundred random choices weigh more than they may."""
    wrong = sum(over(dp_knapsack_sliding_hirschberg, seed) for seed in range(INSTANCES))
    plain = sum(over(dp_knapsack, seed) for seed in range(INSTANCES))
    print(f"over the budget, of {INSTANCES}: dp_knapsack_sliding_hirschberg {wrong}, dp_knapsack {plain}")
    ours = all(by_tags(seed) for seed in range(0, INSTANCES, 30))
    return concluded(wrong > 0, ours)
