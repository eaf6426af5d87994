"""Methods of one part each: greedy, the local search, the program over blocks, the staged proof; and first plans."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from remat_ir import plan_of
from remat_ir.greedy import WEIGHTS, greedy_plan, greedy_plans, least_memory, peak_of

from ..blocks.plans import plans_by_blocks
from ..bounds import prove_by_pairs
from ..incumbent import Incumbent
from ..options import Options, flag, whole
from ..search.local import Search, move_s, polish
from ..staged.prove import Proof

_POLISHING_MOVES = 32768
"""Moves that the local search makes from a relaxation's solution: a tenth of a second to half a second."""
_ENOUGH_S, _ENOUGH_SHARE = 1.0, 0.25
"""Seconds at most, and the share of what is left, for a budget that is enough."""


@dataclass(frozen=True)
class GreedyOptions(Options):
    """How many eviction rules are tried once one has led to a plan, from 1 to 3."""

    tries: int = whole(2, 1, 3)


def run_greedy(incumbent: Incumbent, options: GreedyOptions) -> None:
    """Offer the best of a few eviction plans."""
    problem = incumbent.problem
    plan = greedy_plan(problem.graph, problem.budget_bytes, stop=incumbent.interrupted, tries=options.tries)
    if plan is not None:
        incumbent.offer(plan, "greedy")
    else:
        say_enough(incumbent, math.inf, 1.0)


def say_enough(incumbent: Incumbent, most_s: float = _ENOUGH_S, share: float = _ENOUGH_SHARE) -> None:
    """Where there is no plan yet, note the smallest budget above this one for which a walk has a plan.

    So that an answer without a plan says a budget that is enough and near. The plan is not offered, since a method that
    is asked for by name is to be known by its own plans. It takes a share of what is left, so many seconds at most.
    """
    problem = incumbent.problem
    if incumbent.plan is not None or incumbent.stopped():
        return
    watch = incumbent.deadline.within(min(most_s, share * incumbent.deadline.remaining()))
    least = least_memory(
        problem.graph,
        stop=lambda: watch.passed() or incumbent.stopped(),
        weights=WEIGHTS[:1],
        above_bytes=problem.budget_bytes,
    )
    incumbent.suffices(peak_of(problem.graph, least))


def first_plan(incumbent: Incumbent, *, brief: bool = False, skip: int = 0) -> None:
    """Offer greedy plans; `brief`: try one rule only, since better is to follow; `skip`: leave out as many."""
    problem, count = incumbent.problem, 1 if brief else len(WEIGHTS)
    for plan in greedy_plans(
        problem.graph, problem.budget_bytes, stop=incumbent.interrupted, tries=count, failures=count, skip=skip
    ):
        incumbent.offer(plan, "greedy")
    say_enough(incumbent)


def other_plans(incumbent: Incumbent) -> None:
    """Offer what a brief first plan left out: within the gap that was asked for, another rule may have a cheaper plan.

    So that no answer is more expensive than the greedy plan, as long as there is time for it.
    """
    if incumbent.cost_ns is not None and incumbent.bound_ns < incumbent.cost_ns:
        first_plan(incumbent, skip=1)


def polished(incumbent: Incumbent, *, source: str = "staged") -> Callable[[list[int]], None]:
    """What makes plans of sequences that may exceed the budget, and offers the cheaper ones."""

    def make(sequence: list[int]) -> None:
        problem = incumbent.problem
        better = polish(
            problem.graph,
            problem.budget_bytes,
            sequence,
            moves=_POLISHING_MOVES,
            seed=len(sequence),
            stop=incumbent.stopped,
        )
        incumbent.deadline.spend(_POLISHING_MOVES * move_s(problem.graph))
        if better is not None:
            incumbent.offer(plan_of(problem.graph, better), source)

    return make


@dataclass(frozen=True)
class SearchOptions(Options):
    """The seed, and how many moves to make; without a number, until the time is up."""

    seed: int = whole(0, 0, 2**31 - 1)
    iterations: int | None = whole(None, 1)


def run_search(incumbent: Incumbent, options: SearchOptions) -> None:
    """Offer the greedy plan, then whatever the local search finds."""
    first_plan(incumbent)
    if not incumbent.stopped():
        problem = incumbent.problem
        Search(problem.graph, problem.budget_bytes, options.seed).run(incumbent, options.iterations)


def run_blocks(incumbent: Incumbent, options: object = None) -> None:
    """Offer the plan that the chain program over a graph's blocks leads to, and what the search makes of it."""
    applies = plans_by_blocks(incumbent, polish=polished(incumbent, source="blocks"))
    if not applies:
        incumbent.ends_without_plan("blocks does not apply: the forward pass has no narrow places to cut it at.")
    elif incumbent.plan is None and not incumbent.stopped():
        incumbent.ends_without_plan("blocks has no plan within the budget.")


@dataclass(frozen=True)
class StagedOptions(Options):
    """What the proof may use.

    `memory_bytes`: what its engine may use; 0 means half of what is free, but at least 1 GiB.
    `polish`: whether the local search makes plans of the relaxations' solutions.
    """

    polish: bool = flag()
    memory_bytes: int = whole(0)


def run_staged(incumbent: Incumbent, options: StagedOptions, spare: object = None) -> None:
    """Prove with coarse stages, refined where their solution breaks the memory."""
    if incumbent.plan is None:
        prove_by_pairs(incumbent)
        if incumbent.stopped():
            return
    say_enough(incumbent)
    proof = Proof(incumbent, polish=polished(incumbent) if options.polish else None, memory_bytes=options.memory_bytes)
    proof.run()
    if proof.out_of_memory:
        incumbent.stop_for("memory")
    elif proof.out_of_time and not incumbent.stopped():
        incumbent.stop_for("time")
