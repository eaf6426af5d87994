"""The first schema: tenants and keys, the cache, solves and requests, profiles."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Forwards."""
    _graphs()
    _knowledge()
    _plans()
    _tenants()
    _solves()
    _requests()


def _graphs() -> None:
    """Problems' graphs, and who shares what is known of them."""
    op.create_table(
        "graphs",
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("structure_key", sa.String(length=64), nullable=False),
        sa.Column("ops", sa.Integer(), nullable=False),
        sa.Column("edges", sa.Integer(), nullable=False),
        sa.Column("total_cost_ns", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column("size_bytes", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_graphs")),
    )
    op.create_index(op.f("ix_graphs_structure_key"), "graphs", ["structure_key"], unique=False)
    op.create_index(op.f("ix_graphs_used_at"), "graphs", ["used_at"], unique=False)
    op.create_table(
        "scopes",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("salt", sa.LargeBinary(), nullable=False),
        sa.Column("epoch", sa.Integer(), server_default="0", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_scopes")),
        sa.UniqueConstraint("name", name=op.f("uq_scopes_name")),
    )


def _knowledge() -> None:
    """What is known of a graph besides its plans."""
    op.create_table(
        "bounds",
        sa.Column("graph_key", sa.String(length=64), nullable=False),
        sa.Column("budget_bytes", sa.BigInteger(), nullable=False),
        sa.Column("method_key", sa.String(length=100), nullable=False),
        sa.Column("restricted_to", sa.String(length=400), nullable=False),
        sa.Column("solver", sa.String(length=50), nullable=False),
        sa.Column("bound_ns", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["graph_key"], ["graphs.key"], name=op.f("fk_bounds_graph_key_graphs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint(
            "graph_key", "budget_bytes", "method_key", "restricted_to", "solver", name=op.f("pk_bounds")
        ),
    )
    op.create_table(
        "efforts",
        sa.Column("graph_key", sa.String(length=64), nullable=False),
        sa.Column("budget_bytes", sa.BigInteger(), nullable=False),
        sa.Column("method_key", sa.String(length=100), nullable=False),
        sa.Column("solver", sa.String(length=50), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("settled", sa.Boolean(), nullable=False),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("limit", sa.String(length=20), nullable=True),
        sa.Column("restricted_to", sa.String(length=400), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["graph_key"], ["graphs.key"], name=op.f("fk_efforts_graph_key_graphs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("graph_key", "budget_bytes", "method_key", "solver", name=op.f("pk_efforts")),
    )
    op.create_table(
        "floors",
        sa.Column("graph_key", sa.String(length=64), nullable=False),
        sa.Column("solver", sa.String(length=50), nullable=False),
        sa.Column("least_bytes", sa.BigInteger(), nullable=False),
        sa.Column("enough_bytes", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["graph_key"], ["graphs.key"], name=op.f("fk_floors_graph_key_graphs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("graph_key", "solver", name=op.f("pk_floors")),
    )


def _plans() -> None:
    """Plans, the problems that they are for, and what kernels cost."""
    op.create_table(
        "plans",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("graph_key", sa.String(length=64), nullable=False),
        sa.Column("method_key", sa.String(length=100), nullable=False),
        sa.Column("source", sa.String(length=100), nullable=False),
        sa.Column("cost_ns", sa.BigInteger(), nullable=False),
        sa.Column("peak_bytes", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column("checksum", sa.String(length=64), nullable=False),
        sa.Column("size_bytes", sa.Integer(), nullable=False),
        sa.Column("pinned", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["graph_key"], ["graphs.key"], name=op.f("fk_plans_graph_key_graphs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_plans")),
        sa.UniqueConstraint("graph_key", "method_key", "checksum", name=op.f("uq_plans_graph_key_method_key_checksum")),
    )
    op.create_index("ix_plans_graph_key_cost_ns", "plans", ["graph_key", "cost_ns"], unique=False)
    op.create_index(op.f("ix_plans_used_at"), "plans", ["used_at"], unique=False)
    op.create_table(
        "problems",
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("graph_key", sa.String(length=64), nullable=False),
        sa.Column("budget_bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["graph_key"], ["graphs.key"], name=op.f("fk_problems_graph_key_graphs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_problems")),
    )
    op.create_index("ix_problems_graph_key", "problems", ["graph_key"], unique=False)
    op.create_table(
        "profiles",
        sa.Column("scope_id", sa.String(length=32), nullable=False),
        sa.Column("device", sa.String(length=500), nullable=False),
        sa.Column("signature", sa.String(length=500), nullable=False),
        sa.Column("cost_ns", sa.BigInteger(), nullable=False),
        sa.Column("workspace_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["scope_id"], ["scopes.id"], name=op.f("fk_profiles_scope_id_scopes"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("scope_id", "device", "signature", name=op.f("pk_profiles")),
    )


def _tenants() -> None:
    """Who asks, and with which keys."""
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("scope_id", sa.String(length=32), nullable=False),
        sa.Column("weight", sa.Float(), server_default="1", nullable=False),
        sa.Column("most_running", sa.Integer(), nullable=True),
        sa.Column("most_queued", sa.Integer(), nullable=True),
        sa.Column("most_solver_seconds", sa.Float(), nullable=True),
        sa.Column("disabled", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["scope_id"], ["scopes.id"], name=op.f("fk_tenants_scope_id_scopes")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("label", sa.String(length=100), server_default="", nullable=False),
        sa.Column("prefix", sa.String(length=20), nullable=False),
        sa.Column("secret_hash", sa.String(length=64), nullable=False),
        sa.Column("scopes", sa.String(length=200), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id_tenants"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("secret_hash", name=op.f("uq_api_keys_secret_hash")),
    )
    op.create_index(op.f("ix_api_keys_tenant_id"), "api_keys", ["tenant_id"], unique=False)


def _solves() -> None:
    """What is solved, once for all who ask for it."""
    op.create_table(
        "solves",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("flight_key", sa.String(length=64), nullable=False),
        sa.Column("graph_key", sa.String(length=64), nullable=False),
        sa.Column("budget_bytes", sa.BigInteger(), nullable=False),
        sa.Column("fixed_bytes", sa.BigInteger(), nullable=False),
        sa.Column("method", sa.String(length=50), nullable=False),
        sa.Column("method_key", sa.String(length=100), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("start_plan_id", sa.String(length=32), nullable=True),
        sa.Column("state", sa.String(length=10), nullable=False),
        sa.Column("priority", sa.Integer(), server_default="0", nullable=False),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("worker", sa.String(length=100), nullable=True),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revision", sa.Integer(), server_default="0", nullable=False),
        sa.Column("plan_id", sa.String(length=32), nullable=True),
        sa.Column("cost_ns", sa.BigInteger(), nullable=True),
        sa.Column("bound_ns", sa.BigInteger(), nullable=True),
        sa.Column("restricted_to", sa.String(length=400), server_default="", nullable=False),
        sa.Column("spent_s", sa.Float(), server_default="0", nullable=False),
        sa.Column("outcome", sa.JSON(), nullable=True),
        sa.Column("queued_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["graph_key"], ["graphs.key"], name=op.f("fk_solves_graph_key_graphs"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_solves_tenant_id_tenants"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_solves")),
    )
    op.create_index("ix_solves_graph_key", "solves", ["graph_key"], unique=False)
    op.create_index("ix_solves_state_priority", "solves", ["state", "priority", "queued_at"], unique=False)
    op.create_index("ix_solves_tenant_id_state", "solves", ["tenant_id", "state"], unique=False)
    op.create_index(
        "uq_solves_flight_key",
        "solves",
        ["flight_key"],
        unique=True,
        sqlite_where=sa.text("state IN ('queued', 'running')"),
        postgresql_where=sa.text("state IN ('queued', 'running')"),
    )


def _requests() -> None:
    """What each of them asked for, and each improvement on the way."""
    op.create_table(
        "events",
        sa.Column("solve_id", sa.String(length=32), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("cost_ns", sa.BigInteger(), nullable=True),
        sa.Column("bound_ns", sa.BigInteger(), nullable=True),
        sa.Column("restricted_to", sa.String(length=400), nullable=False),
        sa.Column("source", sa.String(length=100), nullable=False),
        sa.ForeignKeyConstraint(
            ["solve_id"], ["solves.id"], name=op.f("fk_events_solve_id_solves"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("solve_id", "seq", name=op.f("pk_events")),
    )
    op.create_table(
        "requests",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("solve_id", sa.String(length=32), nullable=True),
        sa.Column("graph_key", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("budget_bytes", sa.BigInteger(), nullable=False),
        sa.Column("fixed_bytes", sa.BigInteger(), nullable=False),
        sa.Column("method", sa.String(length=50), nullable=False),
        sa.Column("method_key", sa.String(length=100), nullable=False),
        sa.Column("time_limit_s", sa.Float(), nullable=False),
        sa.Column("max_gap", sa.Float(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("queue_limit_s", sa.Float(), nullable=True),
        sa.Column("cache", sa.String(length=10), nullable=False),
        sa.Column("ended", sa.Boolean(), nullable=False),
        sa.Column("answer", sa.JSON(), nullable=True),
        sa.Column("plan_id", sa.String(length=32), nullable=True),
        sa.Column("idempotency_key", sa.String(length=200), nullable=True),
        sa.Column("body_hash", sa.String(length=64), nullable=True),
        sa.Column("group_id", sa.String(length=32), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["solve_id"], ["solves.id"], name=op.f("fk_requests_solve_id_solves"), ondelete="SET NULL"
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_requests_tenant_id_tenants"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_requests")),
    )
    op.create_index(op.f("ix_requests_created_at"), "requests", ["created_at"], unique=False)
    op.create_index(op.f("ix_requests_group_id"), "requests", ["group_id"], unique=False)
    op.create_index(op.f("ix_requests_solve_id"), "requests", ["solve_id"], unique=False)
    op.create_index("ix_requests_tenant_id_id", "requests", ["tenant_id", "id"], unique=False)
    op.create_index("uq_requests_tenant_id_idempotency_key", "requests", ["tenant_id", "idempotency_key"], unique=True)


def downgrade() -> None:
    """Back."""
    op.drop_index("uq_requests_tenant_id_idempotency_key", table_name="requests")
    op.drop_index("ix_requests_tenant_id_id", table_name="requests")
    op.drop_index(op.f("ix_requests_solve_id"), table_name="requests")
    op.drop_index(op.f("ix_requests_group_id"), table_name="requests")
    op.drop_index(op.f("ix_requests_created_at"), table_name="requests")
    op.drop_table("requests")
    op.drop_table("events")
    op.drop_index(
        "uq_solves_flight_key",
        table_name="solves",
        sqlite_where=sa.text("state IN ('queued', 'running')"),
        postgresql_where=sa.text("state IN ('queued', 'running')"),
    )
    op.drop_index("ix_solves_tenant_id_state", table_name="solves")
    op.drop_index("ix_solves_state_priority", table_name="solves")
    op.drop_index("ix_solves_graph_key", table_name="solves")
    op.drop_table("solves")
    op.drop_index(op.f("ix_api_keys_tenant_id"), table_name="api_keys")
    op.drop_table("api_keys")
    op.drop_table("tenants")
    op.drop_table("profiles")
    op.drop_index("ix_problems_graph_key", table_name="problems")
    op.drop_table("problems")
    op.drop_index(op.f("ix_plans_used_at"), table_name="plans")
    op.drop_index("ix_plans_graph_key_cost_ns", table_name="plans")
    op.drop_table("plans")
    op.drop_table("floors")
    op.drop_table("efforts")
    op.drop_table("bounds")
    op.drop_table("scopes")
    op.drop_index(op.f("ix_graphs_used_at"), table_name="graphs")
    op.drop_index(op.f("ix_graphs_structure_key"), table_name="graphs")
    op.drop_table("graphs")
