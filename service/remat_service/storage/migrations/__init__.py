"""The schema's history: one file a step, forwards and back, on both databases."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

if TYPE_CHECKING:
    from alembic.config import Config

_HERE = Path(__file__).parent
_LOCK = 0x72656D6174  # "remat": one migrating process at a time on PostgreSQL


def configuration(connection: Connection) -> Config:
    """Alembic's configuration, with the connection to use. Alembic is loaded only where there is something to do."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_HERE))
    config.attributes["connection"] = connection
    return config


def lock(connection: Connection) -> None:
    """One process at a time from here to the end of the transaction, where several share a database."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Bring the schema forwards; safe to call from many processes at once."""
    lock(connection)
    if revision == "head" and current(connection) == head():
        return
    from alembic import command

    command.upgrade(configuration(connection), revision)


def downgrade(connection: Connection, revision: str = "base") -> None:
    """Take the schema back."""
    from alembic import command

    command.downgrade(configuration(connection), revision)


def current(connection: Connection) -> str | None:
    """The revision that the database is at, or None for an empty one."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return found


def head() -> str:
    """The newest revision in this package; files are named vNNNN_what.py."""
    names = sorted(path.name for path in (_HERE / "versions").glob("v[0-9]*.py"))
    found = re.match(r"v(\d{4})_", names[-1])
    assert found is not None
    return found.group(1)
