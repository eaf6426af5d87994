"""The methods for join networks: the optimal program, what is in reach beyond it, and the equivalent chain."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from remat_ir import Join, JoinPlan, JoinStep, JoinVerb, plain_join_plan, plain_peak

from ..deadline import TimeUp, never
from ..incumbent import Incumbent
from .table import (
    MOST_ADDITIONS,
    JoinTable,
    contiguous_plan,
    contiguous_work,
    in_reach,
    relaxed_steps,
    relaxed_work,
)


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


AT_ONCE = 1e8
"""Comparisons that the exact program may take before a schedule and a bound in polynomial time: a tenth of a second."""


def join(incumbent: Incumbent, options: object = None) -> None:
    """Offer an optimal schedule and its cost as the bound (RR-9273, Theorem 3); of a join too large for its table, the
    best schedule with one branch after another, and a bound. The plain plan is optimal where it fits.
    """
    subject = incumbent.problem.subject
    assert isinstance(subject, Join)
    slots = incumbent.problem.capacity_bytes // subject.slot_bytes
    if not in_reach(subject.lengths, slots, AT_ONCE):
        if plain_peak(subject) <= slots * subject.slot_bytes:
            incumbent.offer(plain_join_plan(subject), "checkpoint-all")
            return
        with contextlib.suppress(TimeUp):
            _in_polynomial_time(incumbent, subject, slots)
        if incumbent.stopped():
            return
    if not in_reach(subject.lengths, slots):
        lengths = ", ".join(map(str, subject.lengths))
        incumbent.note(
            f"The exact program for branches of {lengths} steps in {slots} slots is out of reach: this is the best "
            "schedule with one branch after another, and the bound knows the total length only."
        )
        return
    try:
        table = JoinTable(subject.lengths, slots, subject.stays, incumbent.stopped)
    except TimeUp:
        return
    plan = table.plan(slots)
    if plan is None:
        incumbent.prove_infeasible(f"No schedule fits {slots} slots.")
        return
    incumbent.offer(plan, "join")
    incumbent.raise_bound(_cost_ns(subject, table.forward_steps(slots) or 0), "join")


def _in_polynomial_time(incumbent: Incumbent, subject: Join, slots: int) -> None:
    """A schedule and a bound at once; where they meet, the exact program has nothing to add."""
    if contiguous_work(subject.lengths, slots) <= MOST_ADDITIONS:
        plan = contiguous_plan(subject.lengths, slots, subject.stays, incumbent.stopped)
        if plan is not None:
            incumbent.offer(plan, "contiguous-join")
    elif in_reach((max(subject.lengths),), slots // len(subject.lengths)):
        equiv_chain(incumbent)
    if relaxed_work(subject.lengths, slots) <= MOST_ADDITIONS and not incumbent.stopped():
        steps = relaxed_steps(subject.lengths, slots, subject.stays, incumbent.stopped)
        if steps is not None:
            incumbent.raise_bound(_cost_ns(subject, steps), "relaxed-join")


def _cost_ns(subject: Join, forward_steps: int) -> int:
    return subject.total_cost_ns + (forward_steps - sum(subject.lengths)) * subject.forward_ns


def equiv_chain(incumbent: Incumbent, options: object = None) -> None:
    """Offer the plan of the equivalent chain: a baseline."""
    subject = incumbent.problem.subject
    assert isinstance(subject, Join)
    slots = incumbent.problem.capacity_bytes // subject.slot_bytes
    if not in_reach((max(subject.lengths),), slots // len(subject.lengths)):
        incumbent.ends_without_plan("The program of the equivalent chain is out of reach.")
        return
    try:
        plan = equivalent_plan(subject.lengths, slots, subject.keep, incumbent.stopped)
    except TimeUp:
        return
    if plan is None:
        incumbent.ends_without_plan(f"The equivalent chain does not fit {slots} slots.")
    else:
        incumbent.offer(plan, "equiv-chain")
