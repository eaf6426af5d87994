"""What auto does where the problem has a structure: the program for it first, then everything else from there."""

from __future__ import annotations

from collections.abc import Callable

from remat_ir import Chain, Join, Plan, overhead_of

from ..chain.network import linear_network
from ..chain.persistent import slots_for
from ..chain.rotor import RotorOptions, rotor
from ..deadline import Deadline
from ..incumbent import Incumbent
from ..join.method import join
from ..lift import LiftedIncumbent
from ..offload.method import ENOUGH_SLOTS, MOST_SLOTS, PofoOptions, pofo

AT_ONCE = 32
"""Stages of a linear network whose program comes before all else: it takes less than a tenth of a second."""

SOON = 128
"""Stages of one whose program comes right after the first plan: its time grows with their cube."""

_SPARE_SHARE = 0.25
"""The share of what is left that it may take before a method that may run out."""

MOST_WORK = 6e9
"""Additions that the chain program may take before the general solver has its turn: about two seconds."""


def run_structured(incumbent: Incumbent, general: Callable[[Incumbent], None]) -> None:
    """Solve a chain or a join: a join by its program, which is optimal; a chain by the persistent program first, then
    by `general` from that incumbent, in the time left.
    """
    if isinstance(incumbent.problem.subject, Join):
        join(incumbent)
        return
    chain = incumbent.problem.subject
    assert isinstance(chain, Chain)
    _offer_persistent(incumbent, affordable_slots(chain.stages))
    if not incumbent.stopped():
        general(incumbent)


def offer_chain(incumbent: Incumbent, least: int = 0, most: int = SOON) -> None:
    """Offer the persistent optimum of a graph whose network is linear, of `least` to `most` stages.

    Unless it is a lift, whose chain is solved. It is done in numpy, so that it comes before anything is compiled.
    """
    of_chain = isinstance(incumbent, LiftedIncumbent) and incumbent.of_chain
    network = None if of_chain else linear_network(incumbent.problem.graph)
    if network is None or not least <= network.stages <= most:
        return
    cost_ns = _offer_persistent(incumbent, slots_for(network.stages))
    if cost_ns is not None:
        incumbent.chain_cost_ns = cost_ns
        added = 100 * overhead_of(cost_ns, incumbent.problem.subject.total_cost_ns)
        incumbent.note(f"The best persistent chain schedule found, of {network.stages} stages, adds {added:.3g} %.")


def _offer_persistent(incumbent: Incumbent, slots: int) -> int | None:
    """Rotor's plan, without its bound on persistent schedules, which must not end the search; its cost."""
    alone = _persistent(incumbent, slots, incumbent.deadline)
    if alone.known.enough_bytes is not None:
        incumbent.suffices(alone.known.enough_bytes)
    if alone.plan is not None:
        incumbent.offer(alone.plan, "rotor")
    return alone.cost_ns


def _persistent(incumbent: Incumbent, slots: int, until: Deadline) -> Incumbent:
    alone = Incumbent(incumbent.problem, until, dropped=incumbent.dropped)
    rotor(alone, RotorOptions(slots))
    return alone


def chain_plan(incumbent: Incumbent) -> Plan | None:
    """Rotor's plan of a graph whose network is linear and not long, in a share of the time left; it is not offered."""
    network = linear_network(incumbent.problem.graph)
    if network is None or network.stages > SOON:
        return None
    until = incumbent.deadline.within(_SPARE_SHARE * incumbent.deadline.remaining())
    plan = _persistent(incumbent, slots_for(network.stages), until).plan
    return plan if isinstance(plan, Plan) else None


def offload_program(incumbent: Incumbent) -> None:
    """The offload program of a chain with a link: ever finer as the time allows, where 50 slots take a few seconds."""
    chain = incumbent.problem.subject
    assert isinstance(chain, Chain)
    pofo(incumbent, PofoOptions(offload_slots(chain.stages)))


def offload_slots(stages: int) -> int:
    """The most slots for the offload program: all that there are where the first 50 take a few seconds, which is up to
    60 stages or so (B.4); else what takes no longer.
    """
    slots = ENOUGH_SLOTS
    while slots > 8 and stages**2 * slots**3 + stages**3 * slots**2 > 1e9:
        slots -= 1
    return MOST_SLOTS if slots == ENOUGH_SLOTS else slots


def affordable_slots(stages: int) -> int:
    """How many memory slots fit the work that auto spends on a chain program: 500 up to about 400 stages."""
    return max(50, min(500, int(6 * MOST_WORK / stages**3)))
