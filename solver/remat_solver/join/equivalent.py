"""EQUIV-CHAIN: a join taken as one chain of steps at the same distance from the turn (RR-9273, Section 6)."""

from __future__ import annotations

from collections.abc import Callable

from remat_ir import JoinPlan, JoinStep, JoinVerb

from ..deadline import never
from .table import JoinTable


def equivalent_plan(
    lengths: tuple[int, ...], slots: int, keep: tuple[int, ...] = (), stop: Callable[[], bool] = never
) -> JoinPlan | None:
    """The optimal plan of the chain whose step p is step p − (longest − ℓ_j) of every branch j, or None.

    A checkpoint of the chain fills a slot for each branch, so the chain has slots // k of them. A branch that has not
    begun yet at step p stands at its x_0. Where `stop` says so, `TimeUp` is raised.
    """
    longest, each = max(lengths), slots // len(lengths)
    plan = JoinTable((longest,), each, stop=stop).plan(each) if longest else None
    if plan is None:
        return None
    steps: list[JoinStep] = []
    for verb, _, at in plan.steps:
        if verb is JoinVerb.TURN:
            steps.append(JoinStep(verb))
            steps += (JoinStep(JoinVerb.D_BAR, j) for j, length in enumerate(lengths) if not length and j not in keep)
            continue
        for branch, length in enumerate(lengths):
            index = at - (longest - length)
            if verb is JoinVerb.S or (verb in (JoinVerb.F, JoinVerb.B, JoinVerb.D) and index >= 0):
                steps.append(JoinStep(verb, branch, max(0, index)))
            elif verb is JoinVerb.B:
                steps.append(JoinStep(JoinVerb.D, branch, 0))
            if verb is JoinVerb.B and index == 0 and branch not in keep:
                steps.append(JoinStep(JoinVerb.D_BAR, branch))
    return JoinPlan(tuple(steps))
