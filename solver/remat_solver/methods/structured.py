"""Programs of chains in other methods: what comes first in auto, and what a method ends with that runs out of time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from remat_ir import Chain, Plan, overhead_of
from remat_ir.greedy import greedy_plan

from ..chain.network import linear_network
from ..chain.persistent import slots_for
from ..chain.rotor import RotorOptions, rotor
from ..deadline import Deadline
from ..incumbent import Incumbent
from ..lift import LiftedIncumbent
from ..offload.method import ENOUGH_SLOTS, MOST_SLOTS, PofoOptions, pofo
from .heuristics import say_enough

AT_ONCE = 32
"""Stages of a linear network whose program comes before all else: it takes less than a tenth of a second."""

SOON = 128
"""Stages of one whose program comes right after the first plan: its time grows with their cube."""

_SPARE_SHARE = 0.25
"""The share of what is left that it may take before a method that may run out."""

MOST_WORK = 6e9
"""Additions that the chain program may take before the general solver has its turn: about two seconds."""


def offer_persistent(incumbent: Incumbent) -> None:
    """Offer the persistent optimum of a chain, by as many slots as fit `MOST_WORK`: 500 up to about 400 stages."""
    chain = incumbent.problem.subject
    assert isinstance(chain, Chain)
    _offer_persistent(incumbent, max(50, min(500, int(6 * MOST_WORK / chain.stages**3))))


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
    """The offload program of a chain with a link, ever finer as the time allows.

    By all slots that there are where the first 50 take a few seconds, which is up to 60 stages or so (B.4); else by
    what takes no longer.
    """
    chain = incumbent.problem.subject
    assert isinstance(chain, Chain)
    slots = ENOUGH_SLOTS
    while slots > 8 and chain.stages**2 * slots**3 + chain.stages**3 * slots**2 > 1e9:
        slots -= 1
    pofo(incumbent, PofoOptions(MOST_SLOTS if slots == ENOUGH_SLOTS else slots))


class Spare(NamedTuple):
    """A plan that another method has at once; it may lie outside of the space of the one that was asked for."""

    plan: Plan
    source: str


def spare_plan(incumbent: Incumbent, *, only_chains: bool = False) -> Spare | None:
    """The chain program's plan where the network is linear, else a greedy one; None where none fits. It is not offered.

    Where there is no plan at all, a budget that is enough is noted.
    """
    problem = incumbent.problem
    if (plan := chain_plan(incumbent)) is not None:
        return Spare(plan, "rotor")
    if only_chains:
        return None
    plan = greedy_plan(problem.graph, problem.budget_bytes, stop=incumbent.interrupted)
    if plan is None:
        say_enough(incumbent)
        return None
    return Spare(plan, "greedy")


def falling_back(
    run: Callable[[Incumbent, Any, Spare | None], None], *, only_chains: bool = False
) -> Callable[[Incumbent, Any], None]:
    """A method that ends with the spare plan where it runs out of time or memory, and then says whose plan it is.

    A chain program's plan is taken where it costs less than the method's own, a greedy one where it has none: a method
    that is asked for by name is known by its own plans.
    """

    def runs(incumbent: Incumbent, options: object) -> None:
        spare = spare_plan(incumbent, only_chains=only_chains)
        run(incumbent, options, spare)
        incumbent.stopped()  # notes which limit has been reached by now
        if spare is None or incumbent.limit not in _RAN_OUT:
            return
        if (incumbent.plan is None or spare.source == "rotor") and incumbent.offer(*spare):
            whose = "the chain program's (rotor)" if spare.source == "rotor" else "a greedy one"
            incumbent.note(
                f"The plan is {whose}: the method itself {_RAN_OUT[incumbent.limit]} before it had a better one."
            )

    return runs


_RAN_OUT = {"time": "ran out of time", "memory": "ran out of memory", "cancel": "was cancelled"}
