"""The statements of the hot path on a PostgreSQL with millions of generated rows: timed, and explained.

Eight rows for each answer: a graph, its problem, plan, certificate, floor, effort, solve and request. The tables are
unlogged, and packed graphs, plans and certificates are 16 bytes long: PostgreSQL stores long ones outside of the row.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
from pydantic import SecretStr
from sqlalchemy import event

from benchmarks.harness.postgres import PrivatePostgres
from benchmarks.harness.table import Report
from benchmarks.service.crowd import in_thread
from remat_ir import Problem, graph_of
from remat_service.context import Context
from remat_service.identity import Caller, Keys
from remat_service.settings import Settings
from remat_service.storage.database import migrate
from remat_service.storage.store import Snapshot
from remat_service.storage.tables import metadata, requests
from remat_service.tenants.keys import default_caller
from remat_solver import solver_version

_BUDGET, _TIMES = 1_000_000, 500
_FILL = """
INSERT INTO graphs (key, structure_key, ops, edges, total_cost_ns, data, size_bytes, created_at, used_at)
SELECT k('g', i), k('s', i / 2), 300, 600, 1000, '\\x00112233445566778899aabbccddeeff', 4000, now(), now() FROM i;
INSERT INTO problems (key, graph_key, budget_bytes) SELECT k('p', i), k('g', i), {budget} FROM i;
INSERT INTO plans (id, graph_key, method_key, source, solver, cost_ns, peak_bytes, data, checksum, size_bytes,
                   created_at, used_at)
SELECT md5('plan' || i), k('g', i), 'auto', 'auto', '{solver}', 1100, 900000,
       '\\x00112233445566778899aabbccddeeff', k('c', i), 1500, now(), now() FROM i;
INSERT INTO proofs (id, graph_key, budget_bytes, bound_ns, solver, data, checksum, size_bytes, created_at)
SELECT md5('proof' || i), k('g', i), {budget}, 1100, '{solver}', '\\x00112233445566778899aabbccddeeff', k('c', i),
       8700, now() FROM i;
INSERT INTO floors (graph_key, solver, least_bytes, enough_bytes, seal)
SELECT k('g', i), '{solver}', 500000, 900000, k('f', i) FROM i;
INSERT INTO efforts (graph_key, budget_bytes, method_key, solver, seconds, settled, status, restricted_to, message,
                     created_at, seal)
SELECT k('g', i), {budget}, 'auto', '{solver}', 3.5, true, 'optimal', '', '', now(), k('e', i) FROM i;
INSERT INTO solves (id, tenant_id, flight_key, graph_key, budget_bytes, fixed_bytes, method, method_key, options, state,
                    queued_at, ended_at)
SELECT md5('solve' || i), '{tenant}', k('flight', i), k('g', i), {budget}, 0, 'auto', 'auto', '{{}}',
       CASE WHEN i % {queued_every} = 0 THEN 'queued' ELSE 'ended' END, now(), now() FROM i;
INSERT INTO requests (id, tenant_id, solve_id, graph_key, digest, budget_bytes, fixed_bytes, method, method_key,
                      time_limit_s, max_gap, priority, cache, ended, answer, plan_id, proof_id, seal, idempotency_key,
                      body_hash, epoch, created_at, ended_at)
SELECT md5('request' || i), '{tenant}', md5('solve' || i), k('g', i), k('d', i), {budget}, 0, 'auto', 'auto', 60, 0.001,
       0, 'miss', true, '{answer}', md5('plan' || i), md5('proof' || i), k('r', i), md5('retry' || i), k('b', i), 0,
       now(), now() FROM i
