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
    inside      what a certificate of the method's own space proves, at this budget or a larger one (`tags` has them)
    floor       a certificate that no plan fits this budget or a larger one; else a claim of that
    near        for a graph of the same structure with other costs: its plan is re-costed by the verifier, and its
                certificate scaled leaf by leaf and checked on the new costs. Where there are no certificates, from its
                claim L (whole space, at this budget or a larger one) follows ΣC′ + r · (L − ΣC), r = min c′_i / c_i,
                since cost′ − ΣC′ = Σ c′_i (n_i − 1) ≥ r Σ c_i (n_i − 1) ≥ r (L − ΣC) when op i runs n_i times.
                `auto` only, as its plan may come from anywhere
Claims, floors and efforts are sealed (`seals.py`). A row whose seal does not hold, or whose certificate does not prove
what the row says, is logged, counted and passed over, and with it the effort, which may have rested on it. A look
deletes nothing: the key may be the wrong one. The next solve of the problem takes the place of such rows.
A hit that was put together once is given again from memory for the same body (`answers.py`), on one condition
that is looked at every time: each row named above is what it was, the plan's stored bytes included, byte for byte. So
what goes out has been verified, as the bytes in the store, on this problem, by this process; a bit flipped in a plan's
row is a miss as before. What is not read again is the graph: the memory holds for the body as sent, which is the graph.
What does not make a hit still starts the next solve: the plan as its incumbent, the bound as its bound.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from fractions import Fraction

import structlog
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import InvalidPlan, Problem, Subject, outgrown, structure_digest
from remat_ir.proof import certifiable
from remat_solver import report_bound, report_budget

from ..identity import Caller, Keys, costs_of
from ..memory import Lru
from ..telemetry import Metrics
from .answers import Stored
from .database import Database
from .seals import WHOLE, Floor, column, names
from .store import SAME_STRUCTURE, Row, Snapshot, Store, StoredPlan
from .tables import graphs
from .verifier import CheckedProof, Verifier

log = structlog.get_logger("remat_service.storage.cache")

_MOST_LOOKS = 100  # each look that finds damage passes over one row more
_MOST_REPORTED = 10_000  # rows that are remembered as logged and counted

_SAME_STRUCTURE = (
    select(graphs.c.key, graphs.c.data).where(SAME_STRUCTURE).order_by(graphs.c.used_at.desc(), graphs.c.key).limit(4)
)


