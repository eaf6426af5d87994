"""Rotor: the optimal persistent schedule of a chain, or of a graph that is one (RR-9302, Section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass

from remat_ir import Chain
from remat_ir.restrictions import CHAIN_STAGES, NO_TRANSFERS, PERSISTENT

from ..incumbent import Incumbent
from .linear import LinearGraph, linear_graph
from .needs import Least
from .table import Table

MOST_SLOTS = 20_000
MOST_STAGES = 1200


@dataclass(frozen=True)
class RotorOptions:
    """`slots`: S, how finely memory is cut (RR-9302, Section 5.2: 500)."""

    slots: int = 500

    def __post_init__(self) -> None:
        if type(self.slots) is not int or not 1 <= self.slots <= MOST_SLOTS:
            raise ValueError(f"slots must be an integer from 1 to {MOST_SLOTS}, not {self.slots!r}")


def rotor(incumbent: Incumbent, options: RotorOptions) -> None:
    """Offer the best persistent plan, and raise the bound over persistent schedules.

    Sizes are rounded to slots; the bound makes up for the rounding, and a plan is taken only where it fits in bytes.
    """
    run_chain_program(incumbent, options.slots, tapes=True)


def run_chain_program(incumbent: Incumbent, slots: int, *, tapes: bool) -> None:
    """`rotor`, or without `tapes` the program that saves activations only."""
    seen = _chain_of(incumbent)
    if seen is None:
        incumbent.ends_without_plan("This graph is not a chain of stages, so it has no chain plan.", (PERSISTENT,))
        return
    chain, linear = seen
    source = "rotor" if tapes else "revolve"
    within = (PERSISTENT,) if chain.link_bytes_per_s is None else (PERSISTENT, NO_TRANSFERS)
    if linear is not None:
        within = (*within, CHAIN_STAGES)
    if chain.stages > MOST_STAGES:
        incumbent.ends_without_plan(
            f"The chain has {chain.stages} stages, more than the {MOST_STAGES} in reach.", within
        )
        return
    least = Least(chain, tapes=tapes)
    if linear is None:
        incumbent.suffices(least.budget_bytes)
    budget = incumbent.problem.budget_bytes
    if least.budget_bytes > budget:
        reason = (
            f"No persistent schedule{'' if tapes else ' without tapes'} fits; the least budget for one is "
            f"{least.budget_bytes} bytes."
        )
        if tapes:
            incumbent.nothing_within(within, reason)
        else:
            incumbent.ends_without_plan(reason, within)
        return
    table = Table(chain, budget, slots, rounding="nearest", tapes=tapes)
    # where memory is so short that rounding loses every plan, the one of the least peak remains
    plan = table.cheapest_plan(budget) or least.plan()
    incumbent.offer(plan if linear is None else linear.plan(plan), source)
    bound = table.bound_ns(table.slots)
    if not tapes:
        return
    if bound is None:
        incumbent.nothing_within(within, "No persistent schedule fits the budget.")
    else:
        incumbent.raise_bound(bound, source, within)


def _chain_of(incumbent: Incumbent) -> tuple[Chain, LinearGraph | None] | None:
    subject = incumbent.problem.subject
    if isinstance(subject, Chain):
        return subject, None
    linear = linear_graph(incumbent.problem.graph)
    return None if linear is None else (linear.chain, linear)
