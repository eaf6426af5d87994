"""What any single op needs at least: a certificate that a budget is too small."""

from __future__ import annotations

from typing import NamedTuple

from .graph import Graph


class WorkingSet(NamedTuple):
    """The op whose first computation needs the most bytes in any plan, and those bytes, fixed ones included."""

    op: int
    least_bytes: int


def pinned_ops(graph: Graph) -> frozenset[int]:
    """Ops that no plan computes twice: `once` ops, and those that make a value which stays to the end.

    A kept value is never freed and no value is made while it is resident, so its op cannot run again.
    """
    return frozenset(op for op, last in enumerate(graph.last_stage) if last == op)


def working_set(graph: Graph) -> WorkingSet:
    """The largest need of any single first computation: a lower bound on every budget that suffices.

    While op k is first computed, every plan holds: the fixed bytes; the inputs of k; all its non-optional outputs; its
    workspace; the kept values of earlier ops; and each value of an op before k that may not run after k, if an op
    after k reads it, since it cannot be made again and that op has yet to be computed for the first time; with a link
    to the host it may be there instead, and does not count.
    """
    keep = frozenset(graph.keep)
    last_use = [readers[-1] if readers else -1 for readers in graph.users]
    entering: list[list[int]] = [[] for _ in range(graph.ops + 1)]
    leaving: list[list[int]] = [[] for _ in range(graph.ops)]
    held: set[int] = set()
    held_bytes = 0
    worst = WorkingSet(0, -1)
    for value, op in enumerate(graph.value_op):
        if value in keep:
            entering[op + 1].append(value)
        elif graph.link is None and last_use[value] > (since := max(op + 1, graph.last_stage[op])):
            entering[since].append(value)
            leaving[last_use[value]].append(value)
    for op in range(graph.ops):
        held.update(entering[op])
        held_bytes += sum(graph.value_bytes[value] for value in entering[op])
        need = graph.fixed_bytes + held_bytes + graph.op_workspace_bytes[op]
        need += sum(graph.value_bytes[v] for v in graph.op_inputs[op] if v not in held)
        need += sum(graph.value_bytes[v] for v in graph.op_always[op])
        if need > worst.least_bytes:
            worst = WorkingSet(op, need)
        for value in leaving[op]:
            held.remove(value)
            held_bytes -= graph.value_bytes[value]
    return worst
