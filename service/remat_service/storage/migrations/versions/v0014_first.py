"""The first schema: tenants and keys, the cache, solves and requests, profiles; the engine's own tables on PostgreSQL.

The tables are as they were, whatever `storage/tables.py` says by now. A SQLite file has one process, which reads its
own table: the engine is not needed there.
"""

from __future__ import annotations

from alembic import op
from procrastinate.schema import SchemaManager
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from remat_service.storage import tables

LAST_OF_ENGINE = "03.04.00_50_post_add_retry_failed_job_procedure.sql"
"""The newest of the engine's own migrations that its schema, applied here, holds; a later one needs a step of ours."""

revision = "0014"
down_revision = None


def upgrade() -> None:
    """Forwards."""
    bind = op.get_bind()
    metadata.create_all(bind)
    if bind.dialect.name == "postgresql":
        schema = SchemaManager.get_schema()
        # several statements with bare % in them: past SQLAlchemy's parameters, in the same transaction
        bind.connection.run_async(lambda driver: driver.execute(schema))


def downgrade() -> None:
    """Back."""
    bind = op.get_bind()
    metadata.drop_all(bind)
    if bind.dialect.name != "postgresql":
        return
    for kind, query in (
        ("TABLE", "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname LIKE 'procrastinate\\_%%'"),
        ("FUNCTION", "SELECT oid::regprocedure::text FROM pg_proc WHERE proname LIKE 'procrastinate\\_%%'"),
        ("TYPE", "SELECT typname FROM pg_type WHERE typname LIKE 'procrastinate\\_%%' AND typtype IN ('e', 'c')"),
    ):
        for (name,) in bind.exec_driver_sql(query).all():
            bind.exec_driver_sql(f"DROP {kind} IF EXISTS {name} CASCADE")


metadata = MetaData(naming_convention=tables.metadata.naming_convention)
_KEY, _ID, _MOMENT = String(64), String(32), DateTime(timezone=True)


Table(
    "scopes",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("name", String(100), nullable=False, unique=True),
    Column("salt", LargeBinary, nullable=False),
    Column("epoch", Integer, nullable=False, server_default="0"),
    Column("everyone", Boolean, nullable=False, server_default=text("false")),
    Column("created_at", _MOMENT, nullable=False),
)

Table(
    "tenants",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("name", String(100), nullable=False, unique=True),
    Column("scope_id", _ID, ForeignKey("scopes.id"), nullable=False),
    Column("weight", Float, nullable=False, server_default="1"),
    Column("most_running", Integer),
    Column("most_queued", Integer),
    Column("most_solver_seconds", Float),
    Column("most_stored_bytes", BigInteger),
    Column("most_requests", Integer),
    Column("most_profiles", Integer),
    Column("disabled", Boolean, nullable=False, server_default=text("false")),
    Column("identity_group", String(200), unique=True),
    Column("created_at", _MOMENT, nullable=False),
)

