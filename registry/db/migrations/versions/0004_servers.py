"""Servers that share the database."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Apply."""
    ordered = sa.String(64).with_variant(sa.String(64, collation="C"), "postgresql")
    op.create_table(
        "servers",
        sa.Column("name", ordered, nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("boot_id", sa.String(64), nullable=False),
        sa.Column("url", sa.String(255), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("base", sa.String(80), nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("seen_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_servers"),
    )
    op.create_index("ix_servers_seen_at", "servers", ["seen_at"])
