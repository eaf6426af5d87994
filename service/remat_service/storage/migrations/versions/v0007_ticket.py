"""A running solve names the queue's job under which it runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Forwards."""
    with op.batch_alter_table("solves") as batch:
        batch.add_column(sa.Column("ticket", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    """Back."""
    with op.batch_alter_table("solves") as batch:
        batch.drop_column("ticket")
