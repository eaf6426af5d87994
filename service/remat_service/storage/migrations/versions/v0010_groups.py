"""Sharing groups that every tenant is in, tenants named by an identity provider's groups, a log of administration."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Forwards."""
    with op.batch_alter_table("scopes") as batch:
        batch.add_column(sa.Column("everyone", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    with op.batch_alter_table("tenants") as batch:
        batch.add_column(sa.Column("identity_group", sa.String(200), nullable=True))
        batch.create_unique_constraint("uq_tenants_identity_group", ["identity_group"])
    op.create_table(
        "administration",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.String(200), nullable=False),
        sa.Column("act", sa.String(100), nullable=False),
        sa.Column("about", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_administration"),
    )


def downgrade() -> None:
    """Back."""
    op.drop_table("administration")
    with op.batch_alter_table("tenants") as batch:
        batch.drop_constraint("uq_tenants_identity_group", type_="unique")
        batch.drop_column("identity_group")
    with op.batch_alter_table("scopes") as batch:
        batch.drop_column("everyone")
