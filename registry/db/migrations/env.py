"""Run by Alembic: applies the revisions to the connection that `upgrade` was given."""

from __future__ import annotations

from alembic import context

from manylora.registry.db.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    transactional_ddl=True,
    render_as_batch=True,
)
context.run_migrations()
