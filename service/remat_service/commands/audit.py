"""`remat-service audit`: whether all that is stored can be true, and what the present solver makes of a sample."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import (
    InvalidData,
    InvalidPlan,
    Problem,
    RematError,
    Status,
    Subject,
    read_plan,
)
from remat_ir.proof import prove, read_proof
from remat_solver import Evidence, method_named, solve

from ..settings import Settings
from ..storage.cache_key import SOLVER, certifies
from ..storage.claims import names
from ..storage.packing import unpack
from ..storage.seals import Seals
from ..storage.tables import bounds, efforts, floors, graphs, plans, proofs, requests, solves
from .transaction import opened


class Stored(NamedTuple):
    """The rows about one graph; `solved` are the solves that have ended, the last one last."""

    key: str
    data: bytes
    plans: list[Any]
    bounds: list[Any]
    floors: list[Any]
    efforts: list[Any]
    proofs: list[Any]
    requests: list[Any]
    solved: list[Any]


class Audit:
    """What an audit finds, line by line.

    Attributes:
        wrong: rows that are damaged or contradict each other or the present solver.
        worse: problems on which the present solver ends with a more expensive plan than the one stored, or none.
    """

    def __init__(self, say: Callable[[str], None], folder: Path, seconds: float, seals: Seals | None = None) -> None:
        self.wrong = self.worse = self.graphs = self.plans = self.proofs = self.bounds = self.solved = 0
        self._say, self._folder, self._seconds, self._seals = say, folder, seconds, seals

    def look(self, stored: Stored, sample: frozenset[tuple[str, int, str]]) -> None:
        """Compare all that is stored about a graph, and solve again what is in the sample."""
        self.graphs += 1
        try:
            subject = Problem.from_json({**unpack(stored.data), "budget_bytes": 0}).subject
        except (ValueError, InvalidData) as error:
            self._wrong(f"graph {stored.key}: {error}", {})
            return
        evidence = Evidence(subject)
        self.check_seals(stored)
        self._take(evidence, stored)
        last = {(row.budget_bytes, row.method_key): row for row in stored.solved}
        for (budget, method_key), row in sorted(last.items()):
            if (stored.key, budget, method_key) in sample:
                self._solve_again(evidence, subject, row)
        for refutation in evidence.refutations():
            self._wrong(f"graph {stored.key}: {refutation}", refutation.to_json())

    def summary(self) -> str:
        """How much was looked at and what was found."""
        looked = f"{self.graphs} graphs, {self.plans} plans, {self.proofs} certificates, {self.bounds} claimed bounds"
        looked += "" if self._seals is not None else ", seals not looked at, since their key is not here"
        found = f"{self.wrong} contradictions, {self.worse} plans that got worse"
        return f"{looked}, {self.solved} solved again by {SOLVER}: {found}"

    def _take(self, evidence: Evidence, stored: Stored) -> None:
        for row in stored.plans:
            self.plans += 1
            try:
                verdict = evidence.plan(read_plan(unpack(row.data)), f"plan {row.id}{_by(row)}")
            except (ValueError, InvalidData, InvalidPlan) as error:
                self._wrong(f"graph {stored.key}: plan {row.id}: {error}", {})
                continue
            if tuple(verdict) != (row.cost_ns, row.peak_bytes):
                said = f"{row.cost_ns} ns and {row.peak_bytes} bytes"
                self._wrong(
                    f"graph {stored.key}: plan {row.id} is stored as {said}, and is {verdict.cost_ns} ns and "
                    f"{verdict.peak_bytes} bytes",
                    {},
                )
        for row in stored.proofs:
            self.proofs += 1
            self._check_proof(evidence, stored.key, row)
        for row in stored.bounds:
            self.bounds += 1
            source = f"bound {row.method_key}{_by(row)}"
            evidence.bound(row.budget_bytes, row.bound_ns, names(row.restricted_to), source)
        for row in stored.floors:
            evidence.needs(row.least_bytes, f"least budget{_by(row)}")
            if row.enough_bytes is not None:
                evidence.known(row.enough_bytes, None, f"known budget{_by(row)}")
        for row in stored.efforts:
            if row.status == Status.INFEASIBLE:
                evidence.infeasible(row.budget_bytes, names(row.restricted_to), f"effort {row.method_key}{_by(row)}")
        for row in stored.solved:
            if row.bound_ns is not None:
                evidence.bound(row.budget_bytes, row.bound_ns, names(row.restricted_to), f"solve {row.id}")
            if row.cost_ns is not None:
                evidence.known(row.budget_bytes, row.cost_ns, f"solve {row.id}")

    def _check_proof(self, evidence: Evidence, key: str, row: Any) -> None:
        problem = Problem(evidence.subject, row.budget_bytes)
        try:
            proof = read_proof(unpack(row.data))
            proved = prove(problem, proof).bound_ns
        except (ValueError, TypeError, InvalidData, InvalidPlan) as error:
            self._wrong(f"graph {key}: certificate {row.id}{_by(row)}: {error}", {})
            return
        source = f"certificate {row.id}{_by(row)}"
        if proved is None:
            evidence.infeasible(row.budget_bytes, (), source)
        else:
            evidence.bound(row.budget_bytes, proved, (), source)
        if proved != row.bound_ns:
            said = ["that no plan fits" if bound is None else f"{bound} ns" for bound in (row.bound_ns, proved)]
            self._wrong(f"graph {key}: {source} is stored as proving {said[0]}, and proves {said[1]}", {})

    def check_seals(self, stored: Stored) -> None:
        """Report rows that are not what was stored."""
        if self._seals is None:
            return
        told = [row for row in stored.solved if row.plan_id is not None or row.bound_ns is not None]
        for table, rows in (
            ("bounds", stored.bounds), ("floors", stored.floors), ("efforts", stored.efforts), ("solves", told),
            ("requests", stored.requests),
        ):  # fmt: skip
            bad = sum(not self._seals.holds(table, dict(row._mapping)) for row in rows)
            if bad:
                self._wrong(f"graph {stored.key}: {bad} of {len(rows)} {table} are not what was stored", {})

    def _solve_again(self, evidence: Evidence, subject: Subject, row: Any) -> None:
        try:
            method_named(row.method).read_options(row.options)
        except InvalidData as error:
            # an older solver had this method or option, which makes nothing wrong that it left
            self._say(f"not solved again: graph {row.graph_key} within {row.budget_bytes} bytes: {error}")
            return
        self.solved += 1
        seconds = max(1.0, min(self._seconds, row.spent_s or self._seconds))
        problem = Problem(subject, row.budget_bytes)
        try:
            # no gap is left: a plan within one would look worse than the best that is stored
            answer = solve(
                problem, method=row.method, options=row.options, time_limit_s=seconds, max_gap=0.0,
                certify=certifies(row.method_key),
            )  # fmt: skip
            evidence.answer(answer, f"{row.method} of the present solver {SOLVER}")
        except RematError as error:
            self._wrong(f"{row.method} of the present solver {SOLVER}: {error}", {"problem": problem.to_json()})
            return
        if row.cost_ns is None or (answer.cost_ns is not None and answer.cost_ns <= row.cost_ns):
            return
        self.worse += 1
        now = "no plan" if answer.cost_ns is None else f"{answer.cost_ns} ns, {answer.cost_ns / row.cost_ns - 1:+.3%}"
        self._say(
            f"worse: graph {row.graph_key} within {row.budget_bytes} bytes by {row.method}: stored {row.cost_ns} ns "
            f"after {row.spent_s:.1f} s, now {now} after {answer.seconds:.1f} s"
        )

    def _wrong(self, claim: str, instance: dict[str, Any]) -> None:
        self.wrong += 1
        written = ""
        if instance:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it is a tenant's graph
            path = self._folder / f"{self.wrong:03}.json"
            path.write_text(json.dumps(instance))
            written = f" ({path})"
        self._say(f"wrong: {claim}{written}")


def audit(sample: int, seconds: float, seed: int, folder: Path, say: Callable[[str], None]) -> Audit:
    """Look through the store of the settings, graph by graph, and solve a sample again; a service may run meanwhile."""

    async def run() -> Audit:
        async with opened(Settings(), upgraded=False) as (database, seals):
            found = Audit(say, folder, seconds, seals)
            async with database.read() as connection:
                keys = list((await connection.execute(select(graphs.c.key).order_by(graphs.c.key))).scalars())
                chosen = await _sample(connection, sample, seed)
            for key in keys:
                # one graph at a time, and no transaction open while it is solved
                async with database.read() as connection:
                    stored = await _stored(connection, key)
                if stored is not None:
                    found.look(stored, chosen)
            return found

    return asyncio.run(run())


async def _sample(connection: AsyncConnection, count: int, seed: int) -> frozenset[tuple[str, int, str]]:
    """Some of the problems and methods that were solved to an end."""
    query = select(solves.c.graph_key, solves.c.budget_bytes, solves.c.method_key).where(solves.c.ended_at.is_not(None))
    ended = sorted({tuple(row) for row in await connection.execute(query)})
    return frozenset(random.Random(seed).sample(ended, min(count, len(ended))))


async def _stored(connection: AsyncConnection, key: str) -> Stored | None:
    data = await connection.scalar(select(graphs.c.data).where(graphs.c.key == key))
    if data is None:
        return None
    rows = [
        list(await connection.execute(select(table).where(table.c.graph_key == key)))
        for table in (plans, bounds, floors, efforts, proofs)
    ]
    answered = select(requests).where(requests.c.graph_key == key, requests.c.ended.is_(True))
    rows.append(list(await connection.execute(answered)))
    ended = select(solves).where(solves.c.graph_key == key, solves.c.ended_at.is_not(None)).order_by(solves.c.ended_at)
    rows.append(list(await connection.execute(ended)))
    return Stored._make([key, data, *rows])


def _by(row: Any) -> str:
    return f" of solver {row.solver or 'unknown'}"
