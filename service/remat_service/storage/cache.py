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
    near        for a graph of the same structure with other costs c′: its plan is re-costed by the verifier, and from
                its bound L (whole space, at this budget or a larger one) ΣC′ + r · (L − ΣC) with r = min c′_i / c_i is
                proved, since cost′ − ΣC′ = Σ c′_i (n_i − 1) ≥ r Σ c_i (n_i − 1) ≥ r (L − ΣC) when op i runs n_i times.
                `auto` only, as its plan may come from anywhere
A hit that was put together once is given again from memory for the same body (`response_cache.py`), on one condition
that is looked at every time: each row named above is what it was, the plan's stored bytes included, byte for byte. So
what goes out has been verified, as the bytes in the store, on this problem, by this process; a bit flipped in a plan's
row is a miss as before. What is not read again is the graph: the memory holds for the body as sent, which is the graph.
What does not make a hit still starts the next solve: the plan as its incumbent, the bound as its bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import Answer, AnyPlan, InvalidPlan, Problem, Status, Subject, Verdict
from remat_solver.contradiction import report_bound, report_budget
from remat_solver.knowledge import Bound, Ending, Known

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
class Stored:
    """Everything that the store has about one problem for one method, in net bytes.

    `near` is a plan of a graph with other costs, verified on this one, that is not in the store under this graph yet;
    `carried` says that something came from such a graph.
    """

    problem: Problem
    plan: StoredPlan | None = None
    near: tuple[AnyPlan, Verdict] | None = None
    bound_ns: int | None = None
    restricted: Bound | None = None
    least_bytes: int | None = None
    enough_bytes: int | None = None
    effort: Effort | None = None
    carried: bool = False

    @cached_property
    def known(self) -> Known:
        """What is known by it."""
        known = Known(self.problem).needing(self.least_bytes).sufficing(self.enough_bytes)
        if self.bound_ns is not None:
            known = known.with_bound(Bound(self.bound_ns))
        if self.restricted is not None:
            known = known.with_bound(self.restricted)
        if self.plan is not None:
            known = known.with_plan(self.plan.claimed)
        if self.near is not None:
            known = known.with_plan(self.near[1])
        too_small = self.least_bytes is not None and self.least_bytes > self.problem.budget_bytes
        return replace(known, infeasible=too_small and known.cost_ns is None)

    @property
    def cost_ns(self) -> int | None:
        """The cost of the better plan."""
        return self.known.cost_ns

    @property
    def uses_near(self) -> bool:
        """Whether the better plan is the near one."""
        return self.near is not None and (self.plan is None or self.near[1].cost_ns < self.plan.cost_ns)

    def is_final(self, max_gap: float, time_limit_s: float) -> bool:
        """Whether what is known answers a request, by the rules above."""
        if self.known.settled(max_gap):
            return True
        effort = self.effort
        if effort is None or (self.cost_ns is None and effort.status not in (Status.NOTHING_FOUND, Status.INFEASIBLE)):
            return False  # the plan that the effort found is gone
        return effort.settled or effort.seconds >= time_limit_s

    def answer(self, method: str, max_gap: float, digest: str) -> Answer:
        """What is known as an answer, in net bytes, without its plan; its sentence only where the effort left one."""
        effort, known = self.effort, self.known
        if effort is None:
            return replace(known.answer(method, max_gap, digest=digest), message="")
        ending = Ending(effort.limit, effort.restricted_to or None)
        answer = known.answer(method, max_gap, ending, seconds=effort.seconds, digest=digest)
        own = known.cost_ns is None and (not known.infeasible or effort.status == Status.INFEASIBLE)
        return replace(answer, message=effort.message if own else "")


