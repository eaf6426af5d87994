"""`remat-service audit`: whether all that is stored can be true, repaired where that is asked for.

Everything is read again, one graph at a time, also while a service runs. A plan is replayed on its graph: one that is
not valid is dropped, one whose row claims another cost or peak gets the true ones. A certificate is checked on it in
the same way. A sealed row that is not what was stored is dropped, what a running solve has told is taken back. A
graph's columns are written anew from its bytes. A graph whose bytes are damaged stays with its plans: the next POST of
it writes it anew (`requests/submit.py`), and until then nothing of it is served. Contradictions are only named.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from sqlalchemy import Delete, Table, Update, delete, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from remat_ir import (
    InvalidData,
    InvalidPlan,
    Problem,
    RematError,
    Status,
    Subject,
    duration,
    plain_peak,
    read_plan,
    readable,
    within_space,
)
from remat_ir.proof import prove, read_proof
from remat_solver import Evidence, method_named, solve, solver_version

from ..identity import Caller, certifies, size_of
from ..settings import Settings
from ..storage.database import Database
from ..storage.seals import SEALED, WHOLE, Seals, names
from ..storage.tables import bounds, efforts, floors, graphs, metadata, plans, proofs, scopes, solves
from ..storage.verifier import checksum, read_graph, unpack
from ..tenants.keys import operator, record
from .operate import opened

_PAGE = 500
_UNREADABLE = (ValueError, TypeError, InvalidData, InvalidPlan)
_Rows = dict[str, list[Any]]
"""The rows about one graph, by table; of solves those that have ended, the last one last."""


class Audit:
    """What an audit finds, line by line.

    Args:
        seals: None where their key is not here; then they are not looked at.
        apply: mend and drop; else it is only counted what would be.

    Attributes:
        found: how many rows were looked at, are `wrong`: damaged, or contradicting each other or the present solver,
            and are dropped or mended. `worse` are problems on which the present solver ends with a more expensive plan
            than the one stored, or none.
    """

    def __init__(self, database: Database, seals: Seals | None, folder: Path, seconds: float, apply: bool) -> None:
        self._database, self._seals, self._apply = database, seals, apply
        self._folder, self._seconds = folder, seconds
        self._callers: list[Caller] = []
        looked = ("graphs", "plans", "certificates", "claimed bounds", "solved again", "wrong", "worse")
        self.found: Counter[str] = Counter(dict.fromkeys(looked, 0))

    async def run(self, sample: int, seed: int) -> None:
        """Look at every row, and solve again a sample of what was solved."""
        async with self._database.read() as connection:
            self._callers = [
                Caller("", row.id, row.salt, epoch)
                for row in (await connection.execute(select(scopes))).all()
                for epoch in range(row.epoch + 1)
            ]
            keys = list((await connection.execute(select(graphs.c.key).order_by(graphs.c.key))).scalars())
            chosen = await _sample(connection, sample, seed)
        for key in keys:
            async with self._database.read() as connection:  # no transaction is open while it is solved
                stored = await _stored(connection, key)
            if stored["graphs"]:  # else it was evicted meanwhile
                await self._look(key, stored, chosen)
        if self._seals is not None:
            for name in SEALED:
                await self._check_seals(self._seals, metadata.tables[name])

    async def _look(self, key: str, stored: _Rows, sample: frozenset[tuple[str, int, str]]) -> None:
        """Compare all that is stored about a graph, and solve again what is in the sample."""
        self.found["graphs"] += 1
        (graph,) = stored["graphs"]

        def key_of(digest: str) -> str:  # of whichever scope and epoch
            return next((key for caller in self._callers if caller.key(digest) == key), "")

        try:
            subject = read_graph(graph.data, key, key_of)
        except _UNREADABLE as error:
            self._wrong(f"graph {key}: {error}")
            self.found["graphs damaged, mended by their next POST"] += 1
            return
        ops, edges = size_of(subject)
        true = {
            "ops": ops,
            "edges": edges,
            "total_cost_ns": subject.total_cost_ns,
            "size_bytes": len(graph.data),
        }
        if graph.plain_peak_bytes is not None:
            true["plain_peak_bytes"] = plain_peak(subject)
        await self._compare(graphs, graph, graphs.c.key == key, true, f"graph {key}")
        evidence = Evidence(subject)
        for row in stored["plans"]:
            await self._look_at_plan(evidence, key, row)
        for row in stored["proofs"]:
            await self._look_at_proof(evidence, key, row)
        self._take(evidence, stored)
        last = {(row.budget_bytes, row.method_key): row for row in stored["solves"]}
        for (budget, method_key), row in sorted(last.items()):
            if (key, budget, method_key) in sample:
                self._solve_again(evidence, subject, row)
        for refutation in evidence.refutations():
            self._wrong(f"graph {key}: {refutation}", refutation.to_json())

    async def _look_at_plan(self, evidence: Evidence, key: str, row: Any) -> None:
        self.found["plans"] += 1
        what = f"graph {key}: plan {row.id}"
        try:
            verdict = evidence.plan(read_plan(unpack(row.data)), f"plan {row.id}{_by(row)}")
        except _UNREADABLE as error:
            self._wrong(f"{what}: {error}")
            await self._change("plans dropped", delete(plans).where(plans.c.id == row.id, plans.c.data == row.data))
            return
        true = {"cost_ns": verdict.cost_ns, "peak_bytes": verdict.peak_bytes, **_of_bytes(row)}
        await self._compare(plans, row, plans.c.id == row.id, true, what)

    async def _look_at_proof(self, evidence: Evidence, key: str, row: Any) -> None:
        self.found["certificates"] += 1
        source = f"certificate {row.id}{_by(row)}"
        try:
            problem = within_space(Problem(evidence.subject, row.budget_bytes), names(row.restricted_to))
            proved = prove(problem, read_proof(unpack(row.data))).bound_ns
        except _UNREADABLE as error:
            self._wrong(f"graph {key}: {source}: {error}")
            of_row = proofs.c.id == row.id, proofs.c.data == row.data
            rested = delete(efforts).where(efforts.c.graph_key == key)
            await self._change("certificates dropped", delete(proofs).where(*of_row), rested)
            return
        if proved is None:
            evidence.infeasible(row.budget_bytes, names(row.restricted_to), source)
        else:
            evidence.bound(row.budget_bytes, proved, names(row.restricted_to), source)
        true = {"bound_ns": proved, **_of_bytes(row, row.restricted_to)}
        await self._compare(proofs, row, proofs.c.id == row.id, true, f"graph {key}: {source}")

    async def _compare(self, table: Table, row: Any, of_row: Any, true: dict[str, Any], what: str) -> None:
        """Report and mend the columns of a row that say something else than its bytes."""
        said = {name: getattr(row, name) for name in true}
        if said != true:
            self._wrong(f"{what} is stored as {_listed(said, true)}, and is {_listed(true, said)}")
            name = "certificates" if table is proofs else table.name
            await self._change(f"{name} mended", update(table).where(of_row).values(true))

    def _take(self, evidence: Evidence, stored: _Rows) -> None:
        """What is said about a graph and can't be checked by itself."""
        for row in stored["bounds"]:
            self.found["claimed bounds"] += 1
            source = f"bound {row.method_key}{_by(row)}"
            evidence.bound(row.budget_bytes, row.bound_ns, names(row.restricted_to), source)
        for row in stored["floors"]:
            evidence.needs(row.least_bytes, f"least budget{_by(row)}")
            if row.enough_bytes is not None:
                evidence.known(row.enough_bytes, None, f"known budget{_by(row)}")
        for row in stored["efforts"]:
            if row.status == Status.INFEASIBLE:
                evidence.infeasible(row.budget_bytes, names(row.restricted_to), f"effort {row.method_key}{_by(row)}")
        for row in stored["solves"]:
            if row.bound_ns is not None:
                evidence.bound(row.budget_bytes, row.bound_ns, names(row.restricted_to), f"solve {row.id}")
            if row.cost_ns is not None:
                evidence.known(row.budget_bytes, row.cost_ns, f"solve {row.id}")

    async def _check_seals(self, seals: Seals, table: Table) -> None:
        """Drop the rows of a table that are not what was stored; of solves, what they have told."""
        keys = list(table.primary_key.columns)
        last: dict[str, Any] | None = None
        looked = bad = 0
        while True:
            page = select(table).order_by(*keys).limit(_PAGE)
            if last is not None:
                page = page.where(tuple_(*keys) > tuple_(*(last[key.name] for key in keys)))
            async with self._database.read() as connection:
                rows = [dict(row) for row in (await connection.execute(page)).mappings()]
            for row in rows:
                told = row.get("ended", True) and (table is not solves or row["plan_id"] or row["bound_ns"] is not None)
                looked += bool(told)
                if not told or seals.holds(table.name, row):
                    continue
                bad += 1
                of_row = [key == row[key.name] for key in keys] + [table.c.seal.is_not_distinct_from(row["seal"])]
                nothing = dict.fromkeys(("plan_id", "cost_ns", "peak_bytes", "bound_ns", "seal"))
                change = update(table).values(nothing) if table is solves else delete(table)
                what = "solves mended" if table is solves else f"{table.name} dropped"
                await self._change(what, change.where(*of_row))
            if len(rows) < _PAGE:
                break
            last = rows[-1]
        if bad:
            self._wrong(f"{bad} of {looked} {table.name} are not what was stored", count=bad)

    def _solve_again(self, evidence: Evidence, subject: Subject, row: Any) -> None:
        try:
            method_named(row.method).read_options(row.options)
        except InvalidData as error:
            # an older solver had this method or option, which makes nothing wrong that it left
            typer.echo(f"not solved again: graph {row.graph_key} within {readable(row.budget_bytes)}: {error}")
            return
        self.found["solved again"] += 1
        seconds = max(1.0, min(self._seconds, row.spent_s or self._seconds))
        problem = Problem(subject, row.budget_bytes)
        try:
            # no gap is left: a plan within one would look worse than the best that is stored
            answer = solve(
                problem, method=row.method, options=row.options, time_limit_s=seconds, max_gap=0.0,
                certify=certifies(row.method_key),
            )  # fmt: skip
            evidence.answer(answer, f"{row.method} of the present solver {solver_version()}")
        except RematError as error:
            self._wrong(
                f"{row.method} of the present solver {solver_version()}: {error}", {"problem": problem.to_json()}
            )
            return
        if row.cost_ns is None or (answer.cost_ns is not None and answer.cost_ns <= row.cost_ns):
            return
        self.found["worse"] += 1
        now = "no plan"
        if answer.cost_ns is not None:
            now = f"{duration(answer.cost_ns)}, {answer.cost_ns / row.cost_ns - 1:+.3%}"
        typer.echo(
            f"worse: graph {row.graph_key} within {readable(row.budget_bytes)} by {row.method}: stored "
            f"{duration(row.cost_ns)} after {row.spent_s:.1f} s, now {now} after {answer.seconds:.1f} s"
        )

    def _wrong(self, claim: str, instance: dict[str, Any] | None = None, count: int = 1) -> None:
        self.found["wrong"] += count
        written = ""
        if instance:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it is a tenant's graph
            path = self._folder / f"{self.found['wrong']:03}.json"
            path.write_text(json.dumps(instance))
            written = f" ({path})"
        typer.echo(f"wrong: {claim}{written}")

    async def _change(self, what: str, *statements: Update | Delete) -> None:
        """Count what is to be done and, where that is wanted, carry it out in one transaction."""
        self.found[what] += 1
        if self._apply:
            async with self._database.write() as connection:
                for statement in statements:
                    await connection.execute(statement)


