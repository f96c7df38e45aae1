"""The PEFT that saved an adapter version; versions from before have none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Apply."""
    op.add_column("adapter_versions", sa.Column("peft_version", sa.String(64), nullable=True))
