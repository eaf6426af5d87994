"""The method for graphs and chains with a link: plans without transfers, relaxations and the search side by side.

A chain moves what is stored at a cut as one: a tape, or else an activation. So a sequence of its lift to a graph is
lowered to the steps of a chain plan, and what each of them stores is a value of one more graph, in which every step
runs once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from remat_ir import (
    AnyPlan,
    Chain,
    ChainPlan,
    ChainStep,
    Graph,
    InvalidPlan,
    Problem,
    Verb,
    lifted_plan,
    lowered_plan,
    verify,
)

from ..deadline import Deadline
from ..incumbent import Incumbent
from ..lift import LiftedIncumbent
from ..options import Options, flag, whole
from ..placement import INPUT, Gap, Placed, Timetable, moved_plan, place, saved, stored
from ..portfolio import Member
from ..search.every import MOST_VALUES, try_every_plan
from .baselines import layer_fractions, save_on_cpu
from .bound import Relaxed, prove
from .search import TransferSearch


class ChainTransferSearch(TransferSearch):
    """The search on the incumbent of a chain with a link.

    What is proved of its lift with the link is not passed on: copies of a tape are rounded up to whole ns value by
    value there, so a bound of the lift is not quite the chain's.
    """

    def __init__(self, incumbent: Incumbent, seed: int = 0) -> None:
        chain = incumbent.problem.subject
        assert isinstance(chain, Chain)
        lift = Problem(chain.to_graph().with_link(chain.link), incumbent.problem.budget_bytes)
        linked = Incumbent(lift, incumbent.deadline, incumbent.max_gap, cancelled=incumbent.stopped)
        super().__init__(incumbent, seed, linked)
        self.chain = chain
        self._stored: tuple[ChainStep, ...] = ()

    def adopt(self, plan: AnyPlan) -> None:
        """Go on from a plan of the chain or its lift, if it is the best, with its copies placed anew."""
        if isinstance(plan, ChainPlan):
            plan = lifted_plan(self.chain, plan)
        super().adopt(plan)

    def table(self, order: Sequence[int]) -> Timetable:
        """What is stored when, of the chain plan with these computations."""
        steps = lowered_plan(self.chain, order).steps
        self._stored, table = stored(self.chain, (step for step in steps if step.verb is not Verb.FREE))
        return table

    def values_of(self, gap: Gap) -> Collection[int]:
        """The values of the lift that are stored there; none of a gradient, which stays, or of the input."""
        verb, stage = self._stored[gap.value]
        values = () if verb is Verb.B else self.chain.stage_values(stage)
        return values if verb is Verb.F_ALL else values[:1]

    def may_move(self, gap: Gap, allowed: Collection[int]) -> bool:
        """Whether a gap may be spent on the host: also of an input that may leave, which no set has."""
        return self._stored[gap.value] == INPUT or super().may_move(gap, allowed)

    def planned(self, found: Placed) -> tuple[int, AnyPlan]:
        """The chain plan and its makespan."""
        plan = moved_plan(self._stored, found.plan)
        return verify(self.incumbent.problem, plan).cost_ns, plan


def offload_all(incumbent: Incumbent) -> None:
    """Offer the plan that moves every value which the backward pass reads, overlapped, and recomputes nothing."""
    search = search_of(incumbent)
    table = search.table(range(search.graph.ops))
    try:
        _, plan = search.planned(place(table, incumbent.problem.budget_bytes, saved(table)))
    except InvalidPlan as error:
        incumbent.ends_without_plan(f"Moving every value is not enough: {error.reason}.")
        return
    incumbent.offer_or_say(plan, "offload-all")


_PROOF_SHARE = 0.9
"""The share of the time for linear relaxations."""
_FIRST_SHARE = 0.1
"""The share of the time that a first plan without transfers may take before other plans are sought."""
_UNLIMITED_S = 60.0
_BASELINES = {"offload-all": offload_all, "save-on-cpu": save_on_cpu, "layer-fractions": layer_fractions}


@dataclass(frozen=True)
class TransferOptions(Options):
    """Whether a bound is sought, the search's seed, and the memory that the bound's engine may use.

    `memory_bytes` 0 means half of what is free when the engine starts, but at least 1 GiB.
    """

    proof: bool = flag()
    seed: int = whole(0, 0, 2**32 - 1)
    memory_bytes: int = whole(0)


def keep_recompute_offload(
    incumbent: Incumbent,
    options: TransferOptions,
    general: Callable[[Incumbent], None] | None = None,
    program: Callable[[Incumbent], None] | None = None,
) -> None:
    """Plan a graph or a chain with a link; next to it `general` solves it without transfers, and `program` as it is."""
    search = search_of(incumbent, options.seed)
    search.deadline = within(incumbent.deadline, 1.0)
    lifted = LiftedIncumbent(incumbent, plans_only=True)
    lifted.deadline = search.deadline
    relaxed: deque[Relaxed] = deque()
    threads: list[Member] = []
    try:
        if options.proof:
            threads.append(Member(incumbent, "transfer-bound", lambda: _relax(search, relaxed, options)))
        if general is not None:
            threads.append(Member(lifted, "without-transfers", lambda: general(lifted)))
            _await_plan(lifted, threads[-1])
        if program is not None:
            threads.append(Member(incumbent, "program", lambda: program(incumbent)))
        _start(search, incumbent)
        if isinstance(incumbent.problem.subject, Graph) and search.graph.values <= MOST_VALUES:
            try_every_plan(incumbent)
        search.run(lambda: relaxed.pop().moved if relaxed else None)
    finally:
        for thread in threads:
            thread.join()


def _await_plan(lifted: LiftedIncumbent, general: Member) -> None:
    """Leave the cores to the solve without transfers, and to the bound's few linear programs, until there is a first
    plan, for a share of the time at most.
    """
    watch = within(lifted.deadline, _FIRST_SHARE)
    while general.running and lifted.plan is None and not (watch.passed() or lifted.stopped()):
        general.wait(0.005)


def _start(search: TransferSearch, incumbent: Incumbent) -> None:
    """Go on from the plan that is known, polished, then from each op once, and from what others do, which is offered as
    it is too. What is far from the best by then is not worth pruning.
    """
    if incumbent.plan is not None:
        search.adopt(incumbent.plan)
        search.polish()
    search.offload_only()
    for name, baseline in _BASELINES.items():
        alone = Incumbent(search.linked.problem, search.linked.deadline, dropped=incumbent.dropped)
        baseline(alone)
        if alone.plan is not None:
            search.linked.offer(alone.plan, name)
            search.adopt(alone.plan)


def search_of(incumbent: Incumbent, seed: int = 0) -> TransferSearch:
    """The search on an incumbent of a graph or a chain, either with a link."""
    chained = isinstance(incumbent.problem.subject, Chain)
    return ChainTransferSearch(incumbent, seed) if chained else TransferSearch(incumbent, seed)


def within(deadline: Deadline, share: float) -> Deadline:
    """A deadline after a share of what is left of another."""
    return deadline.within(share * min(deadline.remaining(), _UNLIMITED_S))


def _relax(search: TransferSearch, found: deque[Relaxed], options: TransferOptions) -> None:
    """Solve relaxations of a graph with a link, which raises bounds, and hand them on to the thread that searches."""
    found.extend(prove(search.linked, within(search.deadline, _PROOF_SHARE), options.memory_bytes))
    search.linked.cease_certifying()
