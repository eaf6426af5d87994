"""What the store already answers.

The key is written down in `identity.py`. A stored answer is a hit when
    it is settled: proved optimal, proved infeasible, or its method has run to its own end;
    or its gap is within `max_gap`;
    or at least the time asked for was already spent on exactly this problem by exactly this method.
It is put together from parts, each true on its own:
    plan        the cheapest whose peak is within the budget, found at whatever budget. `auto` takes a plan of any
                method, every other method only its own, so that `chen-sqrt` is always what `chen-sqrt` finds
    bound       what a certificate proves: the best at this budget or a larger one, its rows written anew for this one
                (`remat_ir.proof.carry`) and checked here. Any version of the solver may have found it
    claim       a bound over the whole space without a certificate, at this budget or a larger one: fewer plans fit a
                smaller budget. It counts where there are no certificates (joins, chains with a link) or none is asked
                for; elsewhere the answer names it, and who says it. Claims of an older solver are not read
    restricted  a claim of a restricted search, only for its own method at its own budget, and named in the answer; not
                where the method searches a larger space by now
    floor       a certificate that no plan fits this budget or a larger one; else a claim of that
    near        for a graph of the same structure with other costs: its plan is re-costed by the verifier, and its
                certificate scaled leaf by leaf and checked on the new costs. Where there are no certificates, from its
                claim L (whole space, at this budget or a larger one) follows ΣC′ + r · (L − ΣC), r = min c′_i / c_i,
                since cost′ − ΣC′ = Σ c′_i (n_i − 1) ≥ r Σ c_i (n_i − 1) ≥ r (L − ΣC) when op i runs n_i times.
                `auto` only, as its plan may come from anywhere
Claims, floors and efforts are sealed (`seals.py`). A row whose seal does not hold, or whose certificate does not prove
what the row says, is logged, counted and passed over, and with it the effort, which may have rested on it. A look
deletes nothing: the key may be the wrong one. The next solve of the problem takes the place of such rows.
A hit that was put together once is given again from memory for the same body (`response_cache.py`), on one condition
that is looked at every time: each row named above is what it was, the plan's stored bytes included, byte for byte. So
what goes out has been verified, as the bytes in the store, on this problem, by this process; a bit flipped in a plan's
row is a miss as before. What is not read again is the graph: the memory holds for the body as sent, which is the graph.
What does not make a hit still starts the next solve: the plan as its incumbent, the bound as its bound.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import structlog
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import (
    Answer,
    AnswerVerdict,
    AnyPlan,
    InvalidPlan,
    Problem,
    Status,
    Subject,
    Verdict,
    certified_need,
    gap_of,
    outgrown,
    structure_digest,
)
from remat_ir.proof import certain_need, certifiable
from remat_solver import Bound, Ending, Known, report_bound, report_budget

from ..clock import Clock
from ..identity import Caller
from ..lru import Lru
from ..metrics import Metrics
from ..subjects import costs_of
from .cache_key import Keys
from .claims import Claim, Claims, Effort, Floor
from .database import Database
from .snapshot import Row, Snapshot, SnapshotReader
from .store import Store, StoredPlan, StoredProof
from .tables import graphs
from .verifier import CheckedProof, Verifier

log = structlog.get_logger("remat_service.storage.cache")

_NEAR_CANDIDATES = 4
_MOST_LOOKS = 100  # each look that finds damage passes over one row more
_MOST_REPORTED = 10_000  # rows that are remembered as logged and counted


@dataclass(frozen=True)
class Stored:
    """Everything that the store has about one problem for one method, in net bytes.

    `proof` is checked on this problem. `near` is a plan of a graph with other costs, verified on this one, that is not
    in the store under this graph yet; `carried` says that something came from such a graph; `partial`, that the time
    was too short for some certificate. `snapshot` is what all of it rests on. `certain_bytes` is what a single op
    needs, for certain; None where it was not worked out yet. `unsound` are rows that were passed over: damaged, or of
    a smaller space than the method searches by now. `refuting` is what a verified plan costs and needs that shows
    others to be wrong.
    """

    problem: Problem
    snapshot: Snapshot | None = None
    plan: StoredPlan | None = None
    near: tuple[AnyPlan, Verdict] | None = None
    proof: CheckedProof | None = None
    claim: Claim | None = None
    restricted: Claim | None = None
    least_bytes: int | None = None
    enough_bytes: int | None = None
    effort: Effort | None = None
    carried: bool = False
    partial: bool = False
    certify: bool = True
    certain_bytes: int | None = None
    unsound: tuple[Row, ...] = ()
    refuting: Verdict | None = None

    @cached_property
    def known(self) -> Known:
        """What is known by it."""
        known = Known(self.problem).needing(self.least_bytes).sufficing(self.enough_bytes)
        if self.proof is not None and self.proof.bound_ns is not None:
            known = known.with_bound(Bound(self.proof.bound_ns))
        if self.claim is not None and not (self.certify and certifiable(self.problem.subject)):
            known = known.with_bound(Bound(self.claim.bound_ns))
        if self.restricted is not None:
            known = known.with_bound(Bound(self.restricted.bound_ns, self.restricted.within))
        if self.plan is not None:
            known = known.with_plan(self.plan.claimed)
        if self.near is not None:
            known = known.with_plan(self.near[1])
        too_small = self.least_bytes is not None and self.least_bytes > self.problem.budget_bytes
        return replace(known, infeasible=(too_small or self.proves_none) and known.cost_ns is None)

    @property
    def proves_none(self) -> bool:
        """Whether it is certified that no plan fits."""
        return self.proof is not None and self.proof.bound_ns is None

    @property
    def cost_ns(self) -> int | None:
        """The cost of the better plan."""
        return self.known.cost_ns

    @property
    def uses_near(self) -> bool:
        """Whether the better plan is the near one."""
        return self.near is not None and (self.plan is None or self.near[1].cost_ns < self.plan.cost_ns)

    @property
    def proof_id(self) -> str | None:
        """The row of the certificate, where that is for exactly this problem already."""
        found = None if self.snapshot is None else self.snapshot.too_small if self.proves_none else self.snapshot.proof
        return found.id if found is not None and self.proof is not None and found.data == self.proof.data else None

    def is_final(self, max_gap: float, time_limit_s: float) -> bool:
        """Whether what is known answers a request, by the rules above."""
        effort = self.effort
        if self.partial:  # more is proved than is known yet
            return self.cost_ns is not None and self.known.settled(max_gap)
        if self.known.infeasible and self.certify and certifiable(self.problem.subject) and not self.proves_none:
            # claimed only: a solve certifies it, if that was not tried already
            return effort is not None and (effort.status == Status.INFEASIBLE or effort.settled)
        if self.known.settled(max_gap):
            return True
        if effort is None or effort.status in (Status.OPTIMAL, Status.INFEASIBLE):
            return False  # what proved it is gone
        if self.cost_ns is None and effort.status != Status.NOTHING_FOUND:
            return False  # the plan that the effort found is gone
        if effort.settled or effort.seconds >= time_limit_s:
            return True
        if effort.limit is not None or self.claim is None or self.cost_ns is None:
            return False
        # it ended since this claim was enough and could not be certified
        return gap_of(self.cost_ns, min(self.claim.bound_ns, self.cost_ns)) <= max_gap

    def answer(self, method: str, max_gap: float, digest: str) -> Answer:
        """What is known as an answer, in net bytes, without its plan; its sentence only where the effort left one."""
        effort, known = self.effort, self.known
        if effort is None:
            return self.with_claims(replace(known.answer(method, max_gap, digest=digest), message=""))
        ending = Ending(effort.limit, effort.within or None)
        answer = known.answer(method, max_gap, ending, seconds=effort.seconds, digest=digest)
        own = known.cost_ns is None and (not known.infeasible or effort.status == Status.INFEASIBLE)
        return self.with_claims(replace(answer, message=effort.message if own else ""))

    def with_claims(self, answer: Answer) -> Answer:
        """An answer made from what is known, that says what of it has no certificate, and who claims that."""
        least = certain_need(self.problem.subject) if self.certain_bytes is None else self.certain_bytes
        if self.proves_none and self.snapshot is not None and self.snapshot.too_small is not None:
            least = max(least, self.snapshot.too_small.budget_bytes + 1)
        elif self.proves_none:
            least = max(least, self.problem.budget_bytes + 1)
        answer = certified_need(answer, AnswerVerdict(None, None, 0, least > self.problem.budget_bytes, least))
        if answer.status is Status.INFEASIBLE:
            return answer
        proved = self.problem.subject.total_cost_ns
        if self.proof is not None and self.proof.bound_ns is not None:
            proved = max(proved, self.proof.bound_ns)
        said = self.restricted if answer.restricted_to else self.claim
        claimed = answer.bound_ns
        if said is not None and not answer.restricted_to:
            claimed = said.bound_ns if answer.cost_ns is None else min(said.bound_ns, answer.cost_ns)
        if claimed is None or claimed <= proved:
            return answer
        said_by = answer.method if said is None else said.source or answer.method
        return replace(answer, claimed_bound_ns=claimed, claimed_by=said_by)


class Cache:
    """Looks answers up, which never writes; and clears the way for what a solve has found."""

    def __init__(
        self,
        database: Database,
        store: Store,
        claims: Claims,
        verifier: Verifier,
        snapshots: SnapshotReader,
        metrics: Metrics,
    ) -> None:
        self._database, self._store, self._claims = database, store, claims
        self._verifier, self._snapshots, self._metrics = verifier, snapshots, metrics
        self._reported: Lru[Row, bool] = Lru(_MOST_REPORTED)

    async def known(
        self,
        caller: Caller,
        keys: Keys,
        problem: Problem,
        snapshot: Snapshot | None = None,
        within_s: float | None = None,
    ) -> Stored:
        """What is stored about a net problem, from a look just taken or a new one; plan and certificate are checked.

        Args:
            within_s: seconds to look: the plan first, then the certificates, then graphs with other costs. What the
                time is too short for is left out, and the result is `partial`.
        """
        time = _Time(self._database.clock, within_s)
        stored = await self._known(caller, keys, problem, snapshot, time)
        self._metrics.look_seconds.labels("part" if stored.partial else "all").observe(time.spent())
        return stored

    async def _known(
        self, caller: Caller, keys: Keys, problem: Problem, snapshot: Snapshot | None, time: _Time
    ) -> Stored:
        found = snapshot or await self._snapshots.read(keys, problem.budget_bytes)
        unsound: list[Row] = []
        for _ in range(_MOST_LOOKS):
            plan, broken = await self._good_plan(keys, problem, found.plan)
            proof, damaged, partial = await self._checked(keys, problem, found, time.share(plan is not None))
            narrow = [row for row in (found.restricted, found.effort) if row and outgrown(keys.method_name, row.within)]
            if not damaged and not narrow:
                break
            unsound += [*damaged, *narrow]
            found = await self._snapshots.read_without(keys, problem.budget_bytes, unsound)
        else:
            found, proof = Snapshot(found.plan, *(None,) * 6, found.under_way), None
            plan, broken = await self._good_plan(keys, problem, found.plan)
        floor, too_small = found.floor or Floor(0, None, None), None if partial else found.too_small
        least = max(floor.least_bytes, 0 if too_small is None else too_small.budget_bytes + 1)
        stored = Stored(
            problem,
            found,
            plan=plan,
            proof=proof,
            partial=partial,
            claim=found.claim,
            restricted=found.restricted,
            least_bytes=least or None,
            enough_bytes=floor.enough_bytes,
            effort=found.effort,
            certify=keys.certify,
            certain_bytes=await self._verifier.certain_need(keys.graph, problem.subject),
            unsound=(*unsound, *broken),
        )
        proved = stored.cost_ns is not None and stored.known.whole_ns >= stored.cost_ns
        if keys.any_method and not proved:
            async with self._database.read(brief=True) as connection:
                stored = await self._with_near(connection, caller, keys, problem, stored, time)
        return await self._without_refuted(keys, problem, stored)

    async def _checked(
        self, keys: Keys, problem: Problem, found: Snapshot, time: _Time
    ) -> tuple[CheckedProof | None, list[Row], bool]:
        """The certificate of the problem, the rows that are not what was stored, and whether the time was too short.

        Rows of the second kind are logged and counted.
        """
        damaged: list[Row] = [
            claim
            for claim in (found.claim, found.restricted)
            if claim is not None and not self._claims.holds_claim(keys.graph, claim)
        ]
        if found.floor is not None and not self._claims.holds_floor(keys.graph, found.floor):
            damaged.append(found.floor)
        if found.effort is not None and not self._claims.holds_effort(
            keys.graph, problem.budget_bytes, keys.method, found.effort
        ):
            damaged.append(found.effort)
        proof: CheckedProof | None = None
        partial = False
        for row in (found.proof, found.too_small):
            if row is None:
                continue
            # what is too small is also said of the largest budget that it is proved of
            said = row.budget_bytes if row.bound_ns is None else min(row.budget_bytes, problem.budget_bytes)
            for budget in sorted({said, min(said, problem.budget_bytes)}, reverse=True):
                try:
                    checked = await self._verifier.proof(
                        keys.graph, Problem(problem.subject, budget), row.data, time.left()
                    )
                except TimeoutError:
                    partial = True
                    break
                if checked is None or not checked.proves(row.bound_ns):
                    damaged.append(row)
                    break
                if budget == problem.budget_bytes:
                    proof = checked
        for one in damaged:
            self._report(keys, problem.budget_bytes, one)
        if partial and proof is None:
            proof = await self._at_hand(keys, problem)
        return proof, damaged, partial

    async def _at_hand(self, keys: Keys, problem: Problem) -> CheckedProof | None:
        """The best certificate of this very problem, if it was checked before: that of the solve under way."""
        async with self._database.read(brief=True) as connection:
            own = await self._store.own_proof(connection, keys.graph, problem.budget_bytes)
            row = None if own is None else await self._store.proof(connection, own[0])
        if row is None:
            return None
        try:
            return await self._verifier.proof(keys.graph, problem, row.data, 0.0)
        except TimeoutError:
            return None

    def _report(self, keys: Keys, net_budget: int, row: Row) -> None:
        """Log and count a damaged row, once for as long as it is remembered."""
        if self._reported.get(row) is None:
            self._reported.put(row, True, 1)
            kind = type(row).__name__.removeprefix("Stored").lower()
            log.error("a stored row is damaged and is not believed", kind=kind, graph=keys.graph, budget=net_budget)
            self._metrics.damaged.labels(kind).inc()

    async def clear(self, connection: AsyncConnection, keys: Keys, stored: Stored) -> None:
        """Drop what a look has passed over, and how solves of its graph ended: a solve has found it anew."""
        for row in stored.unsound:
            if isinstance(row, StoredProof):
                await self._store.drop_proof(connection, row)
            elif isinstance(row, StoredPlan):
                await self._store.drop_plan(connection, row)
            else:
                await self._claims.drop(connection, keys.graph, row)
        if stored.refuting is not None:
            await self._claims.drop_refuted(connection, keys.graph, stored.refuting)
        if stored.unsound or stored.refuting is not None:
            await self._claims.drop_efforts(connection, keys.graph)

    async def _without_refuted(self, keys: Keys, problem: Problem, stored: Stored) -> Stored:
        """What is stored without what its own plan shows to be wrong, which is logged."""
        if stored.near is not None and stored.uses_near:
            plan, verdict = stored.near
        elif stored.plan is not None:
            plan, verdict = None, stored.plan.claimed
        else:
            return stored
        claimed, proof = stored.claim, stored.proof
        wrong = proof is not None and (proof.bound_ns is None or proof.bound_ns > verdict.cost_ns)
        high = claimed is not None and claimed.bound_ns > verdict.cost_ns
        tall = stored.least_bytes is not None and stored.least_bytes > verdict.peak_bytes
        if not (high or tall or wrong):
            return stored
        if plan is None and stored.plan is not None:
            plan = await self._verifier.plan(keys.graph, problem, stored.plan.data, verdict)
        if wrong and proof is not None:
            report_bound(problem, plan, proof.bound_ns or 0, (), "a certificate in the store")
        if high and claimed is not None:
            report_bound(problem, plan, claimed.bound_ns, (), f"{claimed.source} in the store")
        if tall:
            report_budget(problem, plan, stored.least_bytes or 0, verdict.peak_bytes, "the store")
        return replace(
            stored,
            refuting=verdict,
            proof=None if wrong else proof,
            claim=None if high else claimed,
            least_bytes=None if tall else stored.least_bytes,
            effort=None,
        )

    async def _good_plan(
        self, keys: Keys, problem: Problem, best: StoredPlan | None
    ) -> tuple[StoredPlan | None, list[StoredPlan]]:
        """The cheapest plan that the verifier passes, and those that it does not."""
        if best is None or await self._verifier.passes(keys.graph, problem, best.data, best.claimed):
            return best, []
        broken = [best]
        method_key = None if keys.any_method else keys.method
        async with self._database.read(brief=True) as connection:
            others = await self._store.plans_within(connection, keys.graph, problem.budget_bytes, method_key)
        for other in others:
            if other.id == best.id:
                continue
            if await self._verifier.passes(keys.graph, problem, other.data, other.claimed):
                return other, broken
            broken.append(other)
        return None, broken

    async def _with_near(
        self, connection: AsyncConnection, caller: Caller, keys: Keys, problem: Problem, stored: Stored, time: _Time
    ) -> Stored:
        rows = await connection.execute(
            select(graphs.c.key, graphs.c.data)
            .where(graphs.c.structure_key == keys.structure, graphs.c.key != keys.graph)
            .order_by(graphs.c.used_at.desc(), graphs.c.key)
            .limit(_NEAR_CANDIDATES)
        )
        others: list[str] = []
        for row in rows.all():
            if time.over():
                return replace(stored, partial=True)
            other = await self._verifier.graph(row.key, row.data, caller.key)
            # its own column may say what is not so, and a claim about another structure says nothing here
            if other is not None and await self._same_structure(caller, keys, other):
                stored = await self._nearer(connection, row.key, other, keys, problem, stored)
                others.append(row.key)
        if certifiable(problem.subject):
            for key in others:
                stored = await self._with_near_proofs(connection, key, keys, problem, stored, time)
        return stored

    async def _with_near_proofs(
        self, connection: AsyncConnection, key: str, keys: Keys, problem: Problem, stored: Stored, time: _Time
    ) -> Stored:
        for row in await self._store.best_proofs(connection, key, problem.budget_bytes):
            try:
                proof = await self._verifier.proof(keys.graph, problem, row.data, time.left())
            except TimeoutError:
                stored = replace(stored, partial=True)
                continue
            if proof is None or stored.proves_none:
                continue
            if proof.bound_ns is None or proof.bound_ns > stored.known.whole_ns:
                stored = replace(stored, proof=proof, carried=True)
        return stored

    async def _same_structure(self, caller: Caller, keys: Keys, other: Subject) -> bool:
        return caller.key(await asyncio.to_thread(structure_digest, other)) == keys.structure

    async def _nearer(
        self, connection: AsyncConnection, key: str, other: Subject, keys: Keys, problem: Problem, stored: Stored
    ) -> Stored:
        if not certifiable(problem.subject):
            claim = await self._claims.claim(connection, key, problem.budget_bytes)
            if claim is not None:
                bound_ns = carried_bound(other, problem.subject, claim.bound_ns)
                if stored.claim is None or bound_ns > stored.claim.bound_ns:
                    stored = replace(stored, claim=claim._replace(bound_ns=bound_ns), carried=True)
        least, enough = await self._claims.floor(connection, key)  # costs play no part in what fits
        if least is not None and least > (stored.least_bytes or 0):
            stored = replace(stored, least_bytes=least, carried=True)
        if enough is not None and (stored.enough_bytes is None or enough < stored.enough_bytes):
            stored = replace(stored, enough_bytes=enough)
        row_plan = await self._store.best_plan(connection, key, problem.budget_bytes, None)
        if row_plan is None:
            return stored
        plan = await self._verifier.plan(key, Problem(other, problem.budget_bytes), row_plan.data, row_plan.claimed)
        if plan is None:
            return stored
        try:
            verdict = await self._verifier.verify(problem, plan)
        except InvalidPlan:
            return stored
        if stored.cost_ns is None or verdict.cost_ns < stored.cost_ns:
            stored = replace(stored, near=(plan, verdict), carried=True)
        return stored


class _Time:
    """The time that a look may take; without an end where `within_s` is None."""

    def __init__(self, clock: Clock, within_s: float | None, begun: float | None = None) -> None:
        self._clock, self._within_s = clock, within_s
        self._begun = clock.monotonic() if begun is None else begun

    def spent(self) -> float:
        """Seconds since it began."""
        return self._clock.monotonic() - self._begun

    def left(self) -> float | None:
        """Seconds that are left."""
        return None if self._within_s is None else max(0.0, self._within_s - self.spent())

    def over(self) -> bool:
        """Whether it has ended."""
        return self.left() == 0.0

    def share(self, whole: bool) -> _Time:
        """All of it, or half: the other half is for a plan, where there is none yet."""
        within_s = self._within_s
        return self if whole or within_s is None else _Time(self._clock, within_s / 2, self._begun)


def carried_bound(old: Subject, new: Subject, bound_ns: int) -> int:
    """ΣC′ + r · (L − ΣC), r = min c′_i / c_i: a proved bound for the same structure with other costs, rounded up.

    Rounding up is right: costs are whole ns. An op that cost nothing puts no limit on r.
    """
    ratios = [Fraction(c2, c1) for c1, c2 in zip(costs_of(old), costs_of(new), strict=True) if c1 > 0]
    extra = max(0, bound_ns - old.total_cost_ns)
    least = min(ratios, default=Fraction(0)) * extra
    return new.total_cost_ns - (-least.numerator // least.denominator)
