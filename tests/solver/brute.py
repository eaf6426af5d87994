"""Exact optima of small problems by Dijkstra over sets of resident values, sharing nothing with any solver.

Run as a command it prints how often, and by how much, the space of the Checkmate program misses cheaper plans:

    python tests/solver/brute.py [graphs per row]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, combinations
from typing import Any, NamedTuple

from remat_ir import Answer, Compute, Free, Graph, Plan, Problem, Status, verify
from solver.shortest import shortest

ONE_PER_STAGE = "one-per-stage"
FORWARD_OPS = "forward-ops"
FIXED_ORDER = "fixed-order"
ANY_ORDER = "any-order"
ANY_IN_STAGES = "any-order-in-stages"


class Optimum(NamedTuple):
    """The least cost in ns and a plan that has it; None and None where nothing fits the budget.

    `order` is the order of the first computations.
    """

    cost_ns: int | None
    plan: Plan | None
    order: tuple[int, ...] = ()


class _Move(NamedTuple):
    step: Compute | Free
    cost: int
    state: tuple[Any, int]


def optimum(problem: Problem, space: str = FIXED_ORDER, sweeps: int = 1) -> Optimum:
    """The cheapest plan of a space.

    Spaces: "one-per-stage": before each first computation, every earlier op may be recomputed, in op order, once in
    each of `sweeps` sweeps; "forward-ops": the same, but only ops before `backward_from`, and only from its stage on;
    "fixed-order": first computations in op order, recomputations without limit; "any-order": not even that;
    "any-order-in-stages": as many sweeps over all ops, in index order, as there are ops.

    A state is (how far, resident values); its edges are the steps of a plan, as the verifier has them: free a value, or
    compute an op, keeping any of its optional values. Values that an op always makes are kept and may be freed next,
    which costs nothing and never holds more than was charged while it ran. The number of states is exponential in the
    values: for graphs of up to about 8 ops.
    """
    graph = problem.graph
    start: tuple[Any, int] = (_beginning(space), 0)
    found = shortest(
        start,
        lambda state: _moves(problem, state, space, sweeps),
        lambda state: _ended(graph, state[0], space),
    )
    if found is None:
        return Optimum(None, None)
    cost, steps = found
    plan = Plan(tuple(steps))
    if space not in (ANY_ORDER, ANY_IN_STAGES):
        assert verify(problem, plan).cost_ns == cost
    return Optimum(cost, plan, tuple(dict.fromkeys(plan.computes)))


def agrees(problem: Problem, answer: Answer, least: int | None) -> None:
    """Check an answer, in what it says of all plans, against the least cost of any; None where there is none."""
    if answer.plan is not None:
        verify(problem, answer.plan, cost_ns=answer.cost_ns, peak_bytes=answer.peak_bytes)
    if answer.cost_ns is not None:
        assert answer.cost_ns >= least
    if answer.bound_ns is not None and not answer.restricted_to:
        assert least is None or answer.bound_ns <= least
    if answer.status is Status.OPTIMAL and not answer.restricted_to:
        assert answer.cost_ns == least
    if answer.status is Status.INFEASIBLE:
        assert least is None


def _beginning(space: str) -> Any:
    # how far: (stage, sweep, next op) in stages; the number of ops done in order; the set of ops done in any order
    return (0, 0, 0) if space in (ONE_PER_STAGE, FORWARD_OPS, ANY_IN_STAGES) else 0


def _ended(graph: Graph, far: Any, space: str) -> bool:
    if space in (ONE_PER_STAGE, FORWARD_OPS):
        return bool(far[0] == graph.ops)
    if space == ANY_IN_STAGES:
        return bool(far[2] == (1 << graph.ops) - 1)
    return bool(far == graph.ops if space == FIXED_ORDER else far == (1 << graph.ops) - 1)


def _moves(problem: Problem, state: tuple[Any, int], space: str, sweeps: int) -> Iterator[_Move]:
    graph = problem.graph
    far, resident = state
    for value in range(graph.values):
        if resident >> value & 1 and value not in graph.keep:
            yield _Move(Free(value), 0, (far, resident & ~(1 << value)))
    held = graph.fixed_bytes + sum(graph.value_bytes[v] for v in range(graph.values) if resident >> v & 1)
    for op, then in _choices(graph, far, space, sweeps):
        again = _computed(graph, far, op, space)
        if again and (op in graph.once or any(v in graph.keep for v in graph.op_values[op])):
            continue
        if any(not resident >> value & 1 or _consumed(graph, far, value, space) for value in graph.op_inputs[op]):
            continue
        always = graph.op_always[op]
        if any(resident >> value & 1 for value in always):
            continue
        absent = [v for v in graph.op_values[op] if v in graph.optional and not resident >> v & 1]
        for chosen in chain.from_iterable(combinations(absent, size) for size in range(len(absent) + 1)):
            made = tuple(sorted((*always, *chosen)))
            during = held + graph.op_workspace_bytes[op] + sum(graph.value_bytes[v] for v in made)
            if during <= problem.budget_bytes:
                after = resident | sum(1 << v for v in made)
                yield _Move(Compute(op, made), graph.op_cost_ns[op], (then, after))


def _choices(graph: Graph, far: Any, space: str, sweeps: int) -> Iterator[tuple[int, Any]]:
    """Ops that may come next, and how far that is."""
    if space in (ONE_PER_STAGE, FORWARD_OPS):
        stage, sweep, least = far
        border = graph.ops if graph.backward_from is None else graph.backward_from
        for around in range(sweep, sweeps):
            for op in range(least if around == sweep else 0, stage):
                if space == ONE_PER_STAGE or op < border <= stage:
                    yield op, (stage, around, op + 1)
        yield stage, (stage + 1, 0, 0)
    elif space == ANY_IN_STAGES:
        stage, least, done = far
        for op in range(graph.ops):
            if op >= least or stage + 1 < graph.ops:
                yield op, (stage if op >= least else stage + 1, op + 1, done | 1 << op)
    elif space == FIXED_ORDER:
        for op in range(min(far + 1, graph.ops)):
            yield op, max(far, op + 1)
    else:
        for op in range(graph.ops):
            yield op, far | 1 << op


def _computed(graph: Graph, far: Any, op: int, space: str) -> bool:
    if space in (ONE_PER_STAGE, FORWARD_OPS):
        return bool(op < far[0])
    if space == ANY_IN_STAGES:
        return bool(far[2] >> op & 1)
    return bool(op < far if space == FIXED_ORDER else far >> op & 1)


def _consumed(graph: Graph, far: Any, value: int, space: str) -> bool:
    return value in graph.consumes and _computed(graph, far, graph.users[value][-1], space)


def main(graphs: int) -> None:
    """Print the table of what the restricted spaces miss."""
    from solver.little import little_problems

    print("| graphs | ops | problems | space | misses | worst | mean of misses | no plan though one exists |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for rich in (False, True):
        for ops in (6, 7, 8):
            drawn = [p for seed in range(graphs) for p in little_problems(seed, ops, rich=rich, budgets=4)]
            drawn = [p for p in drawn if p.graph.values <= 13]
            true = [optimum(p, FIXED_ORDER).cost_ns for p in drawn]
            solved = sum(cost is not None for cost in true)
            rows = (
                ("one recomputation per stage", [optimum(p, ONE_PER_STAGE).cost_ns for p in drawn], true),
                ("two sweeps per stage", [optimum(p, ONE_PER_STAGE, 2).cost_ns for p in drawn], true),
                ("forward ops in backward stages", [optimum(p, FORWARD_OPS).cost_ns for p in drawn], true),
                ("fixed order, against any order", true, [optimum(p, ANY_ORDER).cost_ns for p in drawn]),
            )
            for name, costs, better in rows:
                excess = [
                    (a - b) / b for a, b in zip(costs, better, strict=True) if a is not None and b is not None and a > b
                ]
                none = sum(a is None and b is not None for a, b in zip(costs, better, strict=True))
                worst = f"{100 * max(excess, default=0.0):.1f} %"
                mean = f"{100 * sum(excess) / max(1, len(excess)):.1f} %"
                kind = "whole model" if rich else "one value per op"
                print(f"| {kind} | {ops} | {solved} | {name} | {len(excess)} | {worst} | {mean} | {none} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
