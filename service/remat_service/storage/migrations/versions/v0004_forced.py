"""Solves that were forced start from nothing that is stored."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Forwards."""
    with op.batch_alter_table("solves") as batch:
        batch.add_column(sa.Column("forced", sa.Boolean(), server_default=sa.text("false"), nullable=False))


def downgrade() -> None:
    """Back."""
    with op.batch_alter_table("solves") as batch:
        batch.drop_column("forced")
