"""Who has pinned which plan, and for which problem: a tenant takes back its own pins alone."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """Forwards; a plan that was pinned before is nobody's, and stays pinned until somebody unpins it."""
    op.create_table(
        "pins",
        sa.Column("plan_id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("problem_key", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(["plan_id"], ["plans.id"], name="fk_pins_plan_id_plans", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_pins_tenant_id_tenants", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("plan_id", "tenant_id", "problem_key", name="pk_pins"),
    )
    op.create_index("ix_pins_problem_key", "pins", ["problem_key"])


def downgrade() -> None:
    """Back."""
    op.drop_table("pins")
