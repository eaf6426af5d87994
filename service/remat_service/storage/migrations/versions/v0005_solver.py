"""Plans say which version of the solver found them, so that those of a bad one can be purged."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Forwards."""
    with op.batch_alter_table("plans") as batch:
        batch.add_column(sa.Column("solver", sa.String(50), server_default="", nullable=False))


def downgrade() -> None:
    """Back."""
    with op.batch_alter_table("plans") as batch:
        batch.drop_column("solver")
