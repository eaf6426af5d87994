"""Plans by decomposition: a training graph as a chain of blocks, each distinct block solved once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from remat_ir import Graph, plan_of
from remat_ir.plan import permitted, without_unread

from ..array_view import ArrayView, Trace, trace, view_of
from ..deadline import TimeUp, never
from ..incumbent import Incumbent
from .segments import Block, Segments, joined, segments_of
from .table import NEVER, BlockTable, Item, Menu, menu_of

MOST_SEGMENTS = 200
"""More are joined, so that the program takes about a second and 40 MB."""
_WORK = 4e8
"""Additions that the program may make: a third of a second."""
_FEWEST_SLOTS, _MOST_SLOTS = 256, 2048
_SPARE = 1.15
"""How far above the budget the program's limits reach: what it counts is mostly more than what a plan needs."""
_FEWEST = 4
_TRIES = 6
"""Limits tried above the largest one whose plan fits, since plans do not grow evenly."""


def plans_by_blocks(
    incumbent: Incumbent,
    *,
    polish: Callable[[list[int]], None] | None = None,
) -> bool:
    """Offer the cheapest plan that the program over blocks leads to; False where the graph has too few narrow places.

    Needs the search to be compiled.

    `polish` is handed the cheapest sequence that does not fit, if there is one, and may make a plan of it.
    """
    problem = incumbent.problem
    segments = segments_of(problem.graph)
    if segments is None or segments.count < _FEWEST:
        return False
    try:
        segments, blocks = joined(segments, MOST_SEGMENTS, incumbent.stopped)
        if max(block.graph.ops for block in blocks) > max(32, problem.graph.ops // 2):
            return False
        menus = menus_of(blocks, stopped=incumbent.stopped)
        view = view_of(problem)
        slots = max(_FEWEST_SLOTS, min(_MOST_SLOTS, int(6 * _WORK / segments.count**3)))
        program = BlockTable(segments, menus, int(_SPARE * view.capacity), slots, incumbent.stopped)
    except TimeUp:
        return True
    near = _offer_best(incumbent, view, program)
    if near is not None and polish is not None and not incumbent.stopped():
        polish(near)
    return True


def menus_of(blocks: Iterable[Block], *, stopped: Callable[[], bool] = never) -> list[Menu]:
    """The menu of each block; equal blocks share one, found once."""
    known: dict[Graph, Menu] = {}
    menus: list[Menu] = []
    for block in blocks:
        if block.graph not in known:
            known[block.graph] = menu_of(block, stopped=stopped)
        menus.append(known[block.graph])
    return menus


def sequence_of(segments: Segments, menus: list[Menu], items: list[Item]) -> list[int]:
    """The ops in the order in which they run; recomputations that nothing reads, and forbidden ones, left out."""
    graph = segments.graph
    order: list[int] = []
    for what, segment, number in items:
        forward = segments.forward(segment)
        if what == "reverse":
            # op k > 0 of a block before its turn is the k-th forward op, and behind it comes the backward part
            first, turn = forward.start - 1, len(forward) + 1
            behind = segments.backward(segment).start - turn - 1
            ops: Iterable[int] = (
                op + (first if op < turn else behind) for op in menus[segment].choices[number].backward
            )
        else:
            ops = forward
        order += ops
    return list(without_unread(graph, tuple(permitted(graph, order))))


def _offer_best(incumbent: Incumbent, view: ArrayView, program: BlockTable) -> list[int] | None:
    """Offer the cheapest plan that fits, found by halving over memory limits; the cheapest next one that does not."""
    costs = program.costs()
    limits = [m for m in range(program.slots) if costs[m] < NEVER and (m == 0 or costs[m] < costs[m - 1])]
    near: list[int] | None = None

    def fits(limit: int) -> bool:
        nonlocal near
        order = sequence_of(program.segments, program.menus, program.items(limit))
        run: Trace = trace(view, order)
        if run.peak > view.capacity:
            near = order
            return False
        incumbent.offer(plan_of(view.graph, order), "blocks")
        return True

    low, high = -1, len(limits)
    while high - low > 1 and not incumbent.stopped():
        middle = (low + high) // 2
        if fits(limits[middle]):
            low = middle
        else:
            high = middle
    for limit in limits[high + 1 : high + 1 + _TRIES]:
        if incumbent.stopped():
            break
        fits(limit)
    if high < len(limits) and not incumbent.stopped():
        fits(limits[high])
    return near
