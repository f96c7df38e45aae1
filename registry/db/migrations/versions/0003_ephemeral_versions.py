"""Versions whose weights are in the memory of one server; those from before are all in the blob store."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Apply."""
    op.add_column("adapter_versions", sa.Column("held_by", sa.String(64), nullable=True))
    op.add_column("adapter_versions", sa.Column("expires_at", sa.BigInteger, nullable=True))
    op.create_index("ix_adapter_versions_held_by", "adapter_versions", ["held_by"])
    op.create_index("ix_adapter_versions_expires_at", "adapter_versions", ["expires_at"])
