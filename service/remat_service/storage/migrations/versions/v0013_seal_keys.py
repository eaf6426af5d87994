"""Which keys have sealed the store, so that another one is noticed before anything is read or written with it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Forwards."""
    op.create_table(
        "seal_keys",
        sa.Column("seal", sa.String(64), nullable=False),
        sa.Column("signs", sa.Boolean(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("seal", name="pk_seal_keys"),
    )


def downgrade() -> None:
    """Back."""
    op.drop_table("seal_keys")
