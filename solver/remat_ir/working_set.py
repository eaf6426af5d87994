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
    """The largest need of any single first computation (`Graph.first_needs`): a lower bound on every budget that
    suffices.
    """
    need = max(graph.first_needs)
    return WorkingSet(graph.first_needs.index(need), graph.fixed_bytes + need)
