"""What the store already answers.

The key is written down in `identity.py`. A stored answer is a hit when
    it is settled: proved optimal, proved infeasible, or its method has run to its own end;
    or its gap is within `max_gap`;
    or at least the time asked for was already spent on exactly this problem by exactly this method.
It is put together from parts, each true on its own:
    plan        the cheapest whose peak is within the budget, found at whatever budget. `auto` takes a plan of any
                method, every other method only its own, so that `chen-sqrt` is always what `chen-sqrt` finds
    bound       the greatest proved over the whole space at this budget or a larger one: fewer plans fit a smaller
                budget, so none of them is cheaper. Hence a plan with bound L at budget B answers every budget
                from its peak to B. Bounds of an older solver are not read
    restricted  a bound of a restricted search, only for its own method at its own budget, and named in the answer
    floor       a proved least budget: everything below it is infeasible
    near        for a graph of the same structure with other costs c′: its plan is re-costed by the judge, and from its
                bound L (whole space, at this budget or a larger one) ΣC′ + r · (L − ΣC) with r = min c′_i / c_i is
                proved, since cost′ − ΣC′ = Σ c′_i (n_i − 1) ≥ r Σ c_i (n_i − 1) ≥ r (L − ΣC) when op i runs n_i times.
                `auto` only, as its plan may come from anywhere
A hit that was put together once is given again from memory for the same body (`response_cache.py`), on one condition
that is looked at every time: each row named above is what it was, the plan's stored bytes included, byte for byte. So
what goes out has been judged, as the bytes in the store, on this problem, by this process; a bit flipped in a plan's
row is a miss as before. What is not read again is the graph: the memory holds for the body as sent, which is the graph.
What does not make a hit still starts the next solve: the plan as its incumbent, the bound as its bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import Answer, AnyPlan, InvalidPlan, Problem, Status, Subject, Verdict, gap_of
from remat_solver.contradiction import report_bound, report_budget

from ..identity import Caller
from ..subjects import costs_of
from .cache_key import Keys
from .database import Database
from .snapshot import Snapshot, SnapshotReader
from .store import Effort, Store, StoredPlan
from .tables import graphs
from .verifier import Verifier

_NEAR_CANDIDATES = 4
_AUTO = "auto"


@dataclass(frozen=True)
class Known:
    """Everything that the store knows about one problem for one method, in net bytes.

    `near` is a plan of a graph with other costs, judged on this one, that is not in the store under this graph yet;
    `carried` says that something came from such a graph.
    """

    plan: StoredPlan | None = None
    near: tuple[AnyPlan, Verdict] | None = None
    bound_ns: int | None = None
    restricted: tuple[int, tuple[str, ...]] | None = None
    least_bytes: int | None = None
    enough_bytes: int | None = None
    effort: Effort | None = None
    carried: bool = False

    @property
    def cost_ns(self) -> int | None:
        """The cost of the better plan."""
        costs = [self.plan.cost_ns] if self.plan is not None else []
        return min([*costs, self.near[1].cost_ns] if self.near is not None else costs, default=None)

    @property
    def uses_near(self) -> bool:
        """Whether the better plan is the near one."""
        return self.near is not None and (self.plan is None or self.near[1].cost_ns < self.plan.cost_ns)


class Cache:
    """Looks answers up; never writes, but for dropping what the verifier refuses and what a verified plan refutes."""

    def __init__(self, database: Database, store: Store, verifier: Verifier, snapshots: SnapshotReader) -> None:
        self._database, self._store, self._verifier, self._snapshots = database, store, verifier, snapshots

    async def known(self, caller: Caller, keys: Keys, problem: Problem, snapshot: Snapshot | None = None) -> Known:
        """What is known about a net problem, from a look just taken or a new one; its plan has passed the judge."""
        found = snapshot or await self._snapshots.read(keys, problem.budget_bytes)
        known = Known(
            plan=await self._good_plan(keys, problem, found.plan(keys.graph)),
            bound_ns=found.bound_ns,
            restricted=found.restricted,
            least_bytes=found.least_bytes,
            enough_bytes=found.enough,
            effort=found.effort,
        )
        if keys.method == _AUTO and not _proved(known):
            async with self._database.read() as connection:
                known = await self._with_near(connection, caller, keys, problem, known)
        return await self._without_refuted(keys, problem, known)

    async def _without_refuted(self, keys: Keys, problem: Problem, known: Known) -> Known:
        """What is known without what its own plan shows to be wrong, which is logged and dropped from the store."""
        if known.near is not None and known.uses_near:
            plan, verdict = known.near
        elif known.plan is not None:
            plan, verdict = None, known.plan.claimed
        else:
            return known
        high = known.bound_ns is not None and known.bound_ns > verdict.cost_ns
        tall = known.least_bytes is not None and known.least_bytes > verdict.peak_bytes
        if not (high or tall):
            return known
        if plan is None and known.plan is not None:
            plan = await self._verifier.plan(keys.graph, problem, known.plan.data, verdict)
        if high:
            report_bound(problem, plan, known.bound_ns or 0, (), "the store")
        if tall:
            report_budget(problem, plan, known.least_bytes or 0, verdict.peak_bytes, "the store")
        async with self._database.write() as connection:
            await self._store.drop_refuted(connection, keys.graph, verdict)
        bound, least = None if high else known.bound_ns, None if tall else known.least_bytes
        return replace(known, bound_ns=bound, least_bytes=least, effort=None)

    async def _good_plan(self, keys: Keys, problem: Problem, best: StoredPlan | None) -> StoredPlan | None:
        if best is None or await self._verifier.passes(keys.graph, problem, best.data, best.claimed):
            return best
        good, broken = None, [best.id]
        method_key = None if keys.method == _AUTO else keys.method
        async with self._database.write() as connection:
            for other in await self._store.plans_within(connection, keys.graph, problem.budget_bytes, method_key):
                if other.id == best.id:
                    continue
                if await self._verifier.passes(keys.graph, problem, other.data, other.claimed):
                    good = other
                    break
                broken.append(other.id)
            for plan_id in broken:
                await self._store.drop_plan(connection, plan_id)
        return good

    async def _with_near(
        self, connection: AsyncConnection, caller: Caller, keys: Keys, problem: Problem, known: Known
    ) -> Known:
        rows = await connection.execute(
            select(graphs.c.key, graphs.c.data)
            .where(graphs.c.structure_key == keys.structure, graphs.c.key != keys.graph)
            .order_by(graphs.c.used_at.desc(), graphs.c.key)
            .limit(_NEAR_CANDIDATES)
        )
        for row in rows.all():
            other = await self._verifier.graph(row.key, row.data, caller.key)
            if other is not None:
                known = await self._nearer(connection, row.key, other, problem, known)
        return known

    async def _nearer(
        self, connection: AsyncConnection, key: str, other: Subject, problem: Problem, known: Known
    ) -> Known:
        bound = await self._store.whole_bound(connection, key, problem.budget_bytes)
        if bound is not None:
            carried = carried_bound(other, problem.subject, bound)
            if known.bound_ns is None or carried > known.bound_ns:
                known = replace(known, bound_ns=carried, carried=True)
        least, enough = await self._store.floor(connection, key)  # costs play no part in what fits
        if least is not None and least > (known.least_bytes or 0):
            known = replace(known, least_bytes=least, carried=True)
        if enough is not None and (known.enough_bytes is None or enough < known.enough_bytes):
            known = replace(known, enough_bytes=enough)
        row = await self._store.best_plan(connection, key, problem.budget_bytes, None)
        if row is None:
            return known
        plan = await self._verifier.plan(key, Problem(other, problem.budget_bytes), row.data, row.claimed)
        if plan is None:
            return known
        try:
            verdict = await self._verifier.verify(problem, plan)
        except InvalidPlan:
            return known
        if known.cost_ns is None or verdict.cost_ns < known.cost_ns:
            known = replace(known, near=(plan, verdict), carried=True)
        return known


def carried_bound(old: Subject, new: Subject, bound_ns: int) -> int:
    """ΣC′ + r · (L − ΣC), r = min c′_i / c_i: a proved bound for the same structure with other costs, rounded up.

    Rounding up is right: costs are whole ns. An op that cost nothing puts no limit on r.
    """
    ratios = [Fraction(c2, c1) for c1, c2 in zip(costs_of(old), costs_of(new), strict=True) if c1 > 0]
    extra = max(0, bound_ns - old.total_cost_ns)
    least = min(ratios, default=Fraction(0)) * extra
    return new.total_cost_ns - (-least.numerator // least.denominator)


def _proved(known: Known) -> bool:
    return known.plan is not None and known.bound_ns is not None and known.bound_ns >= known.plan.cost_ns


def best_bound(known: Known, problem: Problem, max_gap: float) -> tuple[int, tuple[str, ...]]:
    """The bound to report and the restrictions it needs: none where the whole-space bound is within the gap."""
    bound, within = max(known.bound_ns or 0, problem.subject.total_cost_ns), ()
    cost = known.cost_ns
    if cost is not None and gap_of(cost, bound) <= max_gap:
        return bound, within
    if known.restricted is not None and known.restricted[0] > bound:
        bound, within = known.restricted  # type: ignore[assignment]
    return (bound if cost is None else min(bound, cost)), within


def is_final(known: Known, problem: Problem, max_gap: float, time_limit_s: float) -> bool:
    """Whether what is known answers a request, by the rules above."""
    cost = known.cost_ns
    if cost is None and known.least_bytes is not None and known.least_bytes > problem.budget_bytes:
        return True
    if cost is not None and gap_of(cost, best_bound(known, problem, max_gap)[0]) <= max_gap:
        return True
    effort = known.effort
    if effort is None or (cost is None and effort.status not in (Status.NOTHING_FOUND, Status.INFEASIBLE)):
        return False  # the plan that the effort found is gone
    return effort.settled or effort.seconds >= time_limit_s


def answer_of(known: Known, problem: Problem, method: str, max_gap: float, digest: str) -> Answer:
    """What is known as an answer, in net bytes, without its plan."""
    budget = problem.budget_bytes
    effort = known.effort
    seconds = 0.0 if effort is None else effort.seconds
    common: dict[str, Any] = {
        "method": method,
        "budget_bytes": budget,
        "seconds": seconds,
        "least_budget_bytes": known.enough_bytes,
        "least_budget_bound_bytes": known.least_bytes,
        "digest": digest,
    }
    cost = known.cost_ns
    if cost is None and known.least_bytes is not None and known.least_bytes > budget:
        said = effort.message if effort is not None and effort.status == Status.INFEASIBLE else ""
        return Answer(Status.INFEASIBLE, message=said, **common)
    bound, within = best_bound(known, problem, max_gap)
    if cost is None:
        limit = None if effort is None else effort.limit
        within = within or (effort.restricted_to if effort is not None else ())
        said = "" if effort is None else effort.message
        return Answer(Status.NOTHING_FOUND, limit=limit, bound_ns=bound, restricted_to=within, message=said, **common)
    gap = gap_of(cost, bound)
    if bound >= cost:
        status, limit = Status.OPTIMAL, None
    else:
        limit = "gap" if gap <= max_gap else (effort.limit if effort is not None else None)
        status = Status.FEASIBLE
    near = known.near
    peak = near[1].peak_bytes if near is not None and known.uses_near else known.plan.peak_bytes if known.plan else 0
    return Answer(
        status,
        limit=limit,
        restricted_to=within,
        **common,
    ).priced(problem.subject.total_cost_ns, cost, bound, peak)
