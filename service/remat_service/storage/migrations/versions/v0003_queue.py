"""Procrastinate's tables, on PostgreSQL only: a SQLite file has one process, which reads its own table."""

from __future__ import annotations

from alembic import op
from procrastinate.schema import SchemaManager

LAST_OF_ENGINE = "03.04.00_50_post_add_retry_failed_job_procedure.sql"
"""The newest of the engine's own migrations that its schema, applied here, holds; a later one needs a step of ours."""

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Forwards."""
    bind = op.get_bind()
    if bind.dialect.name == "postgresql":
        schema = SchemaManager.get_schema()
        # several statements with bare % in them: past SQLAlchemy's parameters, in the same transaction
        bind.connection.run_async(lambda driver: driver.execute(schema))


def downgrade() -> None:
    """Back."""
    bind = op.get_bind()
    if bind.dialect.name != "postgresql":
        return
    for kind, query in (
        ("TABLE", "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname LIKE 'procrastinate\\_%%'"),
        (
            "FUNCTION",
            "SELECT oid::regprocedure::text FROM pg_proc WHERE proname LIKE 'procrastinate\\_%%'",
        ),
        (
            "TYPE",
            "SELECT typname FROM pg_type WHERE typname LIKE 'procrastinate\\_%%' AND typtype IN ('e', 'c')",
        ),
    ):
        for (name,) in bind.exec_driver_sql(query).all():
            bind.exec_driver_sql(f"DROP {kind} IF EXISTS {name} CASCADE")
