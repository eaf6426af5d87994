"""The plans of a part of a step at several bounds: the problems that give its trade-off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from remat_ir import Graph, InvalidPlan, Moment, Plan, Problem, least_memory, replay, verify, working_set

from ..capture.operations import Operations
from ..lowering.peak import Phases, kernel_phases
from ..planning.allot import Option
from ..planning.budget import UnitBytes, bounded, bytes_of
from ..planning.greedy import greedy_answer
from ..planning.options import SolveOptions
from ..planning.planner import Planner
from ..profiling.profile import Profiled

LEVELS = 9
"""Bounds on what is held, from the least to what plain training holds."""

PEAKS = 3
"""Bounds on the peak at each of them."""


class Priced(Protocol):
    """A part of a step whose operations have been priced."""

    @property
    def operations(self) -> Operations:
        """What runs, in order."""
        ...

    @property
    def graph(self) -> Graph:
        """The problem that it poses."""
        ...

    @property
    def profiled(self) -> Profiled:
        """What its kernels cost."""
        ...


class Point(NamedTuple):
    """One plan of a unit's graph: within which bounds, and what it comes to."""

    size: UnitBytes
    plan: Plan
    option: Option


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
                yield size, unit_problem(graph, size)


def curve(step: Priced, ends: tuple[Point, Point]) -> list[Point]:
    """Greedy plans of a step at several bounds and one of a small peak, with the ends: the least held, and plain."""
    graph = step.graph
    least, plain = ((bytes_of(p.size.peak), bytes_of(p.size.held)) for p in ends)
    found = dict.fromkeys((*ends, point_of(step, least_memory(graph))))
    for size, problem in curve_problems(graph, least, plain):
        answer = greedy_answer(problem, time_limit_s=1.0, look_s=0.0)
        if isinstance(answer.plan, Plan) and _passes(problem, answer.plan):
            found[point_of(step, answer.plan, size)] = None
    return list(found)


def point_of(step: Priced, plan: Plan, size: UnitBytes | None = None) -> Point:
    """A plan of a step, and what it comes to; without bounds these are what the plan itself needs."""
    phases = kernel_phases(step.operations, plan, step.profiled.kernels)
    moments = list(replay(step.graph, plan))
    if size is None:  # what the plan itself needs, as the verifier counts it
        turn = next(m for m in moments if m.op == step.graph.backward_from)
        peak = max(m.peak_bytes for m in moments)
        size = UnitBytes(peak - step.graph.fixed_bytes, turn.peak_bytes - step.graph.fixed_bytes)
    return Point(size, plan, _option(step, phases, moments))


def _option(step: Priced, phases: Phases, moments: Sequence[Moment]) -> Option:
    forward = next(m.cost_ns for m in moments if m.op == step.graph.backward_from)
    cost, halfway = moments[-1].cost_ns, step.operations.halfway
    weight = 0 if halfway is None else cost - next(m.cost_ns for m in moments if m.op == halfway)
    return Option(
        phases.held_bytes,
        phases.forward_bytes,
        phases.backward_bytes,
        cost,
        forward,
        weight,
        phases.between_bytes,
        phases.weight_bytes,
    )


def solved(step: Priced, point: Point, room_bytes: int, planner: Planner, asking: SolveOptions) -> Point | None:
    """What a planner makes of a point that recomputes, where its stage may take so much while it runs."""
    if point.option.cost_ns == step.graph.total_cost_ns:
        return None
    size = UnitBytes(max(bytes_of(point.size.peak), room_bytes), point.size.held)
    answer = planner.plan(unit_problem(step.graph, size), asking)
    return point_of(step, answer.plan, size) if isinstance(answer.plan, Plan) else None


def unit_problem(graph: Graph, size: UnitBytes) -> Problem:
    """What is asked about a unit within its bounds."""
    return Problem(bounded(graph, size), graph.fixed_bytes + bytes_of(size.peak))


def _passes(problem: Problem, plan: Plan) -> bool:
    with suppress(InvalidPlan):
        verify(problem, plan)
        return True
    return False
