"""How Alembic runs a migration: always on a connection that the service hands in."""

from __future__ import annotations

from alembic import context

from remat_service.storage.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True, compare_type=True)
with context.begin_transaction():
    context.run_migrations()
