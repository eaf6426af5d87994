"""Requests carry the epoch that they were asked in, so that raising it hides what was answered before."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Forwards; requests that are there already have none until their scope is disowned."""
    with op.batch_alter_table("requests") as batch:
        batch.add_column(sa.Column("epoch", sa.Integer(), nullable=True))


def downgrade() -> None:
    """Back."""
    with op.batch_alter_table("requests") as batch:
        batch.drop_column("epoch")
