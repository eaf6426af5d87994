"""Rotor: the optimal persistent schedule of a chain, or of a graph that is one (RR-9302, 4.2); its baselines."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from remat_ir import Chain, ChainPlan, ChainStep, Graph, Plan, Verb, plain_peak, plan_of, readable
from remat_ir.greedy import peak_of
from remat_ir.read import LARGEST_INTEGER
from remat_ir.restrictions import CHAIN_STAGES, NO_TRANSFERS, PERSISTENT

from ..deadline import Deadline, TimeUp
from ..incumbent import Incumbent
from ..options import Options, whole
from .network import linear_network
from .persistent import MOST_CELLS, LeastOfStages, Persistent, Stages
from .table import Least, Table

MOST_SLOTS = 20_000
MOST_STAGES = 1200

_MAKINGS = 2.0
"""How often as long as a plan takes to be made and checked it takes to be made, offered, and checked again in the
answer. A plan near the least budget may have 60 times as many steps as the graph has ops.
"""
_NEXT = 3.0
"""The same for a plan that is read from the table: its steps are chosen there one by one."""


@dataclass(frozen=True)
class RotorOptions(Options):
    """`slots`: S, how finely memory is cut (RR-9302, Section 5.2: 500)."""

    slots: int = whole(500, 1, MOST_SLOTS)


def rotor(incumbent: Incumbent, options: RotorOptions, *, tapes: bool = True) -> None:
    """Offer the best persistent plan, and raise the bound over persistent schedules; without `tapes` it is `revolve`.

    Sizes are rounded to slots; the bound makes up for the rounding, and a plan is taken only where it fits in bytes.
    """
    with contextlib.suppress(TimeUp):
        if isinstance(incumbent.problem.subject, Chain):
            _of_chain(incumbent, incumbent.problem.subject, options.slots, tapes=tapes)
        else:
            _of_network(incumbent, options.slots, tapes=tapes)


def _of_chain(incumbent: Incumbent, chain: Chain, slots: int, *, tapes: bool) -> None:
    source = "rotor" if tapes else "revolve"
    within = (PERSISTENT,) if chain.link_bytes_per_s is None else (PERSISTENT, NO_TRANSFERS)
    if _too_many(incumbent, chain.stages, within):
        return
    least = Least(chain, tapes=tapes, stop=incumbent.stopped)
    incumbent.suffices(least.budget_bytes)
    budget = incumbent.problem.budget_bytes
    if least.budget_bytes > budget:
        _nothing_fits(incumbent, least.budget_bytes, within, tapes=tapes)
        return
    try:
        table = Table(chain, budget, slots, nearest=True, tapes=tapes, stop=incumbent.stopped)
    except TimeUp:
        incumbent.offer(least.plan(), source)
        return
    # where memory is so short that rounding loses every plan, the one of the least peak remains
    plan = table.cheapest_plan() or least.plan()
    incumbent.offer(plan, source)
    bound = table.bound_ns(table.slots)
    if not tapes:
        return
    if bound is None:
        incumbent.nothing_within(within, "No persistent schedule fits the budget.")
    else:
        incumbent.raise_bound(bound, source, within)


def _of_network(incumbent: Incumbent, slots: int, *, tapes: bool) -> None:
    graph = incumbent.problem.graph
    network = linear_network(graph)
    if network is None:
        incumbent.ends_without_plan("This graph is not a chain of stages, so it has no chain plan.", (PERSISTENT,))
        return
    within = (PERSISTENT, CHAIN_STAGES)  # a graph has plans besides those of its stages
    if _too_many(incumbent, network.stages, within):
        return
    stages = Stages(network, incumbent.stopped)
    least = LeastOfStages(stages, tapes=tapes, stop=incumbent.stopped)
    budget = incumbent.problem.budget_bytes
    source = "rotor" if tapes else "revolve"
    began_s = incumbent.deadline.elapsed()
    sequence = least.sequence()
    watch = incumbent.deadline
    if watch.work is None and watch.remaining() < _MAKINGS * _making_s(graph) * len(sequence) / graph.ops:
        incumbent.stop_for("time")
        return
    smallest = network.invert(sequence)
    # stages hold what leads in, and their tape, to their end; a replay may free some of it sooner
    peak = incumbent.offer_or_suffices(smallest, source)
    if least.budget_bytes > budget:
        if budget < peak < LARGEST_INTEGER:
            _nothing_fits(incumbent, peak, within, tapes=tapes)
        return
    if peak > budget:
        incumbent.offer(smallest, source)  # a bug: it is dropped, with what it breaks
    # where memory is so short that rounding loses every plan, this one remains: it is here before the table is
    spare_s = _NEXT * (incumbent.deadline.elapsed() - began_s)

    def fitting(sequence: Sequence[int]) -> Plan | None:
        plan = network.invert(sequence)
        return plan if peak_of(graph, plan) <= budget else None

    def stopped() -> bool:
        return incumbent.stopped() or incumbent.deadline.remaining() < spare_s

    slots = min(slots, max(1, MOST_CELLS // network.stages**2))
    table = Persistent(stages, budget, slots=slots, tapes=tapes, stop=stopped)
    cheapest = table.cheapest(fitting)
    if cheapest is not None:
        incumbent.offer(cheapest, source)
    if tapes and table.added_ns is not None:
        incumbent.raise_bound(graph.total_cost_ns + table.added_ns, "rotor", within)


def _making_s(graph: Graph) -> float:
    """Seconds in which the plan without recomputations is made and checked here and now: the least of three times."""
    taken = []
    for _ in range(3):
        watch = Deadline(None)
        peak_of(graph, plan_of(graph, range(graph.ops)))
        taken.append(watch.elapsed())
    return min(taken)


def _too_many(incumbent: Incumbent, stages: int, within: tuple[str, ...]) -> bool:
    if stages <= MOST_STAGES:
        return False
    incumbent.ends_without_plan(f"The chain has {stages} stages, more than the {MOST_STAGES} in reach.", within)
    return True


def _nothing_fits(incumbent: Incumbent, least_bytes: int, within: tuple[str, ...], *, tapes: bool) -> None:
    kind = "" if tapes else " without tapes"
    reason = f"No persistent schedule{kind} fits; the least budget for one is {readable(least_bytes, up=True)}."
    if tapes:
        incumbent.nothing_within(within, reason)
    else:
        incumbent.ends_without_plan(reason, within)


def revolve(incumbent: Incumbent, options: RotorOptions) -> None:
    """Offer the best plan that saves activations only, with an F_all right before each backward step: a baseline."""
    rotor(incumbent, options, tapes=False)


@dataclass(frozen=True)
class SequentialOptions(Options):
    """`segments`: how many; None tries every number from 2 to 2√L and offers each plan that fits."""

    segments: int | None = whole(None, 1)


def sequential(incumbent: Incumbent, options: SequentialOptions) -> None:
    """Offer the periodic plans that fit: a baseline.

    In the forward phase each segment but the last keeps its input only; each is run again with its tapes when its
    backward steps come.
    """
    chain = incumbent.problem.subject
    assert isinstance(chain, Chain)
    most = max(2, math.floor(2 * math.sqrt(chain.stages)))
    counts = range(2, most + 1) if options.segments is None else (options.segments,)
    least = plain_peak(chain)
    for segments in counts:
        if incumbent.stopped():
            return
        plan = segmented_plan(chain, min(segments, chain.stages))
        least = min(least, incumbent.offer_or_suffices(plan, f"sequential, {segments} segments"))
    if incumbent.cost_ns is None:
        incumbent.ends_without_plan(f"No number of segments fits; the least peak is {readable(least)}.")


def segmented_plan(chain: Chain, segments: int) -> ChainPlan:
    """The plan with so many segments of L // segments stages each, the last one taking the rest."""
    size = chain.stages // segments
    starts = [1 + i * size for i in range(segments)]
    ends = [*(start - 1 for start in starts[1:]), chain.stages]
    steps: list[ChainStep] = []
    for start, end in zip(starts[:-1], ends[:-1], strict=True):
        steps.append(ChainStep(Verb.F_CK, start))
        steps += (ChainStep(Verb.F_NONE, stage) for stage in range(start + 1, end + 1))
    for start, end in zip(reversed(starts), reversed(ends), strict=True):
        steps += (ChainStep(Verb.F_ALL, stage) for stage in range(start, end + 1))
        steps += (ChainStep(Verb.B, stage) for stage in range(end, start - 1, -1))
    return ChainPlan(tuple(steps))
