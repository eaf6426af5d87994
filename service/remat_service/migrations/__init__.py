"""The schema's history: one file a step, forwards and back, on both databases."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

_LOCK = 0x72656D6174  # "remat": one migrating process at a time on PostgreSQL


def configuration(connection: Connection) -> Config:
    """Alembic's configuration, with the connection to use."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.attributes["connection"] = connection
    return config


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Bring the schema forwards; safe to call from many processes at once."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    command.upgrade(configuration(connection), revision)


def downgrade(connection: Connection, revision: str = "base") -> None:
    """Take the schema back."""
    command.downgrade(configuration(connection), revision)


def current(connection: Connection) -> str | None:
    """The revision that the database is at."""
    return MigrationContext.configure(connection).get_current_revision()


def head() -> str | None:
    """The newest revision in this package."""
    return ScriptDirectory(str(Path(__file__).parent)).get_current_head()
