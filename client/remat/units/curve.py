"""The plans of a unit of a model at several bounds: the problems that give its trade-off."""

from __future__ import annotations

from collections.abc import Iterator

from remat_ir import Graph, Problem
from remat_ir.working_set import working_set

from ..planning.budget import UnitBytes, bounded

LEVELS = 9
"""Bounds on what is held, from the least to what plain training holds."""

PEAKS = 3
"""Bounds on the peak at each of them."""


def curve_problems(graph: Graph, least: tuple[int, int], plain: tuple[int, int]) -> Iterator[tuple[UnitBytes, Problem]]:
    """Problems between two plans given as (peak, held) in bytes above the fixed ones, the most spacious first."""
    floor = working_set(graph).least_bytes - graph.fixed_bytes
    most = max(least[0], plain[0])
    for j in range(PEAKS):
        peak = most - (most - floor) * j // PEAKS
        for i in range(LEVELS):
            held = plain[1] - (plain[1] - least[1]) * i // (LEVELS - 1)
            if held <= peak:
                size = UnitBytes(peak, held)
                yield size, Problem(bounded(graph, size), graph.fixed_bytes + peak)
