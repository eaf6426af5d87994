"""Plans that move values to the host and back, drawn at random from a plan that has none."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from remat.planning.options import DEFAULT, SolveOptions
from remat.planning.sources import OnProgress
from remat.training.step import TrainingStep
from remat_ir import (
    Answer,
    Compute,
    Drop,
    Free,
    Graph,
    Link,
    Offload,
    Plan,
    Prefetch,
    Problem,
    Step,
    Wait,
    plain_plan,
    verify,
)

LINK = Link(10**9, 2 * 10**9, latency_ns=1000)


def linked(step: TrainingStep, link: Link = LINK) -> TrainingStep:
    """The step with a link to the host."""
    return replace(step, graph=replace(step.graph, link=link))


def with_transfers(graph: Graph, plan: Plan, seed: int | None, share: float = 0.7) -> Plan:
    """The plan of a graph with a link, with values moved out between two uses, at random moments.

    Without a seed each is gone at once, and back at the last moment.
    """
    draw, found = random.Random(seed or 0), gaps(graph, plan)
    chosen: list[tuple[int, Step]] = []
    for value, first, last in draw.sample(found, k=len(found)):
        if draw.random() > share:
            continue
        at = [first] * 3 + [last] * 2 if seed is None else sorted(draw.randint(first, last) for _ in range(5))
        verbs: list[Step] = [Offload(value), Wait(value), Drop(value), Prefetch(value), Wait(value)]
        chosen += zip(at, verbs, strict=True)
    moved = inserted(plan, chosen)
    verify(Problem(graph, 2**50), moved)
    return moved


def gaps(graph: Graph, plan: Plan) -> list[tuple[int, int, int]]:
    """Values that lie resident and unread between two steps: the positions before which transfers may be inserted."""
    keep = frozenset(graph.keep)
    since: dict[int, int] = {}
    found = []
    for position, part in enumerate(plan.steps):
        if isinstance(part, Compute):
            for value in graph.op_inputs[part.op]:
                if value in since and position > since[value] and value not in keep:
                    found.append((value, since[value], position))
                since[value] = position + 1
            kept = graph.op_always[part.op] if part.kept is None else part.kept
            since.update(dict.fromkeys(kept, position + 1))
        elif isinstance(part, Free):
            since.pop(part.value, None)
    return found


class Mover:
    """A planner whose plans compute nothing again and move all that waits for its next use: see `with_transfers`."""

    def __init__(self, seed: int | None = 0) -> None:
        self.seed = seed

    def plan(
        self, problem: Problem, options: SolveOptions = DEFAULT, *, on_progress: OnProgress | None = None
    ) -> Answer:
        """Such a plan, if it fits."""
        plan = with_transfers(problem.graph, plain_plan(problem.graph), self.seed, share=1.0)
        return Answer.of_plan(problem, plan, method="mover")


def inserted(plan: Plan, steps: list[tuple[int, Step]]) -> Plan:
    """The plan with steps, in order, each before the one at its position."""
    before: dict[int, list[Step]] = {}
    for at, step in steps:
        before.setdefault(at, []).append(step)
    found: list[Step] = []
    for position in range(len(plan.steps) + 1):
        found += before.get(position, ())
        found += plan.steps[position : position + 1]
    return Plan(tuple(found))


def traced_peak(run: Callable[[], Any]) -> int:
    """The most bytes that a step holds on the host: on the CPU copies lie in Python's memory, not in torch's."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        run()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
