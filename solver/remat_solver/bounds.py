"""What holds for every plan, seen at once: a certificate that a budget is too small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from remat_ir import Chain, Graph, Join, Subject


class WorkingSet(NamedTuple):
    """The op whose first computation needs the most bytes in any plan, and those bytes, fixed ones included."""

    op: int
    least_bytes: int


def least_need(subject: Subject) -> tuple[int, str]:
    """A lower bound on every budget that suffices, in bytes, and what it is that needs them."""
    if isinstance(subject, Join):
        slots = least_slots(subject.lengths)
        return slots * subject.slot_bytes, f"keeping the start and the end of every branch in {slots} slots"
    graph = subject.to_graph() if isinstance(subject, Chain) else subject
    least = working_set(graph)
    if not isinstance(subject, Chain):
        return least.least_bytes, graph.op_label(least.op)
    count = subject.stages
    who = f"forward stage {least.op + 1}" if least.op < count else f"backward stage {2 * count + 1 - least.op}"
    return least.least_bytes, who if least.op != count else "the first gradient"


def least_slots(lengths: Sequence[int], kept: Sequence[bool] = ()) -> int:
    """c_min, the fewest slots in which a join can be executed (RR-9273, Lemma 4).

    `kept` is b: whether the last gradient of each branch stays in memory; none does by default.
    """
    kept = kept or (False,) * len(lengths)
    if not any(lengths):
        return len(lengths)
    least = len(lengths) + sum(length != 0 for length in lengths)
    spared = 1 in lengths or any(length == 0 and not stays for length, stays in zip(lengths, kept, strict=True))
    return least if spared else least + 1


def pinned_ops(graph: Graph) -> frozenset[int]:
    """Ops that no plan computes twice: `once` ops, and those that make a value which stays to the end.

    A kept value is never freed and no value is made while it is resident, so its op cannot run again.
    """
    return frozenset(graph.once) | {graph.value_op[value] for value in graph.keep}


def working_set(graph: Graph) -> WorkingSet:
    """The largest need of any single first computation: a lower bound on every budget that suffices.

    While op k is first computed, every plan holds: the fixed bytes; the inputs of k; all its non-optional outputs; its
    workspace; the kept values of earlier ops; and each value of a pinned op before k that an op after k reads, since
    it cannot be made again and that op has yet to be computed for the first time.
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
            if value in keep or (op in pinned and last_use[value] > op):
                held.add(value)
                held_bytes += graph.value_bytes[value]
                if value not in keep:
                    leaving[last_use[value]].append(value)
    return worst
