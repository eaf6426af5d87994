"""What a method that runs out of time or memory ends with: the chain program's plan, or a greedy one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from remat_ir import Plan
from remat_ir.greedy import greedy_plan

from ..incumbent import Incumbent
from .heuristics import say_enough
from .structured import chain_plan


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