def audit(
    sample: Annotated[int, typer.Option(min=0, help="Stored problems to solve again.")] = 0,
    seconds: Annotated[float, typer.Option(help="For each of them, and no more than it took.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Which problems are in the sample.")] = 0,
    instances: Annotated[Path, typer.Option(help="Folder for the instances of contradictions.")] = Path("audited"),
    apply: Annotated[bool, typer.Option("--apply", help="Repair and drop what is damaged; can't be undone.")] = False,
) -> None:
    """Read everything in the store again, also while a service runs: what is damaged, and which bounds a plan refutes.

    Exit code 1 where something is wrong; plans that got worse with this version of the solver are only reported.
    """

    async def run() -> Counter[str]:
        async with opened(Settings(), upgraded=False) as (database, seals):
            looks = Audit(database, seals, instances, seconds, apply)
            await looks.run(sample, seed)
            if apply:
                async with database.write() as connection:
                    await record(connection, operator(), "audit", looks.found)
            if seals is None:
                typer.echo("seals were not looked at: their key is not here (REMAT_SEAL_KEY)")
            return looks.found

    found = asyncio.run(run())
    typer.echo("  ".join(f"{what} {count}" for what, count in found.items()))
    if not apply and any(what.endswith((" dropped", " mended")) for what in found):
        typer.echo("nothing was changed: `remat-service audit --apply` drops and mends what is named", err=True)
    if found["wrong"]:
        raise typer.Exit(1)


