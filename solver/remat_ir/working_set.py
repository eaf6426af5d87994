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
    return frozenset(graph.once) | {graph.value_op[value] for value in graph.keep}


def working_set(graph: Graph) -> WorkingSet:
    """The largest need of any single first computation: a lower bound on every budget that suffices.

    While op k is first computed, every plan holds: the fixed bytes; the inputs of k; all its non-optional outputs; its
    workspace; the kept values of earlier ops; and each value of a pinned op before k that an op after k reads, since
    it cannot be made again and that op has yet to be computed for the first time; with a link to the host it may be
    there instead, and does not count.
    """
    pinned = pinned_ops(graph)
    keep = frozenset(graph.keep)
    last_use = [readers[-1] if readers else -1 for readers in graph.users]
    leaving: list[list[int]] = [[] for _ in range(graph.ops)]
    held: set[int] = set()
    held_bytes = 0
    worst = WorkingSet(0, -1)
    for op in range(graph.ops):
        need = graph.fixed_bytes + held_bytes + graph.op_workspace_bytes[op]
        need += sum(graph.value_bytes[v] for v in graph.op_inputs[op] if v not in held)
        need += sum(graph.value_bytes[v] for v in graph.op_always[op])
        if need > worst.least_bytes:
            worst = WorkingSet(op, need)
        for value in leaving[op]:
            held.remove(value)
            held_bytes -= graph.value_bytes[value]
        for value in graph.op_values[op]:
            if value in keep or (graph.link is None and op in pinned and last_use[value] > op):
                held.add(value)
                held_bytes += graph.value_bytes[value]
                if value not in keep:
                    leaving[last_use[value]].append(value)
    return worst
