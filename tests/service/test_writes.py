"""Writers on SQLite share transactions, what was answered is stored, and a database is used as it is set."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import httpx2
import pytest
from pydantic import SecretStr
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from remat_service.settings import Settings
from remat_service.storage import migrations
from remat_service.storage.database import Database
from service.database import postgres
from service.serving import hard_graph, posed, serving


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    """A database with a table of numbers."""
    made = Database(f"sqlite:///{tmp_path}/writes.sqlite")
    async with made.write() as connection:
        await connection.execute(text("CREATE TABLE numbers (x INTEGER PRIMARY KEY)"))
    yield made
    await made.close()


async def _numbers(database: Database) -> list[int]:
    async with database.read() as connection:
        return list(await connection.scalars(text("SELECT x FROM numbers ORDER BY x")))


async def _write(database: Database, number: int, brief: bool = True, wrong: bool = False) -> None:
    async with database.write(brief=brief) as connection:
        await connection.execute(text("INSERT INTO numbers VALUES (:x)"), {"x": number})
        if wrong:
            raise ValueError(number)


async def test_writers_that_wait_share_a_transaction_and_fail_alone(database: Database) -> None:
    """A hundred at once: few commits; duplicates and errors take nothing of others along, the first one included."""
    commits: list[str] = []
    event.listen(database.engine.sync_engine, "commit", lambda connection: commits.append("commit"))
    writes = [_write(database, i % 90, brief=bool(i % 3), wrong=i % 10 == 0) for i in range(100)]
    ended = await asyncio.gather(*writes, return_exceptions=True)
    for i, error in enumerate(ended):
        if i >= 90 and i % 10:
            assert isinstance(error, IntegrityError), i
        else:
            assert isinstance(error, ValueError) == (i % 10 == 0), i
    assert await _numbers(database) == [i for i in range(90) if i % 10]
    assert len(commits) < 10


async def test_a_writer_goes_on_only_once_its_part_is_committed(database: Database, tmp_path: Path) -> None:
    """Another connection finds what was written at the moment at which each writer's block has ended."""
    with closing(sqlite3.connect(tmp_path / "writes.sqlite")) as other:

        async def write(number: int) -> bool:
            await _write(database, number)
            return other.execute("SELECT x FROM numbers WHERE x = ?", (number,)).fetchone() is not None

        assert all(await asyncio.gather(*map(write, range(50))))


async def test_a_commit_that_fails_is_everybodys_failure(database: Database) -> None:
    """A deferred foreign key is looked at by the commit: nobody of that transaction is told that it is stored."""
    async with database.write() as connection:
        deferred = "CREATE TABLE parts (x INTEGER REFERENCES numbers (x) DEFERRABLE INITIALLY DEFERRED)"
        await connection.execute(text(deferred))

    async def orphan() -> None:
        async with database.write(brief=True) as connection:
            await connection.execute(text("INSERT INTO parts VALUES (77)"))

    ended = await asyncio.gather(
        _write(database, 1), orphan(), _write(database, 2), _write(database, 3, wrong=True), return_exceptions=True
    )
    assert [type(error) for error in ended] == [IntegrityError, IntegrityError, IntegrityError, ValueError]
    assert await _numbers(database) == []
    await _write(database, 4)
    assert await _numbers(database) == [4]


async def test_writers_that_are_cancelled_leave_the_others_alone(database: Database) -> None:
    """Before their turn, within it and while the commit is awaited: whoever is not cancelled has its part stored."""
    within = asyncio.Event()

    async def slow(number: int) -> None:
        async with database.write(brief=True) as connection:
            await connection.execute(text("INSERT INTO numbers VALUES (:x)"), {"x": number})
            within.set()
            await asyncio.sleep(60)

    first = asyncio.create_task(_write(database, 1))
    stuck = asyncio.create_task(slow(2))
    behind = [asyncio.create_task(_write(database, number)) for number in (3, 4, 5)]
    await within.wait()
    behind[1].cancel()
    await asyncio.sleep(0)
    stuck.cancel()
    ended = await asyncio.gather(first, stuck, *behind, return_exceptions=True)
    assert [isinstance(error, asyncio.CancelledError) for error in ended] == [False, True, False, True, False]
    assert await _numbers(database) == [1, 3, 5]


