"""On how many servers an adapter is pinned; those pinned before are pinned on one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Apply."""
    op.add_column(
        "adapters", sa.Column("pinned_copies", sa.Integer, nullable=False, server_default="0")
    )
    op.execute("UPDATE adapters SET pinned_copies = 1 WHERE pinned")
    op.drop_column("adapters", "pinned")
