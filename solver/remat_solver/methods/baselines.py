"""The baselines of Checkmate's Table 1, each searching its own parameter for the cheapest plan within the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from remat_ir import Graph, plan_of

from ..baselines import chen, revolve
from ..baselines.recompute import Retained, computed
from ..baselines.shape import articulation_points, linear
from ..incumbent import Incumbent

MOST_SLOTS = 128
"""Numbers of slots that the search of `griewank` tries."""
MOST_REPEATS = 60
"""Steps per forward op above which a revolve schedule is not tried: it is far from any plan that anyone would run."""


def griewank(incumbent: Incumbent, options: object = None) -> None:
    """Revolve on a linear graph, with every number of slots (Griewank and Walther, Algorithm 799)."""
    _baseline(incumbent, "griewank", _revolutions, only_linear=True)


def chen_sqrt(incumbent: Incumbent, options: object = None) -> None:
    """√n segments of a linear graph (Chen et al., Section 3.1)."""
    _baseline(incumbent, "chen-sqrt", _roots(_all_forward), only_linear=True)


def chen_greedy(incumbent: Incumbent, options: object = None) -> None:
    """Segments of about equal memory of a linear graph, with a search over their size (Chen et al., Alg. 3)."""
    _baseline(incumbent, "chen-greedy", _greedy(_all_forward), only_linear=True)


def ap_sqrt(incumbent: Incumbent, options: object = None) -> None:
    """√n segments between articulation points of the forward pass (Checkmate, Section 5.1.1)."""
    _baseline(incumbent, "ap-sqrt", _roots(articulation_points))


def ap_greedy(incumbent: Incumbent, options: object = None) -> None:
    """Segments of about equal memory between articulation points (Checkmate, Section 5.1.1)."""
    _baseline(incumbent, "ap-greedy", _greedy(articulation_points))


def linearized_sqrt(incumbent: Incumbent, options: object = None) -> None:
    """√n segments of the topological order (Checkmate, Section 5.1.2)."""
    _baseline(incumbent, "linearized-sqrt", _roots(_all_forward))


def linearized_greedy(incumbent: Incumbent, options: object = None) -> None:
    """Segments of about equal memory of the topological order (Checkmate, Section 5.1.2)."""
    _baseline(incumbent, "linearized-greedy", _greedy(_all_forward))


def _all_forward(graph: Graph, forward: int) -> Sequence[int]:
    return range(forward)


def _roots(candidates: Callable[[Graph, int], Sequence[int]]) -> Callable[[Graph, int], Iterator[Retained]]:
    def choices(graph: Graph, forward: int) -> Iterator[Retained]:
        yield chen.retained(graph, forward, chen.every_root(candidates(graph, forward)))

    return choices


def _greedy(candidates: Callable[[Graph, int], Sequence[int]]) -> Callable[[Graph, int], Iterator[Retained]]:
    def choices(graph: Graph, forward: int) -> Iterator[Retained]:
        for checkpoints in chen.greedy_choices(graph, forward, candidates(graph, forward)):
            yield chen.retained(graph, forward, checkpoints)

    return choices


def _revolutions(graph: Graph, forward: int) -> Iterator[Retained]:
    """From as many slots as steps to few."""
    for slots in _spread(forward, MOST_SLOTS):
        if revolve.advances(forward, slots) <= MOST_REPEATS * forward:
            yield revolve.retained(graph, forward, slots)


def _spread(most: int, count: int) -> list[int]:
    """most … 1; where that is more than `count` numbers, all the small ones and ever fewer of the large."""
    if most <= count:
        return list(range(most, 0, -1))
    half = count // 2
    ratio = (most / half) ** (1 / half)
    return sorted({*range(1, half + 1), *(round(half * ratio**i) for i in range(half + 1))}, reverse=True)


def _baseline(
    incumbent: Incumbent,
    name: str,
    choices: Callable[[Graph, int], Iterable[Retained]],
    *,
    only_linear: bool = False,
) -> None:
    """Offer the plans of all choices that fit and are cheaper than what is there."""
    graph = incumbent.problem.graph
    forward = graph.backward_from
    if forward is None or forward == 0:
        incumbent.ends_without_plan(f"{name} does not apply: the graph marks no backward pass after a forward one.")
        return
    if only_linear and not linear(graph, forward):
        incumbent.ends_without_plan(f"{name} does not apply: the forward pass is not linear.")
        return
    best: int | None = None
    least: int | None = None
    for retained in choices(graph, forward):
        order = computed(graph, retained)
        # its replay, here and of the answer, takes as long again: a deep linear order may take nine computations an op
        if incumbent.interrupted():
            return
        cost = sum(graph.op_cost_ns[op] for op in order)
        if best is None or cost < best:
            peak = incumbent.offer_or_suffices(plan_of(graph, order), name)
            least = peak if least is None else min(least, peak)
            if peak <= incumbent.problem.budget_bytes:
                best = cost
        if incumbent.stopped():
            return
    if best is None:
        incumbent.ends_without_plan(f"{name} has no plan within the budget; its least peak is {least} bytes.")
