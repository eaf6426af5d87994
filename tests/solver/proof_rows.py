"""Every row that a certificate can name, and the point that a plan without useless steps maps to, for small graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from remat_ir import Compute, Graph, Plan, Problem
from remat_ir.proof.certificate import Column, Row
from remat_ir.proof.rows import KINDS, InvalidProof, Relaxation


def every_row(on: Relaxation, covers: Sequence[Row] = ()) -> list[Row]:
    """The rows of all kinds that exist for these cuts and spans: each combination of indices is tried."""
    graph, found = on.graph, []
    intervals = [(a, b) for a in range(1, on.stages) for b in range(a, on.stages)]
    for a, b in intervals:
        for value in range(graph.values):
            found += [("first", a, b, value), ("stay", a, b, value)]
        for op in range(graph.ops):
            found.append(("or", a, b, op))
            found += [("read", a, b, op, value) for value in graph.op_inputs[op]]
            found += [("part", a, b, c, d, op) for c, d in intervals]
    for c in range(1, on.stages):
        found.append(("memory", c))
        found += [("through", c, value) for value in range(graph.values)]
        found += [("rerun", c, op) for op in range(graph.ops)]
    good = []
    for row in (*found, *covers):
        try:
            on.inequality(row)
        except InvalidProof:
            continue
        good.append(row)
    assert {row[0] for row in good} <= set(KINDS)
    return good


class Struck:
    """A plan without its useless computations and holdings, computation by computation.

    `order` are the ops that run; `resident[p]` are the values that are resident right after computation p and read
    later or kept; `stage[p]` is the op whose first computation ends the stage of p.
    """

    def __init__(self, graph: Graph, plan: Plan) -> None:
        computes = [step for step in plan.steps if isinstance(step, Compute)]
        order = [step.op for step in computes]
        sources: list[list[int]] = []  # position -> positions that made what it reads
        current: dict[int, int] = {}
        for p, op in enumerate(order):
            sources.append([current[v] for v in graph.op_inputs[op]])
            kept = graph.op_always[op] if computes[p].kept is None else computes[p].kept
            current |= dict.fromkeys(kept, p)
        useful = {order.index(op) for op in range(graph.ops)}
        for p in range(len(order) - 1, -1, -1):
            if p in useful:
                useful |= set(sources[p])
        self.order = [op for p, op in enumerate(order) if p in useful]
        reached = -1
        self.stage = []
        for op in self.order:
            reached = max(reached, op)
            self.stage.append(reached if op == reached and op not in self.order[: len(self.stage)] else reached + 1)
        self.resident: list[set[int]] = [set() for _ in self.order]
        made: dict[int, int] = {}
        for p, op in enumerate(self.order):
            for value in graph.op_inputs[op]:
                for q in range(made[value], p):
                    self.resident[q].add(value)
            made |= dict.fromkeys(graph.op_values[op], p)
        for value in graph.keep:
            for q in range(made[value], len(self.order)):
                self.resident[q].add(value)

    def within(self, on: Relaxation, a: int, b: int) -> list[int]:
        """The positions of coarse stages a … b."""
        return [p for p, stage in enumerate(self.stage) if on.first[a] <= stage <= on.cuts[b]]

    def at(self, on: Relaxation, column: Column) -> int:
        """What a column is for this plan."""
        kind, *rest = column
        numbers = [int(number) for number in rest]
        if kind == "run":
            a, b, op = numbers
            return int(any(self.order[p] == op for p in self.within(on, a, b)))
        c, value = numbers
        if kind == "hold":
            return int(value in self.resident[self.order.index(on.cuts[c - 1])])
        here = self.within(on, c, c)
        made = any(self.order[p] == on.graph.value_op[value] for p in here)
        late = value in self.resident[here[-1]] or value in on.graph.op_inputs[on.cuts[c]]
        return int(late and not made)


def cost_of(graph: Graph, order: Sequence[int]) -> int:
    """ns of a sequence of computations."""
    return sum(graph.op_cost_ns[op] for op in order)


def laminar(cuts: Sequence[int], splits: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Spans as repeated cutting leaves them: any two nested or apart; `splits` choose which are there."""
    found: set[tuple[int, int]] = set()

    def divide(a: int, b: int) -> Iterator[tuple[int, int]]:
        if a < b:
            yield a, b
            middle = a + splits[(a + 3 * b) % len(splits)] % (b - a)
            yield from divide(a, middle)
            yield from divide(middle + 1, b)

    if len(cuts) > 2:
        found |= set(divide(1, len(cuts) - 1))
    return tuple(sorted(span for i, span in enumerate(sorted(found)) if splits[i % len(splits)] % 3))


def relaxation(problem: Problem, cuts: tuple[int, ...], spans: tuple[tuple[int, int], ...]) -> Relaxation:
    """The checker's relaxation of a problem."""
    return Relaxation(problem.graph, problem.budget_bytes - problem.graph.fixed_bytes, cuts, spans)
