"""Certificates, and seals on what has none. What was stored without a seal is not believed: it is found out anew."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

_SEALED = ("bounds", "floors", "efforts", "solves", "requests", "profiles", "profile_reports")
_MORE: dict[str, tuple[tuple[str, Any], ...]] = {
    "bounds": (("source", sa.String(100)),),
    "solves": (("peak_bytes", sa.BigInteger()), ("total_cost_ns", sa.BigInteger())),
    "requests": (("proof_id", sa.String(32)),),
}


def upgrade() -> None:
    """Forwards."""
    for table in _SEALED:
        with op.batch_alter_table(table) as batch:
            batch.add_column(sa.Column("seal", sa.String(64), nullable=True))
            for name, kind in _MORE.get(table, ()):
                batch.add_column(sa.Column(name, kind, nullable=True))
    op.create_table(
        "proofs",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("graph_key", sa.String(64), nullable=False),
        sa.Column("budget_bytes", sa.BigInteger(), nullable=False),
        sa.Column("bound_ns", sa.BigInteger(), nullable=True),
        sa.Column("solver", sa.String(50), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column("checksum", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["graph_key"], ["graphs.key"], name="fk_proofs_graph_key_graphs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_proofs"),
        sa.UniqueConstraint("graph_key", "budget_bytes", "checksum", name="uq_proofs_graph_key_budget_bytes_checksum"),
    )
    op.create_index("ix_proofs_graph_key_bound_ns", "proofs", ["graph_key", "bound_ns"])


def downgrade() -> None:
    """Back."""
    op.drop_table("proofs")
    for table in _SEALED:
        with op.batch_alter_table(table) as batch:
            batch.drop_column("seal")
            for name, _ in _MORE.get(table, ()):
                batch.drop_column(name)
