"""The schema's history: up, down, up on both databases, and in step with the tables."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from procrastinate.schema import SchemaManager
from sqlalchemy import Connection, inspect, text

from remat_service.storage import migrations
from remat_service.storage.database import Database
from remat_service.storage.tables import metadata

REVISIONS = sorted(path.name[1:5] for path in (Path(migrations.__file__).parent / "versions").glob("v[0-9]*.py"))


def _differences(connection: Connection) -> list[object]:
    def ours(name: str | None, kind: str, *_: object) -> bool:
        return kind != "table" or not str(name).startswith("procrastinate_")

    context = MigrationContext.configure(
        connection, opts={"include_name": lambda name, kind, parents: ours(name, kind), "compare_type": True}
    )
    return compare_metadata(context, metadata)


def test_the_queue_has_no_migration_that_ours_do_not_know() -> None:
    """Another version of the engine with other tables fails here until a step of ours brings them."""
    known = sorted(path.name for path in Path(SchemaManager.get_migrations_path()).glob("*.sql"))
    assert known[-1] == import_module("remat_service.storage.migrations.versions.v0014_first").LAST_OF_ENGINE


@pytest.mark.thorough
async def test_rows_outlive_every_change_of_the_schema(url: str) -> None:
    """A row in every table at a revision is there, with all that it had, at every later one and on the way back.

    The last revision has the tables as they are, and before the first there is nothing.
    """
    database = Database(url)
    for start in REVISIONS:
        later = [revision for revision in REVISIONS if revision > start]
        async with database.change_schema() as connection:
            await connection.run_sync(migrations.upgrade, start)
            await connection.run_sync(_fill)
            rows = await connection.run_sync(_rows)
        assert all(rows.values()), "a table has no row"
        for revision in [*later, *reversed(later[:-1]), start, REVISIONS[-1], start]:  # by steps, back, and in one go
            async with database.change_schema() as connection:
                forwards = (await connection.run_sync(migrations.current) or "") < revision
                await connection.run_sync(migrations.upgrade if forwards else migrations.downgrade, revision)
            async with database.write() as connection:
                assert _within(rows, await connection.run_sync(_rows)), f"rows of {start} at {revision}"
                if revision == REVISIONS[-1]:
                    assert await connection.run_sync(migrations.current) == migrations.head()
                    assert await connection.run_sync(_differences) == []
        async with database.change_schema() as connection:
            await connection.run_sync(migrations.downgrade)
        async with database.read() as connection:
            left = await connection.run_sync(lambda c: inspect(c).get_table_names())
            assert left == ["alembic_version"]
    await database.close()


async def test_foreign_keys_are_enforced_but_for_migrations(tmp_path: Path) -> None:
    """A migration in an ordinary transaction is refused, and the connection that ran one enforces them again."""
    database = Database(f"sqlite:///{tmp_path}/keys.sqlite")
    with pytest.raises(RuntimeError, match="change_schema"):
        async with database.write() as connection:
            await connection.run_sync(migrations.upgrade)
    async with database.change_schema() as connection:
        await connection.run_sync(migrations.upgrade)
    for _ in range(2):
        async with database.write() as connection:
            assert await connection.scalar(text("PRAGMA foreign_keys")) == 1
    await database.close()


def _fill(connection: Connection) -> None:
    """One row in each table, whatever its columns are."""
    values: dict[type[sa.types.TypeEngine[Any]], Any] = {
        sa.String: "x", sa.Text: "x", sa.JSON: {"a": [1]}, sa.LargeBinary: b"x", sa.Boolean: True, sa.Float: 0.5,
        sa.Integer: 7, sa.DateTime: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    }  # fmt: skip
    tables = _tables(connection)
    for table in tables:
        row = {}
        for column in table.columns:
            kind = next(kind for kind in column.type.__class__.__mro__ if kind in values)
            row[column.name] = values[kind]
        connection.execute(table.insert().values(row))


def _rows(connection: Connection) -> dict[str, list[dict[str, Any]]]:
    return {
        table.name: [dict(row) for row in connection.execute(table.select()).mappings()]
        for table in _tables(connection)
    }


def _tables(connection: Connection) -> list[sa.Table]:
    found = sa.MetaData()
    found.reflect(connection)
    return [table for table in found.sorted_tables if not table.name.startswith(("alembic_", "procrastinate_"))]


def _within(before: dict[str, list[dict[str, Any]]], after: dict[str, list[dict[str, Any]]]) -> bool:
    """Whether every row is there, with what it had; there may be more columns and tables."""
    return all(
        [{name: now[name] for name in then} for then, now in zip(rows, after[table], strict=True)] == rows
        for table, rows in before.items()
    )
