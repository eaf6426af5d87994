"""Quotas on what is kept, several reports of a profile, and the trace that a solve belongs to."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_QUOTAS = {"most_stored_bytes": sa.BigInteger(), "most_requests": sa.Integer(), "most_profiles": sa.Integer()}


def upgrade() -> None:
    """Forwards; a profile that is there already stands until three reports say otherwise."""
    with op.batch_alter_table("tenants") as batch:
        for name, kind in _QUOTAS.items():
            batch.add_column(sa.Column(name, kind, nullable=True))
    with op.batch_alter_table("solves") as batch:
        batch.add_column(sa.Column("trace", sa.String(100), nullable=True))
    op.create_table(
        "profile_reports",
        sa.Column("scope_id", sa.String(32), nullable=False),
        sa.Column("device", sa.String(500), nullable=False),
        sa.Column("signature", sa.String(500), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("cost_ns", sa.BigInteger(), nullable=False),
        sa.Column("workspace_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["scope_id"], ["scopes.id"], name="fk_profile_reports_scope_id_scopes", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_profile_reports_tenant_id_tenants", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("scope_id", "device", "signature", "tenant_id", name="pk_profile_reports"),
    )
    op.create_index("ix_profile_reports_tenant_id", "profile_reports", ["tenant_id"])


def downgrade() -> None:
    """Back."""
    op.drop_table("profile_reports")
    with op.batch_alter_table("solves") as batch:
        batch.drop_column("trace")
    with op.batch_alter_table("tenants") as batch:
        for name in _QUOTAS:
            batch.drop_column(name)
