"""What a request is called in lists, where its client says so."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Forwards."""
    with op.batch_alter_table("requests") as batch:
        batch.add_column(sa.Column("name", sa.String(100), nullable=True))


def downgrade() -> None:
    """Back."""
    with op.batch_alter_table("requests") as batch:
        batch.drop_column("name")
