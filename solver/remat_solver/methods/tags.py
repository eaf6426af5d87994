"""The plans that torch carries out by itself, as a method: tags that say what is saved, and how far they are from free.

The free problem is solved first: its plan is where the search over tags starts, and its bound holds for tags too.
Greater bounds of the space come from a graph that has all plans by tags, with a certificate, and from a program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from remat_ir import Plan, Problem, plain_plan, plan_of
from remat_ir.greedy import greedy_plans
from remat_ir.restrictions import TAGS
from remat_ir.tags import confined, is_tagged, tags_of

from ..incumbent import Incumbent
from ..staged.prove import Proof
from ..tags import TagSearch, prove
from .auto import AutoOptions, run_auto

_FREE_SHARE, _SEARCH_SHARE, _CERTIFY_SHARE = 0.4, 0.4, 0.5
"""The share of the time for the free problem, and what the search may take of the rest, and a certificate of what then
remains; the staged program has what is left."""
_GREEDY_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6)
"""Budgets, as shares of the one asked for, of the greedy plans that the search starts from too."""
_NOTHING = "No choice of what is saved fits the budget as torch runs it."
_MOVES, _CYCLES = 1 << 15, 24
"""Moves of the first cycle from a start, and cycles without a cheaper plan after which the search ends."""


@dataclass(frozen=True)
class TagOptions:
    """The search's seed, and whether the free problem is solved first; else there is no plan to compare with."""

    seed: int = 0
    free: bool = True

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be an integer from 0 to 2^31 - 1, not {self.seed}")
        if type(self.free) is not bool:
            raise ValueError("free must be true or false")


def run_tags(incumbent: Incumbent, options: TagOptions) -> None:
    """Offer plans that torch carries out; note what a free plan would save."""
    graph = incumbent.problem.graph
    if graph.backward_from is None:
        incumbent.ends_without_plan("Tags need a backward pass, and the graph marks none.", (TAGS,))
        return
    free = _free(incumbent, options) if options.free else None
    if incumbent.infeasible:
        return
    search = TagSearch(graph, incumbent.problem.budget_bytes, options.seed)
    if search.try_all():
        _deliver(incumbent, search)
        if search.cost_ns is None:
            incumbent.nothing_within((TAGS,), _NOTHING)
        else:
            incumbent.raise_bound(search.cost_ns, "tags", (TAGS,))
    else:
        share = incumbent.deadline.within(_SEARCH_SHARE * incumbent.deadline.remaining())
        _search(incumbent, search, free, lambda: incumbent.stopped() or share.passed())
        _certify(incumbent)
        prove(incumbent, search, (TAGS,), lambda: incumbent.exhausted or incumbent.stopped())
        if incumbent.cost_ns is None and not (incumbent.infeasible or incumbent.exhausted):
            incumbent.ends_without_plan("No choice of what is saved was found that fits the budget as torch runs it.")
    _note(incumbent, free)


def _free(incumbent: Incumbent, options: TagOptions) -> Incumbent:
    """The free problem, solved for a share of the time; its bound, or that nothing fits, holds for tags too."""
    share = incumbent.deadline.within(_FREE_SHARE * incumbent.deadline.remaining())
    free = Incumbent(
        incumbent.problem,
        share,
        incumbent.max_gap,
        cancelled=incumbent.interrupted,
        certify=incumbent.certifies,
        steps=incumbent.steps,
        dropped=incumbent.dropped,
    )
    run_auto(free, AutoOptions(seed=options.seed))
    incumbent.needs_at_least(free.known.least_bytes, free.known.least_proof)
    if free.infeasible:
        incumbent.prove_infeasible(free.reason, free.known.least_bytes, free.known.proof)
        return free
    incumbent.raise_bound(free.bound_ns, "auto", proof=free.known.proof)
    if free.claim is not None:
        incumbent.raise_bound(free.claim[0], free.claim[1])
    return free


def _starts(problem: Problem, free: Incumbent | None, incumbent: Incumbent) -> Iterator[Plan]:
    if free is not None and isinstance(free.plan, Plan):
        yield free.plan
    graph = problem.graph
    for share in _GREEDY_SHARES:
        if incumbent.stopped():
            return
        yield from greedy_plans(graph, int(share * problem.budget_bytes), stop=incumbent.stopped, tries=1)
    yield plain_plan(graph)


def _search(incumbent: Incumbent, search: TagSearch, free: Incumbent | None, stopped: Callable[[], bool]) -> None:
    """Anneal from each start, then from the best set, until nothing better comes."""
    for start in _starts(incumbent.problem, free, incumbent):
        search.adopt(tags_of(search.graph, start))
        _deliver(incumbent, search)
        if stopped():
            return
        search.cycle(_MOVES // 4, stopped, 0.2)
        _deliver(incumbent, search)
    idle, number = 0, 0
    while idle < _CYCLES and not stopped():
        before = search.cost_ns
        search.resume_best()
        search.cycle(_MOVES << min(3, number // 8), stopped, (0.1, 0.5, 2.0)[number % 3])
        _deliver(incumbent, search)
        idle = 0 if search.cost_ns != before else idle + 1
        number += 1


def _certify(incumbent: Incumbent) -> None:
    """Bound the space with a certificate: by what holds for all plans of a graph that has those by tags among them."""
    problem = incumbent.problem
    if not incumbent.certifies or incumbent.stopped():
        return
    inside = Incumbent(
        Problem(confined(problem.graph), problem.budget_bytes),
        incumbent.deadline.within(_CERTIFY_SHARE * incumbent.deadline.remaining()),
        incumbent.max_gap,
        cancelled=incumbent.interrupted,
        certify=True,
        dropped=incumbent.dropped,
    )
    plan = incumbent.plan
    if isinstance(plan, Plan) and is_tagged(problem.graph, plan):
        inside.offer(plan_of(inside.problem.graph, (0, *(op + 1 for op in plan.computes))), "tags")
    Proof(inside).run()
    if inside.infeasible:
        incumbent.nothing_within((TAGS,), _NOTHING)
    elif inside.known.proof is not None and inside.bound_ns > incumbent.bound_ns:
        incumbent.raise_bound(inside.bound_ns, "tags", (TAGS,), inside.known.proof)


def _deliver(incumbent: Incumbent, search: TagSearch) -> None:
    cost = search.cost_ns
    if cost is not None and cost < (math.inf if incumbent.cost_ns is None else incumbent.cost_ns):
        plan = search.plan()
        assert plan is not None
        incumbent.offer(plan, "tags")


def _note(incumbent: Incumbent, free: Incumbent | None) -> None:
    """Say what torch's way costs: over the best free plan that is known, and over what any plan costs."""
    cost = incumbent.cost_ns
    at_least = f"no plan of any kind costs less than {incumbent.best_claim() / 1e6:.6g} ms"
    if free is None or free.cost_ns is None:
        if cost is not None:
            incumbent.note(f"As torch runs it; there is no free plan to compare with, and {at_least}.")
        return
    if cost is None:
        incumbent.note(f"A plan that torch cannot carry out by tags costs {free.cost_ns / 1e6:.6g} ms; {at_least}.")
        return
    more = 100 * (cost - free.cost_ns) / free.cost_ns if free.cost_ns else 0.0
    incumbent.note(f"As torch runs it: {more:+.3g} % against the best free plan found; {at_least}.")
