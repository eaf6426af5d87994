"""The schema's history: one file a step, forwards and back, on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from sqlalchemy import Connection, inspect, text

from ...errors import ServiceError

_HERE = Path(__file__).parent
_LOCK = 0x72656D6174  # "remat": one migrating process at a time on PostgreSQL


def lock(connection: Connection) -> None:
    """One process at a time from here to the end of the transaction, where several share a database."""
    if connection.dialect.name == "postgresql":
        for name in ("lock_timeout", "statement_timeout"):  # another one's migration takes as long as it takes
            connection.execute(text(f"SET LOCAL {name} = 0"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Bring the schema forwards; safe to call from many processes at once.

    On SQLite in a transaction of `Database.change_schema`.

    Raises:
        ServiceError: a newer version of this program has brought it further than this one knows.
    """
    lock(connection)
    found = current(connection)
    if revision == "head" and serves(found):
        return
    if found is not None and found not in revisions():
        raise ServiceError(
            f"the store is at revision {found}, and this version of remat-service knows revisions up to {head()}: "
            "start the version that upgraded the store, or a newer one, or restore a back-up from before that"
        )
    _migrate(connection, "upgrade", revision)


def downgrade(connection: Connection, revision: str = "base") -> None:
    """Take the schema back; on SQLite in a transaction of `Database.change_schema`, as an upgrade."""
    _migrate(connection, "downgrade", revision)


def _migrate(connection: Connection, way: Literal["upgrade", "downgrade"], revision: str) -> None:
    """Let Alembic work on this connection; it is loaded only where there is something to do."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_HERE))
    config.attributes["connection"] = connection
    with _references_kept(connection):
        getattr(command, way)(config, revision)


@contextmanager
def _references_kept(connection: Connection) -> Iterator[None]:
    """On SQLite: tables are copied without regard to foreign keys, and every row still finds what it refers to.

    Raises:
        RuntimeError: foreign keys are enforced here, or a row has lost what it refers to.
    """
    if connection.dialect.name != "sqlite":
        yield
        return
    if connection.scalar(text("PRAGMA foreign_keys")):
        raise RuntimeError("a schema is changed in a transaction of Database.change_schema")
    before = len(connection.execute(text("PRAGMA foreign_key_check")).all())
    yield
    after = len(connection.execute(text("PRAGMA foreign_key_check")).all())
    if after > before:
        raise RuntimeError(f"the migration leaves {after - before} rows without the row that they refer to")


def current(connection: Connection) -> str | None:
    """The revision that the database is at, or None for an empty one."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return found


def serves(revision: str | None) -> bool:
    """Whether this program can work with a schema: its own, or the next one, which by rule leaves it able to."""
    return revision in (head(), f"{int(head()) + 1:04}")


def revisions() -> list[str]:
    """The revisions in this package, oldest first; files are named vNNNN_what.py."""
    names = sorted(path.name for path in (_HERE / "versions").glob("v[0-9]*.py"))
    return [name[1:5] for name in names]


def head() -> str:
    """The newest revision in this package."""
    return revisions()[-1]
