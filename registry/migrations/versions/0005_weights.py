"""A tenant's weight: its part of the engine beside other tenants."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Give every tenant the same weight."""
    op.add_column("tenants", sa.Column("weight", sa.Float(), nullable=False, server_default="1"))