class Cache:
    """Looks answers up, which never writes; and clears the way for what a solve has found."""

    def __init__(self, database: Database, store: Store, verifier: Verifier, metrics: Metrics) -> None:
        self._database, self._store = database, store
        self._verifier, self._metrics = verifier, metrics
        self._reported: Lru[Row, bool] = Lru(_MOST_REPORTED)

    async def known(
        self,
        caller: Caller,
        keys: Keys,
        problem: Problem,
        snapshot: Snapshot | None = None,
        within_s: float | None = None,
        near: bool = True,
    ) -> Stored:
        """What is stored about a net problem, from a look just taken or a new one; plan and certificate are checked.

        Args:
            within_s: seconds to look: the plan first, then the certificates, then graphs with other costs. What the
                time is too short for is left out, and the result is `partial`.
            near: there may be such graphs.
        """
        begun = self._database.clock.monotonic()
        until = None if within_s is None else begun + within_s
        half = None if within_s is None else begun + within_s / 2
        found = snapshot or await self._store.snapshot(keys, problem.budget_bytes)
        unsound: list[Row] = []
        for _ in range(_MOST_LOOKS):
            plan, broken = await self._good_plan(keys, problem, found.plan)
            # half of the time is for a plan, where there is none yet
            proofs, damaged, partial = await self._checked(keys, problem, found, half if plan is None else until)
            inside = found.restricted, found.effort
            narrow = [row for row in inside if row and outgrown(keys.method_name, names(row.restricted_to))]
            if not damaged and not narrow:
                break
            unsound += [*damaged, *narrow]
            found = await self._store.snapshot(keys, problem.budget_bytes, unsound)
        else:
            found, proofs = Snapshot(found.plan, *(None,) * 7, *found[-2:]), {}
            plan, broken = await self._good_plan(keys, problem, found.plan)
        floor, too_small = found.floor or Floor(0, None, None), None if partial else found.too_small
        least = max(floor.least_bytes, 0 if too_small is None else too_small.budget_bytes + 1)
        stored = Stored(
            problem,
            found,
            plan=plan,
            proof=proofs.get(WHOLE),
            inside=proofs.get(column(keys.restriction)) if keys.restriction else None,
            partial=partial,
            claim=found.claim,
            restricted=found.restricted,
            least_bytes=least or None,
            enough_bytes=floor.enough_bytes,
            effort=found.effort,
            certify=keys.certify,
            unsound=(*unsound, *broken),
        )
        cost_ns = stored.known.cost_ns
        proved = cost_ns is not None and stored.known.whole_ns >= cost_ns
        if keys.any_method and near and not proved:
            stored = await self._with_near(caller, keys, problem, stored, until)
        if any(found[:-2]) or stored.carried:  # there is something to answer, and a graph remembers what it needs
            await self._verifier.measure(problem.subject)
        stored = await self._without_refuted(keys, problem, stored)
        spent = self._database.clock.monotonic() - begun
        self._metrics.look_seconds.labels("part" if stored.partial else "all").observe(spent)
        return stored

    def _left(self, until: float | None) -> float | None:
        """Seconds up to a moment; None where a look may take any time."""
        return None if until is None else max(0.0, until - self._database.clock.monotonic())

    async def _checked(
        self, keys: Keys, problem: Problem, found: Snapshot, until: float | None
    ) -> tuple[dict[str, CheckedProof], list[Row], bool]:
        """The certificates of the problem by their spaces, the rows that are not what was stored, and whether the time
        was too short.

        Rows of the second kind are logged and counted.
        """
        damaged: list[Row] = [
            row
            for row in (found.claim, found.restricted, found.floor, found.effort)
            if row is not None and not self._store.holds(row, keys.graph, problem.budget_bytes, keys.method)
        ]
        proofs: dict[str, CheckedProof] = {}
        partial = False
        for row in (found.proof, found.too_small, found.inside):
            if row is None:
                continue
            # what is too small is also said of the largest budget that it is proved of
            said = row.budget_bytes if row.bound_ns is None else min(row.budget_bytes, problem.budget_bytes)
            for budget in sorted({said, min(said, problem.budget_bytes)}, reverse=True):
                try:
                    checked = await self._verifier.proof(
                        keys.graph, Problem(problem.subject, budget), row.data, self._left(until), row.restricted_to
                    )
                except TimeoutError:
                    partial = True
                    break
                if checked is None or not checked.proves(row.bound_ns):
                    damaged.append(row)
                    break
                if budget == problem.budget_bytes:
                    proofs[row.restricted_to] = checked
        for one in damaged:
            self._report(keys, problem.budget_bytes, one)
        if partial and WHOLE not in proofs and (found_at_hand := await self._at_hand(keys, problem)) is not None:
            proofs[WHOLE] = found_at_hand
        return proofs, damaged, partial

    async def _at_hand(self, keys: Keys, problem: Problem) -> CheckedProof | None:
        """The best certificate of this very problem, if it was checked before: that of the solve under way."""
        async with self._database.read(brief=True) as connection:
            own = await self._store.own_proof(connection, keys.graph, problem.budget_bytes)
        row = None if own is None else await self._store.proof(own[0])
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
            await self._store.drop(connection, keys.graph, row)
        if stored.refuting is not None:
            await self._store.drop_refuted(connection, keys.graph, stored.refuting)
        if stored.unsound or stored.refuting is not None:
            await self._store.drop_efforts(connection, keys.graph)

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
        if best is None or await self._verifier.text(keys.graph, problem, best.data, best.claimed) is not None:
            return best, []
        broken: list[StoredPlan] = []
        for each in await self._store.plans_within(keys, problem.budget_bytes):
            if await self._verifier.text(keys.graph, problem, each.data, each.claimed) is not None:
                return each, broken
            broken.append(each)
        return None, broken

    async def _with_near(
        self, caller: Caller, keys: Keys, problem: Problem, stored: Stored, until: float | None
    ) -> Stored:
        """What is stored, with what graphs of the same structure with other costs add to it: those that can be read.

        Args:
            until: what the time is too short for is left out, and the result is `partial`.
        """
        looks: list[Snapshot] = []
        for row in await self._database.rows(_SAME_STRUCTURE, structure=keys.structure, graph=keys.graph):
            if self._left(until) == 0.0:
                return replace(stored, partial=True)
            other = await self._verifier.graph(row.key, row.data, caller.key)
            # its own column may say what is not so, and a claim about another structure says nothing here
            if other is None or caller.key(await asyncio.to_thread(structure_digest, other)) != keys.structure:
                continue
            looks.append(await self._store.snapshot(replace(keys, graph=row.key), problem.budget_bytes))
            stored = await self._nearer(row.key, other, looks[-1], problem, stored)
        if certifiable(problem.subject):
            for found in looks:
                stored = await self._with_near_proofs(found, keys, problem, stored, until)
        return stored

    async def _with_near_proofs(
        self, found: Snapshot, keys: Keys, problem: Problem, stored: Stored, until: float | None
    ) -> Stored:
        for row in (found.too_small, found.proof):
            if row is None or row.budget_bytes < problem.budget_bytes:
                continue
            try:
                proof = await self._verifier.proof(keys.graph, problem, row.data, self._left(until))
            except TimeoutError:
                stored = replace(stored, partial=True)
                continue
            if proof is None or stored.proves_none:
                continue
            if proof.bound_ns is None or proof.bound_ns > stored.known.whole_ns:
                stored = replace(stored, proof=proof, carried=True)
        return stored

    async def _nearer(self, key: str, other: Subject, found: Snapshot, problem: Problem, stored: Stored) -> Stored:
        """What is stored, with what a look at another graph adds to it, certificates left out."""
        claim, floor, best = found.claim, found.floor, found.plan
        if claim is not None and not certifiable(problem.subject) and self._store.holds(claim, key):
            bound_ns = carried_bound(other, problem.subject, claim.bound_ns)
            if stored.claim is None or bound_ns > stored.claim.bound_ns:
                stored = replace(stored, claim=claim._replace(bound_ns=bound_ns), carried=True)
        if floor is not None and self._store.holds(floor, key):  # costs play no part in what fits
            enough = floor.enough_bytes
            if floor.least_bytes > (stored.least_bytes or 0):
                stored = replace(stored, least_bytes=floor.least_bytes, carried=True)
            if enough is not None and (stored.enough_bytes is None or enough < stored.enough_bytes):
                stored = replace(stored, enough_bytes=enough)
        if best is None:
            return stored
        plan = await self._verifier.plan(key, Problem(other, problem.budget_bytes), best.data, best.claimed)
        if plan is None:
            return stored
        try:
            verdict = await self._verifier.verify(problem, plan)
        except InvalidPlan:
            return stored
        if stored.known.cost_ns is None or verdict.cost_ns < stored.known.cost_ns:
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
