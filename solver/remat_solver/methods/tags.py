"""The plans that torch carries out by itself, as a method: tags that say what is saved, and how far they are from free.

The free problem is solved first: its plan is where the search over tags starts, and its bound holds for tags too.
Greater bounds of the space come from a graph that has all plans by tags, with a certificate, and from a program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from remat_ir import Plan, Problem, plain_plan, plan_of
from remat_ir.greedy import greedy_plans
from remat_ir.restrictions import TAGS
from remat_ir.tags import confined, is_tagged, tags_of

from ..incumbent import Incumbent
from ..lift import LiftedIncumbent
from ..options import Options, flag, whole
from ..staged.prove import Proof
from ..tags.program import prove
from ..tags.search import TagSearch
from .auto import AutoOptions, run_auto

_FREE_SHARE, _SEARCH_SHARE, _CERTIFY_SHARE = 0.4, 0.4, 0.5
"""The share of the time for the free problem, and what the search may take of the rest, and a certificate of what then
remains; the staged program has what is left."""
_GREEDY_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6)
"""Budgets, as shares of the one asked for, of the greedy plans that the search starts from too."""
_NOTHING = "No choice of what is saved fits the budget as torch runs it."
_CLAIMED = "No choice of what is saved fits the budget as torch runs it: an engine says so, without a certificate."
_NOT_FOUND = "No choice of what is saved was found that fits the budget as torch runs it."
_MOVES, _CYCLES = 1 << 15, 24
"""Moves of the first cycle from a start, and cycles without a cheaper plan after which the search ends."""


@dataclass(frozen=True)
class TagOptions(Options):
    """The search's seed, and whether the free problem is solved first; else there is no plan to compare with."""

    seed: int = whole(0, 0, 2**31 - 1)
    free: bool = flag()


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
        empty = prove(incumbent, search, lambda: incumbent.exhausted or incumbent.stopped())
        if incumbent.cost_ns is None and not (incumbent.infeasible or incumbent.exhausted):
            incumbent.ends_without_plan(_CLAIMED if empty else _NOT_FOUND, (TAGS,) if empty else ())
    _note(incumbent, free)


def _free(incumbent: Incumbent, options: TagOptions) -> Incumbent:
    """The free problem, solved for a share of the time; its bound, or that nothing fits, holds for tags too."""
    free = _part(incumbent, incumbent.problem, _FREE_SHARE)
    run_auto(free, AutoOptions(seed=options.seed))
    incumbent.needs_at_least(free.known.least_bytes, free.known.least_proof)
    if free.infeasible:
        incumbent.prove_infeasible(free.reason, free.known.least_bytes, free.known.proof)
        return free
    incumbent.raise_bound(free.bound_ns, "auto", proof=free.known.proof)
    if free.claim is not None:
        incumbent.raise_bound(free.claim[0], free.claim[1])
    return free


def _part(incumbent: Incumbent, problem: Problem, share: float) -> Incumbent:
    """A part of the solve, for a share of the time that is left."""
    return Incumbent(
        problem,
        incumbent.deadline.within(share * incumbent.deadline.remaining()),
        incumbent.max_gap,
        cancelled=incumbent.interrupted,
        certify=incumbent.certifies,
        steps=incumbent.steps,
        dropped=incumbent.dropped,
    )


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
    inside = _part(incumbent, Problem(confined(problem.graph), problem.budget_bytes), _CERTIFY_SHARE)
    plan = incumbent.plan
    if isinstance(plan, Plan) and is_tagged(problem.graph, plan):
        inside.offer(plan_of(inside.problem.graph, (0, *(op + 1 for op in plan.computes))), "tags")
    Proof(inside).run()
    if inside.infeasible:
        incumbent.nothing_within((TAGS,), _NOTHING, inside.known.proof)
    elif inside.known.proof is not None and inside.bound_ns > incumbent.bound_ns:
        incumbent.raise_bound(inside.bound_ns, "tags", (TAGS,), inside.known.proof)


def _deliver(incumbent: Incumbent, search: TagSearch) -> None:
    if search.cost_ns is not None and search.cost_ns != incumbent.cost_ns:
        incumbent.offer(search.plan(), "tags")


def _note(incumbent: Incumbent, free: Incumbent | None) -> None:
    """Say what torch's way costs: over the best free plan that is known, and over what any plan costs."""
    cost, other = incumbent.cost_ns, None if free is None else free.cost_ns
    if cost is None and other is None:
        return
    if other is None:
        said = "As torch runs it; there is no free plan to compare with"
    elif cost is None:
        said = f"A plan that torch cannot carry out by tags costs {other / 1e6:.6g} ms"
    else:
        more = 100 * (cost - other) / other if other else 0.0
        said = f"As torch runs it: {more:+.3g} % against the best free plan found"
    lifted = isinstance(incumbent, LiftedIncumbent) and incumbent.within
    plan = "plan without transfers" if lifted else "plan of any kind"
    incumbent.note(f"{said}; no {plan} costs less than {incumbent.best_claim() / 1e6:.6g} ms.")