Table(
    "api_keys",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("tenant_id", _ID, ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("label", String(100), nullable=False, server_default=""),
    Column("prefix", String(20), nullable=False),
    Column("secret_hash", _KEY, nullable=False, unique=True),
    Column("scopes", String(200), nullable=False),
    Column("created_at", _MOMENT, nullable=False),
    Column("expires_at", _MOMENT),
    Column("revoked_at", _MOMENT),
)

Table(
    "graphs",
    metadata,
    Column("key", _KEY, primary_key=True),
    Column("structure_key", _KEY, nullable=False, index=True),
    Column("ops", Integer, nullable=False),
    Column("edges", Integer, nullable=False),
    Column("total_cost_ns", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("size_bytes", Integer, nullable=False),
    Column("created_at", _MOMENT, nullable=False),
    Column("used_at", _MOMENT, nullable=False, index=True),
)


def _graph_column() -> Column[str]:
    return Column("graph_key", _KEY, ForeignKey("graphs.key", ondelete="CASCADE"), nullable=False)


def _seal_column() -> Column[str]:
    return Column("seal", _KEY)


Table(
    "problems",
    metadata,
    Column("key", _KEY, primary_key=True),
    _graph_column(),
    Column("budget_bytes", BigInteger, nullable=False),
    Index("ix_problems_graph_key", "graph_key"),
)

Table(
    "plans",
    metadata,
    Column("id", _ID, primary_key=True),
    _graph_column(),
    Column("method_key", String(100), nullable=False),
    Column("source", String(100), nullable=False),
    Column("solver", String(50), nullable=False, server_default=""),
    Column("cost_ns", BigInteger, nullable=False),
    Column("peak_bytes", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("checksum", _KEY, nullable=False),
    Column("size_bytes", Integer, nullable=False),
    Column("pinned", Boolean, nullable=False, server_default=text("false")),
    Column("created_at", _MOMENT, nullable=False),
    Column("used_at", _MOMENT, nullable=False, index=True),
    UniqueConstraint("graph_key", "method_key", "checksum"),
    Index("ix_plans_graph_key_cost_ns", "graph_key", "cost_ns"),
)

Table(
    "pins",
    metadata,
    Column("plan_id", _ID, ForeignKey("plans.id", ondelete="CASCADE"), nullable=False),
    Column("tenant_id", _ID, ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False),
    Column("problem_key", _KEY, nullable=False, index=True),
    PrimaryKeyConstraint("plan_id", "tenant_id", "problem_key"),
)

Table(
    "proofs",
    metadata,
    Column("id", _ID, primary_key=True),
    _graph_column(),
    Column("budget_bytes", BigInteger, nullable=False),
    Column("bound_ns", BigInteger),
    Column("solver", String(50), nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("checksum", _KEY, nullable=False),
    Column("size_bytes", Integer, nullable=False),
    Column("created_at", _MOMENT, nullable=False),
    UniqueConstraint("graph_key", "budget_bytes", "checksum"),
    Index("ix_proofs_graph_key_bound_ns", "graph_key", "bound_ns"),
)

Table(
    "bounds",
    metadata,
    _graph_column(),
    Column("budget_bytes", BigInteger, nullable=False),
    Column("method_key", String(100), nullable=False),
    Column("restricted_to", String(400), nullable=False),
    Column("solver", String(50), nullable=False),
    Column("bound_ns", BigInteger, nullable=False),
    Column("source", String(100)),
    Column("created_at", _MOMENT, nullable=False),
    _seal_column(),
    PrimaryKeyConstraint("graph_key", "budget_bytes", "method_key", "restricted_to", "solver"),
)

Table(
    "floors",
    metadata,
    _graph_column(),
    Column("solver", String(50), nullable=False),
    Column("least_bytes", BigInteger, nullable=False),
    Column("enough_bytes", BigInteger),
    _seal_column(),
    PrimaryKeyConstraint("graph_key", "solver"),
)

Table(
    "efforts",
    metadata,
    _graph_column(),
    Column("budget_bytes", BigInteger, nullable=False),
    Column("method_key", String(100), nullable=False),
    Column("solver", String(50), nullable=False),
    Column("seconds", Float, nullable=False),
    Column("settled", Boolean, nullable=False),
    Column("status", String(20), nullable=False),
    Column("limit", String(20)),
    Column("restricted_to", String(400), nullable=False),
    Column("message", Text, nullable=False),
    Column("created_at", _MOMENT, nullable=False),
    _seal_column(),
    PrimaryKeyConstraint("graph_key", "budget_bytes", "method_key", "solver"),
)

Table(
    "solves",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("tenant_id", _ID, ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False),
    Column("flight_key", _KEY, nullable=False),
    _graph_column(),
    Column("budget_bytes", BigInteger, nullable=False),
    Column("fixed_bytes", BigInteger, nullable=False),
    Column("method", String(50), nullable=False),
    Column("method_key", String(100), nullable=False),
    Column("options", JSON, nullable=False),
    Column("start_plan_id", _ID),
    Column("forced", Boolean, nullable=False, server_default=text("false")),
    Column("state", String(10), nullable=False),
    Column("priority", Integer, nullable=False, server_default="0"),
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("worker", String(100)),
    Column("ticket", BigInteger),
    Column("heartbeat_at", _MOMENT),
    Column("revision", Integer, nullable=False, server_default="0"),
    Column("plan_id", _ID),
    Column("cost_ns", BigInteger),
    Column("peak_bytes", BigInteger),
    Column("total_cost_ns", BigInteger),
    Column("bound_ns", BigInteger),
    Column("restricted_to", String(400), nullable=False, server_default=""),
    _seal_column(),
    Column("spent_s", Float, nullable=False, server_default="0"),
    Column("outcome", JSON),
    Column("trace", String(100)),
    Column("queued_at", _MOMENT, nullable=False),
    Column("started_at", _MOMENT),
    Column("ended_at", _MOMENT),
    Index(
        "uq_solves_flight_key",
        "flight_key",
        unique=True,
        sqlite_where=text("state IN ('queued', 'running')"),
        postgresql_where=text("state IN ('queued', 'running')"),
    ),
    Index("ix_solves_state_priority", "state", "priority", "queued_at"),
    Index("ix_solves_tenant_id_state", "tenant_id", "state"),
    Index("ix_solves_graph_key", "graph_key"),
)

Table(
    "requests",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("tenant_id", _ID, ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False),
    Column("solve_id", _ID, ForeignKey("solves.id", ondelete="SET NULL"), index=True),
    Column("graph_key", _KEY, nullable=False),
    Column("digest", _KEY, nullable=False),
    Column("budget_bytes", BigInteger, nullable=False),
    Column("fixed_bytes", BigInteger, nullable=False),
    Column("name", String(100)),
    Column("method", String(50), nullable=False),
    Column("method_key", String(100), nullable=False),
    Column("time_limit_s", Float, nullable=False),
    Column("max_gap", Float, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("queue_limit_s", Float),
    Column("cache", String(10), nullable=False),
    Column("ended", Boolean, nullable=False),
    Column("answer", JSON),
    Column("plan_id", _ID),
    Column("proof_id", _ID),
    _seal_column(),
    Column("idempotency_key", String(200)),
    Column("body_hash", _KEY),
    Column("group_id", _ID, index=True),
    Column("epoch", Integer),
    Column("created_at", _MOMENT, nullable=False, index=True),
    Column("ended_at", _MOMENT),
    Index("ix_requests_tenant_id_id", "tenant_id", "id"),
    Index("uq_requests_tenant_id_idempotency_key", "tenant_id", "idempotency_key", unique=True),
)

Table(
    "groups",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("tenant_id", _ID, ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("kind", String(20), nullable=False),
    Column("about", JSON, nullable=False),
    Column("created_at", _MOMENT, nullable=False),
)

Table(
    "events",
    metadata,
    Column("solve_id", _ID, ForeignKey("solves.id", ondelete="CASCADE"), nullable=False),
    Column("seq", Integer, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("cost_ns", BigInteger),
    Column("bound_ns", BigInteger),
    Column("restricted_to", String(400), nullable=False),
    Column("source", String(100), nullable=False),
    PrimaryKeyConstraint("solve_id", "seq"),
)

Table(
    "probes",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("at", _MOMENT, nullable=False),
)

Table(
    "seal_keys",
    metadata,
    Column("seal", _KEY, primary_key=True),
    Column("signs", Boolean, nullable=False),
    Column("at", _MOMENT, nullable=False),
)

Table(
    "profiles",
    metadata,
    Column("scope_id", _ID, ForeignKey("scopes.id", ondelete="CASCADE"), nullable=False),
    Column("device", String(500), nullable=False),
    Column("signature", String(500), nullable=False),
    Column("cost_ns", BigInteger, nullable=False),
    Column("workspace_bytes", BigInteger, nullable=False),
    Column("created_at", _MOMENT, nullable=False),
    _seal_column(),
    PrimaryKeyConstraint("scope_id", "device", "signature"),
)

Table(
    "profile_reports",
    metadata,
    Column("scope_id", _ID, ForeignKey("scopes.id", ondelete="CASCADE"), nullable=False),
    Column("device", String(500), nullable=False),
    Column("signature", String(500), nullable=False),
    Column("tenant_id", _ID, ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("cost_ns", BigInteger, nullable=False),
    Column("workspace_bytes", BigInteger, nullable=False),
    Column("created_at", _MOMENT, nullable=False),
    _seal_column(),
    PrimaryKeyConstraint("scope_id", "device", "signature", "tenant_id"),
)

Table(
    "administration",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("at", _MOMENT, nullable=False),
    Column("actor", String(200), nullable=False),
    Column("act", String(100), nullable=False),
    Column("about", JSON, nullable=False),
)
