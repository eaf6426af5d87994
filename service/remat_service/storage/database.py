"""The database: one engine, readers and writers, the same on SQLite and PostgreSQL; its schema, owner and outages."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import URL, Column, ColumnElement, Connection, Executable, Row, Table, event, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.util import greenlet_spawn

from ..clock import SYSTEM, Clock
from ..errors import ServiceError
from ..settings import Settings, driver_url
from . import migrations
from .sqlite import Writes, raw_of

Connect = Callable[[], Any]
"""Opens a connection of the driver; called in a greenlet of SQLAlchemy's, it may await by `await_only`."""
_OUTAGE = (OperationalError, InterfaceError, PoolTimeout, psycopg.OperationalError, OSError, TimeoutError)


class Database:
    """Writers come one at a time on SQLite, which has one write lock anyway.

    SQLite: WAL, `synchronous=NORMAL` or `FULL`, `busy_timeout`, `foreign_keys=ON`; the driver begins nothing by itself,
    writers `BEGIN IMMEDIATE`, so that no transaction finds out at its end that it may not write.

    Args:
        clock: the time of this process, for all that is written and waited for.
        connect: opens a connection in the driver's place.
        machine: the time of the machine that a SQLite file is on, where that is not this process's.
        most_writers: that share a transaction on SQLite.
        settings: of the pool, timeouts and durability; without them nothing times out.

    Attributes:
        file: the path of the SQLite file; None where there is none.
    """

    def __init__(
        self,
        url: str,
        clock: Clock = SYSTEM,
        connect: Connect | None = None,
        machine: Clock | None = None,
        settings: Settings | None = None,
        most_writers: int = 256,
    ) -> None:
        found = driver_url(url)
        self.clock, self.machine, self.is_sqlite = clock, machine or clock, isinstance(found, URL)
        self.file = found.database if isinstance(found, URL) and found.database != ":memory:" else None
        more: dict[str, Any] = {"json_deserializer": json_or_nothing}
        if self.file is not None or not self.is_sqlite:  # a burst waits for a connection rather than failing
            pool_size = 10 if settings is None else settings.database_pool
            more |= {"pool_size": pool_size, "max_overflow": 0, "pool_timeout": 60.0}
        if self.file is not None:
            _make_private(Path(self.file))
        elif not self.is_sqlite:
            more["pool_pre_ping"] = True
            if settings is not None:
                limits = {"statement_timeout": settings.statement_timeout_s, "lock_timeout": settings.lock_timeout_s}
                options = " ".join(f"-c {name}={round(1000 * seconds)}" for name, seconds in limits.items())
                more["connect_args"] = {"options": options}
        if connect is not None:
            more["creator"] = connect
        self.engine: AsyncEngine = create_async_engine(found, **more)
        self._reader = self.engine
        if not self.is_sqlite:  # READ COMMITTED has no snapshot to lose, and BEGIN and ROLLBACK are a trip each
            self._reader = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self._inserts: dict[str, Any] = {}
        self._writes = Writes(self.engine, most_writers)
        self._single = self._reader.sync_engine.execution_options(remat_single=True)
        if self.is_sqlite:
            full = settings is not None and settings.durable
            event.listen(self.engine.sync_engine, "connect", partial(_on_connect, "FULL" if full else "NORMAL"))
            event.listen(self.engine.sync_engine, "begin", _on_begin)

    @asynccontextmanager
    async def read(self, brief: bool = False) -> AsyncIterator[AsyncConnection]:
        """A connection to read from: in a transaction, and so a snapshot, on SQLite; statement by statement else.

        Args:
            brief: its statements are answered by an index: SQLite runs them on this thread (`sqlite.py`).
        """
        async with self._reader.connect() as connection, connection.begin():
            if self.is_sqlite:
                raw_of(connection).brief = brief
            yield connection

    async def rows(self, query: Executable, **named: object) -> Sequence[Row[Any]]:
        """The rows of one statement that an index answers, which is a snapshot by itself.

        One greenlet for all of it, and no transaction around it: a fifth of the time of `read`.
        """

        def look() -> Sequence[Row[Any]]:
            with self._single.connect() as connection:
                if self.is_sqlite:
                    connection.connection.dbapi_connection.brief = True  # type: ignore[union-attr]
                return connection.execute(query, named).all()

        return await greenlet_spawn(look)

    async def first(self, query: Executable, **named: object) -> Row[Any] | None:
        """The first of these rows, if there is one."""
        found = await self.rows(query, **named)
        return found[0] if found else None

    @asynccontextmanager
    async def write(self, brief: bool = False) -> AsyncIterator[AsyncConnection]:
        """A connection in a write transaction, committed at the end and rolled back on an error.

        On SQLite writers take turns, and those who wait write in one transaction (`sqlite.py`); each goes on once that
        is committed, and the error of one undoes what it wrote itself.

        Args:
            brief: as for `read`.
        """
        if not self.is_sqlite:
            async with self.engine.begin() as connection:
                yield connection
            return
        async with self._writes.turn(brief) as connection:
            yield connection

    @asynccontextmanager
    async def change_schema(self) -> AsyncIterator[AsyncConnection]:
        """A write transaction for migrations, in which SQLite does not enforce foreign keys.

        SQLite changes most of a table by a copy of it, and dropping the old one would take along, or be refused for,
        the rows that refer to it. The setting can't be changed within a transaction.
        """
        if not self.is_sqlite:
            async with self.write() as connection:
                yield connection
            return
        async with self.engine.connect() as connection:
            await connection.execution_options(remat_writer=True, remat_foreign_keys=False)
            try:
                async with connection.begin():
                    yield connection
            finally:
                raw_of(connection).at_once("PRAGMA foreign_keys=ON")  # past SQLAlchemy, which would begin a transaction

    def insert_new(self, table: Table) -> Any:
        """An INSERT that leaves a row alone which is there; made once, since making it takes as long as running it."""
        if table.name not in self._inserts:
            self._inserts[table.name] = self.insert(table).on_conflict_do_nothing()
        return self._inserts[table.name]

    def insert(self, table: Table) -> Any:
        """An INSERT of this dialect, which knows `on_conflict_do_nothing` and `on_conflict_do_update`."""
        return sqlite.insert(table) if self.is_sqlite else postgresql.insert(table)

    def upsert(
        self,
        table: Table,
        row: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        changed: Sequence[str],
        unique: Sequence[Column[Any]] = (),
        where: Callable[[Any], ColumnElement[bool]] | None = None,
    ) -> Any:
        """An INSERT that changes some columns of the row that is there, where there is one.

        Args:
            unique: columns by which it is found; by default the primary key.
            where: whether it is changed, given the new row.
        """
        insert = self.insert(table).values(row)
        return insert.on_conflict_do_update(
            index_elements=unique or list(table.primary_key.columns),
            set_={name: insert.excluded[name] for name in changed},
            where=None if where is None else where(insert.excluded),
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._writes.end()
        await self.engine.dispose()


async def try_lock(connection: AsyncConnection, key: int) -> bool:
    """Whether no other process is at the same work, up to the end of this transaction; on SQLite there is none."""
    if connection.dialect.name != "postgresql":
        return True
    return bool(await connection.scalar(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": key}))


def json_or_nothing(text: str) -> Any:
    """A JSON column's value; None where it was damaged, which its reader has to expect."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _make_private(path: Path) -> None:
    """Make the file, where there is none, for its owner alone; SQLite gives what it writes next to it the same mode.

    Raises:
        ServiceError: it can't be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # never one that is there: closing it would end the locks that SQLite has on it in this process
        path.touch(0o600, exist_ok=False)
    except FileExistsError:
        pass
    except OSError as error:
        raise ServiceError(f"can't make the database {path}: {error.strerror}; see REMAT_DATABASE_URL") from None


def _on_connect(synchronous: str, connection: Any, record: object) -> None:
    for pragma in ("journal_mode=WAL", f"synchronous={synchronous}", "busy_timeout=10000", "foreign_keys=ON"):
        connection.at_once(f"PRAGMA {pragma}")


def _on_begin(connection: Connection) -> None:
    options = connection.get_execution_options()
    if options.get("remat_single"):
        return
    if options.get("remat_writer"):  # waits for the lock, in a thread
        if not options.get("remat_foreign_keys", True):
            connection.exec_driver_sql("PRAGMA foreign_keys=OFF")
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        connection.connection.dbapi_connection.at_once("BEGIN")  # type: ignore[union-attr]


async def migrate(database: Database) -> None:
    """Bring the schema up to date.

    Raises:
        ServiceError: the database can't be opened, or written to.
    """
    try:
        async with database.change_schema() as connection:
            await connection.run_sync(migrations.upgrade)
    except DBAPIError as error:
        where = database.engine.url.render_as_string(hide_password=True)
        why = str(error.orig).strip().splitlines()[0]
        raise ServiceError(f"can't use the database {where}: {why}; see REMAT_DATABASE_URL") from None


@contextmanager
def sole_owner(database: Database) -> Iterator[None]:
    """Hold a lock on a SQLite file itself, under whatever name it is opened; a crash releases it.

    It is `flock`'s, of which SQLite's own locks know nothing on Linux. The handle is open for as long as the
    database is, since closing one ends SQLite's locks.
    """
    path = database.file
    if path is None:
        yield
        return
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "rb") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServiceError(f"another service has {path} open; use PostgreSQL for more than one process") from None
        yield


def is_outage(error: BaseException) -> bool:
    """Whether an error says that the database, its disk or the network is in trouble, and not the program."""
    return isinstance(error, _OUTAGE)


def what_fails(error: BaseException) -> str:
    """What of the database is in trouble: it does not answer, or it answers and takes no writes."""
    origin = getattr(error, "orig", None) or error
    if isinstance(origin, psycopg.Error):
        away = origin.sqlstate is None or origin.sqlstate.startswith(("08", "57"))  # no connection, or a shutdown
    else:
        away = isinstance(origin, (PoolTimeout, OSError, TimeoutError))
    return "the database does not answer" if away else "the database takes no writes"


def first_line(error: BaseException) -> str:
    """What an error says, without the statement and the traceback."""
    said = str(getattr(error, "orig", None) or error).strip()
    return (said.splitlines() or [type(error).__name__])[0][:200]


class Outage:
    """One loop's view of the database; as a context, it goes round one round of the loop and lets no error out.

    Args:
        log: where it is said.
        what: fails meanwhile.
        passes: an error that is no failure, and is let out.
        about: what is said with it.

    Attributes:
        failing: whether the last round has failed.
    """

    def __init__(self, log: Any, what: str, passes: type[Exception] | tuple[()] = (), **about: object) -> None:
        self._log, self._what, self._passes, self._about = log, what, passes, about
        self._lasts = self.failing = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None:
            self.over()
        elif isinstance(error, self._passes) or not isinstance(error, Exception):
            return False
        else:
            self.failed(error)
        return True

    def failed(self, error: Exception) -> None:
        """A round has failed and is tried again: an outage is said once, any other error with its traceback."""
        self.failing = True
        if not is_outage(error):
            self._log.exception(f"{self._what} failed; trying again", **self._about)
        elif not self._lasts:
            self._lasts = True
            said = f"{self._what} fails while the database does not answer; trying again"
            self._log.warning(said, error=first_line(error), **self._about)

    def over(self) -> None:
        """A round has come to its end."""
        self.failing = False
        if self._lasts:
            self._lasts = False
            self._log.info(f"{self._what} goes on: the database answers again")
