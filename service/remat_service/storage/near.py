"""What graphs of the same structure with other costs say of a problem: their plans, claims, floors and certificates.

Their plans are costed anew by the verifier, and their certificates scaled leaf by leaf and checked on the new costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from sqlalchemy import bindparam, select
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import InvalidPlan, Problem, Subject, structure_digest
from remat_ir.proof import certifiable

from ..clock import LookTime
from ..identity import Caller
from ..subjects import costs_of
from .answers import Stored
from .cache_key import Keys
from .claims import Claims
from .database import Database
from .store import Store
from .tables import graphs
from .verifier import Verifier

_SAME_STRUCTURE = (
    select(graphs.c.key, graphs.c.data)
    .where(graphs.c.structure_key == bindparam("structure"), graphs.c.key != bindparam("graph"))
    .order_by(graphs.c.used_at.desc(), graphs.c.key)
    .limit(4)
)


class NearGraphs:
    """Looks at them, and at those alone that the verifier reads."""

    def __init__(self, database: Database, store: Store, claims: Claims, verifier: Verifier) -> None:
        self._database, self._store, self._claims, self._verifier = database, store, claims, verifier

    async def added(self, caller: Caller, keys: Keys, problem: Problem, stored: Stored, time: LookTime) -> Stored:
        """What is stored, with what such graphs add to it.

        Args:
            time: to look; what it is too short for is left out, and the result is `partial`.
        """
        rows = await self._database.rows(_SAME_STRUCTURE, structure=keys.structure, graph=keys.graph)
        if not rows:
            return stored
        async with self._database.read(brief=True) as connection:
            return await self._of(rows, connection, caller, keys, problem, stored, time)

    async def _of(
        self,
        rows: Sequence[Any],
        connection: AsyncConnection,
        caller: Caller,
        keys: Keys,
        problem: Problem,
        stored: Stored,
        time: LookTime,
    ) -> Stored:
        others: list[str] = []
        for row in rows:
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
        self, connection: AsyncConnection, key: str, keys: Keys, problem: Problem, stored: Stored, time: LookTime
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


def carried_bound(old: Subject, new: Subject, bound_ns: int) -> int:
    """ΣC′ + r · (L − ΣC), r = min c′_i / c_i: a proved bound for the same structure with other costs, rounded up.

    Rounding up is right: costs are whole ns. An op that cost nothing puts no limit on r.
    """
    ratios = [Fraction(c2, c1) for c1, c2 in zip(costs_of(old), costs_of(new), strict=True) if c1 > 0]
    extra = max(0, bound_ns - old.total_cost_ns)
    least = min(ratios, default=Fraction(0)) * extra
    return new.total_cost_ns - (-least.numerator // least.denominator)