"""
_ANSWER = {"status": "optimal", "cost_ns": 1100, "peak_bytes": 900_000, "seconds": 3.5, "message": "x" * 200}
_INDEXES = """
SELECT indexname, indexdef FROM pg_indexes
WHERE schemaname = 'public' AND tablename = ANY(%s) AND indexname NOT IN (SELECT conname FROM pg_constraint)
"""
_FILLED = ("graphs", "problems", "plans", "proofs", "floors", "efforts", "solves", "requests")


def _md5(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()


def _key(kind: str, i: int) -> str:
    """As the function `k` of the database makes it."""
    return _md5(f"{kind}{i}") + _md5(f"{kind}_{i}")


def fill(url: str, tenant: str, answers: int) -> float:
    """Fill the tables, without their indexes, then make these; seconds."""
    begun = time.perf_counter()
    more = {"budget": _BUDGET, "solver": solver_version(), "tenant": tenant, "answer": json.dumps(_ANSWER)}
    filling = _FILL.format(queued_every=max(1, answers // 1000), **more)
    statements = filling.replace("FROM i", f"FROM generate_series(1, {answers}) AS i")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET session_replication_role = replica")  # no foreign keys are looked up
        connection.execute(
            "CREATE FUNCTION k(kind text, i int) RETURNS text STABLE LANGUAGE sql "
            "AS $$ SELECT md5(kind || i) || md5(kind || '_' || i) $$"
        )
        for table in reversed(metadata.sorted_tables):
            connection.execute(f"ALTER TABLE {table.name} SET UNLOGGED")
        indexes = connection.execute(_INDEXES, (list(_FILLED),)).fetchall()
        for name, _ in indexes:
            connection.execute(f"DROP INDEX {name}")
        for statement in statements.split(";\n"):
            connection.execute(statement)
        for _, statement in indexes:
            connection.execute(statement)
        connection.execute("VACUUM ANALYZE")
    return time.perf_counter() - begun


async def rows(folder: Path, options: argparse.Namespace) -> None:
    """Each statement with random keys, as the service sends it; then what PostgreSQL says of the last one of them."""
    with PrivatePostgres() as postgres:
        key = SecretStr(secrets.token_hex(32))
        context = Context(Settings(database_url=SecretStr(postgres.url), dispatcher="cluster", seal_key=key))
        await migrate(context.database)
        async with context.database.write() as write:
            caller = await default_caller(write)
        seconds = await in_thread(fill, postgres.url, caller.tenant_id, options.answers)
        with (
            Report("Generated rows", ("table", "rows", "GB with indexes"), options.out) as report,
            psycopg.connect(postgres.url) as connection,
        ):
            count, size = 0, 0.0
            for name in _FILLED:
                found = connection.execute(f"SELECT count(*), pg_total_relation_size('{name}') FROM {name}").fetchone()
                assert found is not None
                count, size = count + found[0], size + found[1] / 1e9
                report.add(name, f"{found[0]:,}", f"{found[1] / 1e9:.2f}")
            report.add("all", f"{count:,}", f"{size:.2f}, filled in {seconds:.0f} s")
        columns = ("statement", "p50 ms", "p99 ms", "planned ms", "executed ms", "pages", "reads")
        with Report("Statements of the hot path", columns, options.out) as report:
            await _measure(context, caller, options.answers, report, postgres.url)
        await context.database.close()


async def _measure(context: Context, caller: Caller, answers: int, report: Report, url: str) -> None:
    dice, asked = random.Random(1), list[tuple[str, Any]]()
    event.listen(context.database.engine.sync_engine, "before_cursor_execute", lambda *a: asked.append((a[2], a[3])))
    problem, nothing = Problem(graph_of([1], [1], [[]]), _BUDGET), Snapshot(*(None,) * 8, False, None)

    def keys(i: int) -> Keys:
        return Keys("", _key("p", i), _key("g", i), _key("s", i // 2), "auto", _key("flight", i))

    async def hit(i: int) -> None:
        row = {
            "id": context.clock.new_id(), "tenant_id": caller.tenant_id, "graph_key": _key("g", i),
            "digest": _key("d", i), "budget_bytes": _BUDGET, "fixed_bytes": 0, "method": "auto", "method_key": "auto",
            "time_limit_s": 60.0, "max_gap": 0.001, "priority": 0, "cache": "hit", "ended": True, "answer": _ANSWER,
            "seal": _key("r", i), "epoch": 0, "created_at": context.clock.now(), "ended_at": context.clock.now(),
        }  # fmt: skip
        async with context.database.write() as connection:
            await connection.execute(requests.insert(), row)

    async def waiting(_: int) -> None:
        async with context.database.read() as connection:
            await context.queue.waiting(connection)

    works: dict[str, Callable[[int], Awaitable[object]]] = {
        "what an answer rests on, with its graph": lambda i: context.store.snapshot_with_graph(keys(i), _BUDGET),
        "graphs of the same structure": lambda i: context.cache.known(caller, keys(i), problem, nothing),
        "an ended request by its id": lambda i: context.store.ended_request(caller, _md5(f"request{i}")),
        "a request by its idempotency key": lambda i: context.store.has_idempotency_key(
            caller.tenant_id, _md5(f"retry{i}")
        ),
        "the row of a hit, and its commit": hit,
        "whose solves wait": waiting,
    }
    for name, work in works.items():
        times = []
        for _ in range(_TIMES):
            begun = time.perf_counter()
            await work(dice.randrange(1, answers))
            times.append(time.perf_counter() - begun)
        times.sort()
        plan = await in_thread(_explained, url, *asked[-1])
        report.add(
            name, f"{1000 * times[_TIMES // 2]:.2f}", f"{1000 * times[int(0.99 * _TIMES)]:.2f}",
            f"{plan['Planning Time']:.2f}", f"{plan['Execution Time']:.2f}",
            plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"],
            ", ".join(sorted(set(_reads(plan["Plan"])))) or "nothing",
        )  # fmt: skip


def _explained(url: str, statement: str, values: Any) -> dict[str, Any]:
    """What PostgreSQL says of a statement that it carries out, and which is then undone."""
    if statement.startswith("INSERT"):  # another row
        values = values | {"id": secrets.token_hex(16)}
    with psycopg.connect(url) as connection:
        found = connection.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", values).fetchone()
        connection.rollback()
    assert found is not None
    plan: dict[str, Any] = found[0][0]
    return plan


def _reads(plan: dict[str, Any]) -> Iterator[str]:
    """The indexes that a plan uses, and the tables that it reads whole."""
    if "Index Name" in plan:
        yield plan["Index Name"]
    elif plan["Node Type"] == "Seq Scan":
        yield f"all of {plan['Relation Name']}"
    for inner in plan.get("Plans", ()):
        yield from _reads(inner)
