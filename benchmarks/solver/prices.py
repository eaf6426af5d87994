"""What prices of memory can prove: `python -m benchmarks.solver.prices gpt-36` prints the cost of a mixture of plans.

A Lagrange multiplier for the memory of each stage makes a bound of every set of prices. None of these bounds, whatever
the subproblems, is above the mean cost of a mixture of plans whose mean memory fits at each stage. Here such a mixture
is found by column generation: plans from a chain program over blocks in which memory has a price and no limit, weights
from a linear program, whose duals are the next prices.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from benchmarks.harness.machine import machine
from benchmarks.harness.table import table
from benchmarks.solver.cases import Case, Of, problem_of
from remat_ir import Problem
from remat_solver.array_view import trace, view_of
from remat_solver.blocks.plans import menus_of, sequence_of
from remat_solver.blocks.segments import joined, segments_of
from remat_solver.blocks.table import Item
from remat_solver.kernels import loading

Floats = NDArray[np.float64]
_SEGMENTS, _ROUNDS, _STEADY = 100, 300, 40
_PENALTY = 200.0
"""What exceeding the memory by all of it costs in the linear program, in steps: none of it is left in the end."""


class PricedChain:
    """Plans of a training graph at prices of memory, one for the backward part of each segment, one for the rest."""

    def __init__(self, problem: Problem) -> None:
        segments = segments_of(problem.graph)
        assert segments is not None
        self.segments, blocks = joined(segments, _SEGMENTS)
        self.menus = menus_of(blocks)
        self.view = view_of(problem)
        graph, count = problem.graph, self.segments.count
        self.stage_of = np.full(graph.ops, count)
        for segment in range(count):
            self.stage_of[list(self.segments.backward(segment))] = segment
        joints = (sum(graph.value_bytes[v] for v in values) for values in self.segments.joints)
        self.joint = np.array([*joints], np.float64) / self.view.capacity
        self.forward = np.concatenate(([0.0], np.cumsum([menu.forward_ns for menu in self.menus])))

    def plan(self, prices: Floats) -> tuple[float, Floats]:
        """The cost above each op once and the memory in each stage, over the capacity, of the cheapest plan."""
        how = self._best(prices)
        items: list[Item] = []
        todo: list[Item | tuple[int, int]] = [(0, self.segments.count - 1)]
        while todo:
            head = todo.pop()
            if isinstance(head, Item):
                items.append(head)
                continue
            (s, t), (split, choice) = head, how[head]
            if split:
                items += [Item("pass", i) for i in range(s, split)]
                todo += [(s, split - 1), (split, t)]
            else:
                items.append(Item("tape", s, choice))
                todo.append(Item("reverse", s, choice))
                todo += [(s + 1, t)] if s < t else []
        run = trace(self.view, sequence_of(self.segments, self.menus, items))
        memory = np.zeros(self.segments.count + 1)
        stage = self.stage_of[np.minimum(run.stage, self.view.ops - 1)]
        np.maximum.at(memory, stage, run.memory / self.view.capacity)
        return float(self.view.cost[run.order].sum() - self.view.cost.sum()), memory

    def _best(self, prices: Floats) -> dict[tuple[int, int], tuple[int, int]]:
        """[s, t] where segments s … t are split, or 0, and by which choice s is taped then."""
        count, capacity = self.segments.count, self.view.capacity
        held = np.concatenate(([0.0], np.cumsum(prices[:count])))
        cost = np.zeros((count + 1, count + 1))
        how: dict[tuple[int, int], tuple[int, int]] = {}
        for t in range(count):
            first = prices[count] if t == count - 1 else 0.0  # the first forward pass is over when t is reversed
            for s in range(t, -1, -1):
                waits = held[t + 1] - held[s + 1] + first
                taped = [
                    self.forward[s + 1] - self.forward[s] + choice.extra_ns
                    + (choice.tape_bytes * waits + choice.backward_bytes * prices[s]) / capacity
                    for choice in self.menus[s].choices
                ]  # fmt: skip
                choice = int(np.argmin(taped))
                cost[s, t], how[s, t] = taped[choice] + (cost[s + 1, t] if s < t else 0.0), (0, choice)
                if s < t:
                    k = np.arange(s + 1, t + 1)
                    split = self.forward[k] - self.forward[s] + cost[k, t] + cost[s, k - 1]
                    split += self.joint[k - 1] * (held[t + 1] - held[k] + first)
                    at = int(np.argmin(split))
                    if split[at] < cost[s, t]:
                        cost[s, t], how[s, t] = split[at], (int(k[at]), 0)
        return how


def mixture(problem: Problem) -> tuple[float, int]:
    """The least mean overhead found of mixtures whose mean memory fits at each stage, and of how many plans it is."""
    chain, total = PricedChain(problem), problem.graph.total_cost_ns
    rows = chain.segments.count + 1
    prices = np.full(rows, 0.1 * total / rows)
    plans: list[tuple[float, Floats]] = []
    best, since, support = float("inf"), 0, 0
    for _ in range(_ROUNDS):
        plans.append(chain.plan(prices))
        memory = np.array([row for _, row in plans]).T
        found = linprog(
            [*(cost / total for cost, _ in plans), _PENALTY],
            A_ub=np.hstack([memory, -np.ones((rows, 1))]),
            b_ub=np.ones(rows),
            A_eq=[[1.0] * len(plans) + [0.0]],
            b_eq=[1.0],
        )
        prices = 0.5 * prices + 0.5 * np.maximum(0.0, -found.ineqlin.marginals) * total
        since = 0 if found.fun < best - 1e-6 else since + 1
        best, support = min(best, found.fun), int((found.x[:-1] > 1e-6).sum())
        if since > _STEADY:
            break
    return best, support


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the mixture of each instance at 1.05 times its least budget."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solver.prices", description=__doc__)
    parser.add_argument("instances", nargs="*", default=["gpt-36"])
    before = machine()
    loading().wait()
    rows = []
    for name in parser.parse_args(arguments).instances:
        overhead, plans = mixture(problem_of(Case(name, 1.05, "pairs", Of.PAIRS), []))
        rows.append((name, f"{100 * overhead:.2f}", str(plans)))
    print(
        table(
            ("at 1.05 of what pairs need", "no prices prove more than %", "plans in the mixture"),
            rows,
        )
    )
    print(f"\n{machine('highspy', 'numpy').since(before)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
