"""What a job says of a request once it runs by its plan, and which tenants want the names of their ops stored.

Also of which space of plans a certificate is, what plain training needs for a graph, and of whose request a worker's
log speaks.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Forwards; no tenant stores names until it is told to."""
    op.create_table(
        "attachments",
        sa.Column("request_id", sa.String(32), nullable=False),
        sa.Column("kind", sa.String(10), nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.Column("size_bytes", sa.Integer, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["request_id"], ["requests.id"], name="fk_attachments_request_id_requests", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("request_id", "kind", name="pk_attachments"),
    )
    op.add_column("tenants", sa.Column("store_names", sa.Boolean, nullable=False, server_default=sa.text("false")))
    op.add_column("proofs", sa.Column("restricted_to", sa.String(400), nullable=False, server_default=""))
    op.add_column("graphs", sa.Column("plain_peak_bytes", sa.BigInteger))
    op.add_column("solves", sa.Column("asked_by", sa.JSON))


def downgrade() -> None:
    """Back, without certificates of restricted spaces."""
    op.drop_column("solves", "asked_by")
    op.drop_column("graphs", "plain_peak_bytes")
    op.execute("DELETE FROM proofs WHERE restricted_to <> ''")
    op.drop_column("proofs", "restricted_to")
    op.drop_column("tenants", "store_names")
    op.drop_table("attachments")
