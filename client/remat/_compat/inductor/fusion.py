"""Which kernels Inductor may fuse: none where that would run others earlier than the plan does."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .parts import InductorChoices, V

CONVOLUTIONS = frozenset({torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default})


class PlanOrder(InductorChoices):
    """Inductor's own choices, but for fusions that pull other kernels out of the plan's order.

    A fused kernel runs where the first of its parts stood. What the later part still waits for is run before, with all
    that this holds in memory: a recomputation fused with a kernel far ahead of it, by a mask that both read, is done by
    then. The order of the graph is the plan's.

    Beside convolutions sums stay together: how much else is in their kernel decides whether the rest of a vector is
    summed in vectors, too, and so how its sums round.
    """

    @staticmethod
    def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Whether two kernels that read the same may become one."""
        if not InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score):
            return False
        sums = node1.is_reduction() and node2.is_reduction()
        return (sums and _has_convolutions()) or not _pulls_others(scheduler, node1, node2)

    @staticmethod
    def can_fuse_vertical(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Whether a kernel and one that reads what it writes may become one."""
        allowed = InductorChoices.can_fuse_vertical(scheduler, node1, node2, shared_data_score)
        return allowed and not _pulls_others(scheduler, node1, node2)

    def uuid(self) -> str:
        """For the keys of Inductor's caches."""
        return "remat PlanOrder 1"


def _has_convolutions() -> bool:
    lowered: Any = V.graph.module
    return any(node.target in CONVOLUTIONS for node in lowered.graph.nodes)


def _pulls_others(scheduler: Any, node1: Any, node2: Any) -> bool:
    first, later = sorted((node1, node2), key=lambda node: int(node.min_order))
    awaited = (scheduler.name_to_fused_node.get(name) for name in later.ancestors)
    return any(n is not None and n is not first and n is not later and n.min_order > first.max_order for n in awaited)


def fusing(choices: InductorChoices) -> contextlib.AbstractContextManager[Any]:
    """Let these choices be made inside: the setting alone is read once in a thread's life."""
    handler: contextlib.AbstractContextManager[Any] = V.set_choices_handler(choices)
    return handler
