"""Settings of the database and of how often a tenant may ask."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from remat_service.errors import RateLimited
from remat_service.settings import Settings
from remat_service.storage import migrations
from remat_service.storage.database import Database
from remat_service.web.authentication import Admission
from service.database import postgres


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


@pytest.mark.thorough
def test_a_tenant_has_a_rate_of_its_own() -> None:
    """A burst of one second's, then the rate; what is refused spends nothing, and others are not held up."""
    now = [0.0]
    admission = Admission(1000, rate=5.0, clock=lambda: now[0])

    def taken(tenant: str, tries: int) -> int:
        done = 0
        for _ in range(tries):
            try:
                admission.enter(tenant)
                done += 1
            except RateLimited:
                pass
        return done

    assert taken("red", 20) == 5
    assert taken("blue", 3) == 3
    now[0] = 0.5
    assert taken("red", 20) == 2
    now[0] = 10.0
    assert taken("red", 20) == 5
    slow = Admission(1000, rate=0.1, clock=lambda: now[0])
    slow.enter("red")
    with pytest.raises(RateLimited) as refused:
        slow.enter("red")
    assert refused.value.retry_after_s == 10
