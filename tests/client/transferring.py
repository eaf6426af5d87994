"""Plans that move values to the host and back, drawn at random from a plan that has none."""

from __future__ import annotations

import random
from dataclasses import replace

from remat.training.step import TrainingStep
from remat_ir import Compute, Drop, Free, InvalidPlan, Link, Offload, Plan, Prefetch, Problem, Step, Wait, verify

LINK = Link(10**9, 2 * 10**9, latency_ns=1000)


def linked(step: TrainingStep, link: Link = LINK) -> TrainingStep:
    """The step with a link to the host."""
    return replace(step, graph=replace(step.graph, link=link))


def with_transfers(step: TrainingStep, plan: Plan, seed: int, share: float = 0.7) -> Plan:
    """The plan with values moved out between two uses, at random moments, as far as the verifier agrees.

    `step` must have a link.
    """
    draw, graph = random.Random(seed), step.graph
    for value, first, last in draw.sample(gaps(step, plan), k=len(gaps(step, plan))):
        if draw.random() > share:
            continue
        at = sorted(draw.randint(first, last) for _ in range(5))
        verbs: list[Step] = [Offload(value), Wait(value), Drop(value), Prefetch(value), Wait(value)]
        moved = inserted(plan, list(zip(at, verbs, strict=True)))
        try:
            verify(Problem(graph, 2**50), moved)
        except InvalidPlan:  # another output of its op is made again meanwhile; or its gap has moved
            continue
        plan = moved
    return plan


def gaps(step: TrainingStep, plan: Plan) -> list[tuple[int, int, int]]:
    """Values that lie resident and unread between two steps: the positions before which transfers may be inserted."""
    graph, keep = step.graph, frozenset(step.graph.keep)
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


def inserted(plan: Plan, steps: list[tuple[int, Step]]) -> Plan:
    """The plan with steps, in order, each before the one at its position."""
    found: list[Step] = []
    for position in range(len(plan.steps) + 1):
        found += [step for at, step in steps if at == position]
        found += plan.steps[position : position + 1]
    return Plan(tuple(found))