@pytest.mark.thorough
async def test_the_lock_of_another_process_holds_up_writers_and_not_the_loop(
    database: Database, tmp_path: Path
) -> None:
    """While another connection writes, reads go on at once; the writers follow when it has ended."""
    with closing(sqlite3.connect(tmp_path / "writes.sqlite", isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        writers = [asyncio.create_task(_write(database, number)) for number in range(3)]
        for _ in range(20):
            assert await _numbers(database) == []
        assert not any(writer.done() for writer in writers)
        other.execute("ROLLBACK")
        await asyncio.gather(*writers)
    assert await _numbers(database) == [0, 1, 2]


@pytest.mark.thorough
async def test_a_statement_that_is_not_brief_leaves_the_loop_to_others(database: Database) -> None:
    """It runs in another thread; a brief one in this one."""
    for brief in (False, True):
        async with database.read(brief=brief) as connection:
            where: list[int] = []
            raw = await connection.get_raw_connection()
            raw.driver_connection.create_function("here", 0, lambda w=where: w.append(threading.get_ident()))
            await connection.execute(text("SELECT here()"))
        assert (where == [threading.get_ident()]) == brief


@pytest.mark.thorough
async def test_a_file_that_is_no_database_is_an_error_for_all_who_wait(tmp_path: Path) -> None:
    """Where no transaction can begin, nobody is left waiting."""
    (tmp_path / "broken.sqlite").write_bytes(b"no database, but long enough to be looked at" * 100)
    database = Database(f"sqlite:///{tmp_path}/broken.sqlite")
    ended = await asyncio.gather(*(_write(database, i) for i in range(5)), return_exceptions=True)
    assert all(isinstance(error, DBAPIError) for error in ended)
    await database.close()


@pytest.mark.thorough
def test_what_was_answered_202_survives_the_death_of_the_server(tmp_path: Path) -> None:
    """Killed while many POSTs are written: each that was answered is there at the next start, and none twice."""
    with serving(tmp_path, workers=1) as service:
        answered: list[str] = []

        async def post(http: httpx2.AsyncClient, number: int) -> None:
            body = {"problem": posed(hard_graph(8, number), 0.7).to_json(), "time_limit_s": 30}
            try:
                reply = await http.post("/v1/solves", json=body, headers={"Idempotency-Key": str(number)})
            except httpx2.HTTPError:
                return
            assert reply.status_code in (200, 202), reply.text
            answered.append(json.loads(reply.text)["id"])

        async def crowd() -> None:
            async with httpx2.AsyncClient(base_url=service.url, timeout=60.0, trust_env=False) as http:
                posts = [asyncio.create_task(post(http, number)) for number in range(120)]
                while len(answered) < 25:
                    await asyncio.sleep(0.005)
                service.process.send_signal(signal.SIGKILL)
                await asyncio.wait(posts, timeout=2)
                for task in posts:
                    task.cancel()
                await asyncio.gather(*posts, return_exceptions=True)

        asyncio.run(crowd())
        service.stop(signal.SIGKILL)
        service.start()
        assert len(answered) >= 25
        assert len(set(answered)) == len(answered)
        for solve_id in answered:
            status, data = service.get(solve_id, wait=0)
            assert status in (200, 202), data


@pytest.mark.thorough
async def test_statements_and_locks_time_out_on_postgresql() -> None:
    """But for migrations, which wait for one another; the pool is as large as it is set."""
    with postgres() as url:
        settings = Settings(database_url=SecretStr(url), statement_timeout_s=0.5, lock_timeout_s=0.2, database_pool=3)
        database = Database(url, settings=settings)
        assert database.engine.pool.size() == 3
        try:
            async with database.write() as connection:
                await connection.execute(text("CREATE TABLE held (id int)"))
            async with database.write() as holder:
                await holder.execute(text("LOCK TABLE held"))
                with pytest.raises(OperationalError, match="lock timeout"):
                    async with database.write() as connection:
                        await connection.execute(text("SELECT * FROM held"))
            with pytest.raises(OperationalError, match="statement timeout"):
                async with database.write() as connection:
                    await connection.execute(text("SELECT pg_sleep(2)"))
            async with database.write() as connection:
                await connection.run_sync(migrations.lock)
                await connection.execute(text("SELECT pg_sleep(0.8)"))
        finally:
            await database.close()


@pytest.mark.parametrize(("durable", "level"), [(True, 2), (False, 1)])
async def test_sqlite_is_as_durable_as_it_is_set(tmp_path: Path, durable: bool, level: int) -> None:
    """FULL has each commit on the disk, NORMAL has a sound file."""
    url = f"sqlite:///{tmp_path}/s.sqlite"
    database = Database(url, settings=Settings(database_url=SecretStr(url), durable=durable))
    try:
        async with database.read() as connection:
            assert await connection.scalar(text("PRAGMA synchronous")) == level
    finally:
        await database.close()
