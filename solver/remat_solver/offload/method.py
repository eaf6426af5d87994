"""The methods for a chain with a link: the offload-and-recompute program and two baselines."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from remat_ir import Chain, ChainPlan, ChainStep, InvalidPlan, Problem, Verb, plain_chain_plan

from ..chain import Least, RotorOptions, rotor
from ..chain.rotor import MOST_STAGES
from ..deadline import TimeUp
from ..incumbent import Incumbent
from .bound import makespan_bound
from .kernel import states
from .price import COARSE, FREE, Priced
from .schedule import Schedule
from .tensors import repaired_plan, tensor_plan

MOST_SLOTS = 200
ENOUGH_SLOTS = 50
"""Beyond which the supplement sees no practical improvement (B.4)."""
MOST_TABLE_BYTES = 2**31
_MOST_MOVED = 128
"""Stages up to which moves alone are tried: each value is tried without in turn, in time linear in the plan."""


@dataclass(frozen=True)
class PofoOptions:
    """`slots`: N_GPU, how finely memory is cut at most; `ENOUGH_SLOTS` are tried first, then more as long as the time
    that the next number would take is left.
    """

    slots: int = MOST_SLOTS

    def __post_init__(self) -> None:
        if type(self.slots) is not int or not 1 <= self.slots <= MOST_SLOTS:
            raise ValueError(f"slots must be an integer from 1 to {MOST_SLOTS}, not {self.slots!r}")


def pofo(incumbent: Incumbent, options: PofoOptions) -> None:
    """Offer the plan of the offload-and-recompute program, made to fit tensor by tensor; without a link, rotor's.

    The program is optimal in its fluid model over its own schedules, in slots; the answer claims the makespan of whole
    tensors. Sizes are rounded up to slots, and then to the nearest, where errors mostly cancel but a plan may have to
    be repaired until it fits. The bound is one over all plans. With a limit on the host's memory, rotor's plan comes
    first, and moves are priced so that they stay within it.
    """
    chain = incumbent.problem.subject
    assert isinstance(chain, Chain)
    if chain.link_bytes_per_s is None:
        rotor(incumbent, RotorOptions())
        return
    budget = incumbent.problem.budget_bytes
    incumbent.raise_bound(makespan_bound(chain, budget, incumbent.stopped), "offload-bound")
    if chain.stages <= MOST_STAGES:
        with contextlib.suppress(TimeUp):
            incumbent.suffices(Least(chain, stop=incumbent.stopped).budget_bytes)
    if chain.stages <= _MOST_MOVED:
        _offer_moves(incumbent, chain)
    most = affordable_slots(chain.stages, options.slots)
    prices, sizes = FREE, coarser(most)
    if chain.host_bytes is not None:
        alone = Incumbent(
            Problem(replace(chain, link_bytes_per_s=None, host_bytes=None, input_may_leave=False), budget),
            incumbent.deadline,
        )
        alone.dropped = incumbent.dropped
        rotor(alone, RotorOptions())  # needs no host; its bound holds without transfers only
        if isinstance(alone.plan, ChainPlan):
            incumbent.offer(alone.plan, "rotor")
        sizes = (min(most, COARSE), *(n for n in sizes if n > COARSE))
    reason, deadline, pace = "", incumbent.deadline, 0.0
    for slots, nearest in ((n, how) for n in sizes for how in (False, True)):
        # a table is of no use before it is filled, and its time grows with the cube of its slots
        if pace * slots**3 > deadline.remaining():
            break
        began = deadline.elapsed()
        search = Priced(chain, budget, slots, nearest, prices, incumbent.stopped)
        try:
            for schedule in search.schedules():
                try:
                    incumbent.try_offer(repaired_plan(incumbent.problem, schedule, incumbent.stopped), "pofo")
                except InvalidPlan as error:
                    reason = f"The plan does not fit: {error.reason}."
                if incumbent.stopped():
                    return
        except TimeUp:
            return
        if not search.found:
            reason = reason or f"Nothing fits in {slots} slots."
        prices, pace = search.around(), (deadline.elapsed() - began) / slots**3
    if incumbent.cost_ns is None:
        incumbent.ends_without_plan(reason)


def _offer_moves(incumbent: Incumbent, chain: Chain) -> None:
    """Offer the plan that recomputes nothing and moves what memory asks for: no program, and not seldom the best."""
    with contextlib.suppress(InvalidPlan, TimeUp):
        incumbent.try_offer(repaired_plan(incumbent.problem, _everything_moves(chain), incumbent.stopped), "pofo")


def _everything_moves(chain: Chain) -> Schedule:
    """Each step once, and every value that can move."""
    plain = plain_chain_plan(chain).steps
    return Schedule(plain[: chain.stages], plain[chain.stages :], frozenset(chain.movable))


def coarser(slots: int) -> tuple[int, ...]:
    """The numbers of slots to try up to N: finer slots can round to a worse plan, and the best one is kept.

    >>> coarser(30), coarser(200)
    ((30,), (50, 100, 150, 200))
    """
    return (*range(ENOUGH_SLOTS, slots, ENOUGH_SLOTS), slots)


def affordable_slots(stages: int, slots: int) -> int:
    """N, or less where the tables would not fit: LN³ / 3 and L²N² entries of eight bytes."""
    while slots > 1 and 16 * (stages + 1) * states(slots) + 4 * stages**2 * (slots + 1) ** 2 > MOST_TABLE_BYTES:
        slots -= 1
    return slots


def offload_all(incumbent: Incumbent, options: object = None) -> None:
    """Offer the plan that moves every saved value and recomputes nothing: a baseline."""
    chain = _linked(incumbent)
    if chain is None:
        return
    try:
        plan = tensor_plan(chain, incumbent.problem.budget_bytes, _everything_moves(chain))
    except InvalidPlan as error:
        incumbent.ends_without_plan(f"Moving every value is not enough: {error.reason}.")
        return
    incumbent.offer_or_say(plan, "offload-all")


def save_on_cpu(incumbent: Incumbent, options: object = None) -> None:
    """Offer the plan that moves every saved value and waits for each transfer, as save-on-CPU hooks do: a baseline."""
    chain = _linked(incumbent)
    if chain is None:
        return
    steps: list[ChainStep] = []
    for stage in range(1, chain.stages + 1):
        steps.append(ChainStep(Verb.F_ALL, stage))
        if stage - 1 in chain.movable:
            steps += (ChainStep(verb, stage - 1) for verb in (Verb.OFFLOAD, Verb.WAIT, Verb.DROP))
    for stage in range(chain.stages, 0, -1):
        if stage - 1 in chain.movable:
            steps += (ChainStep(verb, stage - 1) for verb in (Verb.PREFETCH, Verb.WAIT))
        steps.append(ChainStep(Verb.B, stage))
    incumbent.offer_or_say(ChainPlan(tuple(steps)), "save-on-cpu")


def _linked(incumbent: Incumbent) -> Chain | None:
    chain = incumbent.problem.subject
    assert isinstance(chain, Chain)
    if chain.link_bytes_per_s is None:
        incumbent.ends_without_plan("This chain has no link to the host: give it link_bytes_per_s.")
        return None
    return chain
