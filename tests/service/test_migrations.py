"""The schema's history: up, down, up on both databases, and in step with the tables."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from procrastinate.schema import SchemaManager
from sqlalchemy import Connection, create_engine, inspect

from remat_service.storage import migrations
from remat_service.storage.database import Database
from remat_service.storage.tables import metadata
from service.database import postgres


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/empty.sqlite"
    else:
        with postgres() as found:
            yield found


def _differences(connection: Connection) -> list[object]:
    def ours(name: str | None, kind: str, *_: object) -> bool:
        return kind != "table" or not str(name).startswith("procrastinate_")

    context = MigrationContext.configure(
        connection, opts={"include_name": lambda name, kind, parents: ours(name, kind), "compare_type": True}
    )
    return compare_metadata(context, metadata)


async def test_up_down_up(url: str) -> None:
    """Forwards to the tables as they are, back to nothing, forwards again."""
    database = Database(url)
    for _ in range(2):
        async with database.write() as connection:
            await connection.run_sync(migrations.upgrade)
        async with database.write() as connection:
            assert await connection.run_sync(migrations.current) == migrations.head()
            assert await connection.run_sync(_differences) == []
        async with database.write() as connection:
            await connection.run_sync(migrations.downgrade)
        async with database.read() as connection:
            left = await connection.run_sync(lambda c: inspect(c).get_table_names())
            assert left == ["alembic_version"]
    await database.close()


def test_the_queue_has_no_migration_that_ours_do_not_know() -> None:
    """Another version of the engine with other tables fails here until a step of ours brings them."""
    known = sorted(path.name for path in Path(SchemaManager.get_migrations_path()).glob("*.sql"))
    assert known[-1] == import_module("remat_service.storage.migrations.versions.v0003_queue").LAST_OF_ENGINE


def test_every_step_back_and_forth(tmp_path: Path) -> None:
    """Each revision on its own: one back, one forward."""
    engine = create_engine(f"sqlite:///{tmp_path}/steps.sqlite")
    for revision in ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008"):
        with engine.begin() as connection:
            migrations.upgrade(connection, revision)
            migrations.downgrade(connection, "-1")
            migrations.upgrade(connection, revision)
    engine.dispose()