class Cache:
    """Looks answers up; never writes, but for dropping what the verifier refuses and what a verified plan refutes."""

    def __init__(self, database: Database, store: Store, verifier: Verifier, snapshots: SnapshotReader) -> None:
        self._database, self._store, self._verifier, self._snapshots = database, store, verifier, snapshots

    async def known(self, caller: Caller, keys: Keys, problem: Problem, snapshot: Snapshot | None = None) -> Stored:
        """What is stored about a net problem, from a look just taken or a new one; its plan is verified."""
        found = snapshot or await self._snapshots.read(keys, problem.budget_bytes)
        stored = Stored(
            problem,
            plan=await self._good_plan(keys, problem, found.plan(keys.graph)),
            bound_ns=found.bound_ns,
            restricted=found.restricted,
            least_bytes=found.least_bytes,
            enough_bytes=found.enough,
            effort=found.effort,
        )
        proved = stored.cost_ns is not None and stored.known.whole_ns >= stored.cost_ns
        if keys.method == _AUTO and not proved:
            async with self._database.read() as connection:
                stored = await self._with_near(connection, caller, keys, problem, stored)
        return await self._without_refuted(keys, problem, stored)

    async def _without_refuted(self, keys: Keys, problem: Problem, stored: Stored) -> Stored:
        """What is stored without what its own plan shows to be wrong, which is logged and dropped from the store."""
        if stored.near is not None and stored.uses_near:
            plan, verdict = stored.near
        elif stored.plan is not None:
            plan, verdict = None, stored.plan.claimed
        else:
            return stored
        high = stored.bound_ns is not None and stored.bound_ns > verdict.cost_ns
        tall = stored.least_bytes is not None and stored.least_bytes > verdict.peak_bytes
        if not (high or tall):
            return stored
        if plan is None and stored.plan is not None:
            plan = await self._verifier.plan(keys.graph, problem, stored.plan.data, verdict)
        if high:
            report_bound(problem, plan, stored.bound_ns or 0, (), "the store")
        if tall:
            report_budget(problem, plan, stored.least_bytes or 0, verdict.peak_bytes, "the store")
        async with self._database.write() as connection:
            await self._store.drop_refuted(connection, keys.graph, verdict)
        bound, least = None if high else stored.bound_ns, None if tall else stored.least_bytes
        return replace(stored, bound_ns=bound, least_bytes=least, effort=None)

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
        self, connection: AsyncConnection, caller: Caller, keys: Keys, problem: Problem, stored: Stored
    ) -> Stored:
        rows = await connection.execute(
            select(graphs.c.key, graphs.c.data)
            .where(graphs.c.structure_key == keys.structure, graphs.c.key != keys.graph)
            .order_by(graphs.c.used_at.desc(), graphs.c.key)
            .limit(_NEAR_CANDIDATES)
        )
        for row in rows.all():
            other = await self._verifier.graph(row.key, row.data, caller.key)
            if other is not None:
                stored = await self._nearer(connection, row.key, other, problem, stored)
        return stored

    async def _nearer(
        self, connection: AsyncConnection, key: str, other: Subject, problem: Problem, stored: Stored
    ) -> Stored:
        bound = await self._store.whole_bound(connection, key, problem.budget_bytes)
        if bound is not None:
            carried = carried_bound(other, problem.subject, bound)
            if stored.bound_ns is None or carried > stored.bound_ns:
                stored = replace(stored, bound_ns=carried, carried=True)
        least, enough = await self._store.floor(connection, key)  # costs play no part in what fits
        if least is not None and least > (stored.least_bytes or 0):
            stored = replace(stored, least_bytes=least, carried=True)
        if enough is not None and (stored.enough_bytes is None or enough < stored.enough_bytes):
            stored = replace(stored, enough_bytes=enough)
        row = await self._store.best_plan(connection, key, problem.budget_bytes, None)
        if row is None:
            return stored
        plan = await self._verifier.plan(key, Problem(other, problem.budget_bytes), row.data, row.claimed)
        if plan is None:
            return stored
        try:
            verdict = await self._verifier.verify(problem, plan)
        except InvalidPlan:
            return stored
        if stored.cost_ns is None or verdict.cost_ns < stored.cost_ns:
            stored = replace(stored, near=(plan, verdict), carried=True)
        return stored


def carried_bound(old: Subject, new: Subject, bound_ns: int) -> int:
    """ΣC′ + r · (L − ΣC), r = min c′_i / c_i: a proved bound for the same structure with other costs, rounded up.

    Rounding up is right: costs are whole ns. An op that cost nothing puts no limit on r.
    """
    ratios = [Fraction(c2, c1) for c1, c2 in zip(costs_of(old), costs_of(new), strict=True) if c1 > 0]
    extra = max(0, bound_ns - old.total_cost_ns)
    least = min(ratios, default=Fraction(0)) * extra
    return new.total_cost_ns - (-least.numerator // least.denominator)