async def _sample(connection: AsyncConnection, count: int, seed: int) -> frozenset[tuple[str, int, str]]:
    """Some of the problems and methods that were solved to an end."""
    query = select(solves.c.graph_key, solves.c.budget_bytes, solves.c.method_key).where(solves.c.ended_at.is_not(None))
    ended = sorted({tuple(row) for row in await connection.execute(query)})
    return frozenset(random.Random(seed).sample(ended, min(count, len(ended))))


async def _stored(connection: AsyncConnection, key: str) -> _Rows:
    ended = select(solves).where(solves.c.graph_key == key, solves.c.ended_at.is_not(None)).order_by(solves.c.ended_at)
    about = {table: select(table).where(table.c.graph_key == key) for table in (plans, bounds, floors, efforts, proofs)}
    about |= {graphs: select(graphs).where(graphs.c.key == key), solves: ended}
    return {table.name: list(await connection.execute(query)) for table, query in about.items()}


def _of_bytes(row: Any, space: str = WHOLE) -> dict[str, Any]:
    return {"checksum": checksum(row.data, space), "size_bytes": len(row.data)}


def _listed(some: dict[str, Any], other: dict[str, Any]) -> str:
    """The columns in which two rows differ, as the first one has them."""
    return ", ".join(f"{name} {value}" for name, value in some.items() if value != other[name])


def _by(row: Any) -> str:
    return f" of solver {row.solver or 'unknown'}"
