"""Limits that servers share: buckets, leases, and tokens by month, counted from the sums by hour."""

from __future__ import annotations

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

from manylora.registry.db.clock import from_micros, month_after, month_of, to_micros

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "usage_months",
        sa.Column("month", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("tenant_id", sa.String(64), primary_key=True),
        sa.Column("key_id", sa.String(64), primary_key=True),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_usage_months_key_id", "usage_months", ["key_id"])
    op.create_table(
        "limit_buckets",
        sa.Column("holder_id", sa.String(64), primary_key=True),
        sa.Column("kind", sa.String(32), primary_key=True),
        sa.Column("used", sa.Float, nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("returned", sa.Float, nullable=False),
    )
    op.create_table(
        "limit_leases",
        sa.Column("holder_id", sa.String(64), primary_key=True),
        sa.Column("kind", sa.String(32), primary_key=True),
        sa.Column("owner", sa.String(64), primary_key=True),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.Column("until", sa.BigInteger, nullable=False),
    )
    first, last = op.get_bind().execute(sa.text("SELECT MIN(at), MAX(at) FROM usage_rollups")).one()
    if first is not None:
        _count_months(month_of(from_micros(first)), from_micros(last))


def _count_months(month: datetime, last: datetime) -> None:
    """Fill `usage_months` from the month with the first event to that with the last."""
    count = sa.text(
        "INSERT INTO usage_months SELECT CAST(:month AS BIGINT), tenant_id, key_id, SUM(prompt_tokens), "
        "SUM(completion_tokens) FROM usage_rollups WHERE at >= :month AND at < :after GROUP BY tenant_id, key_id"
    )
    while month <= last.astimezone(UTC):
        op.get_bind().execute(
            count, {"month": to_micros(month), "after": to_micros(month_after(month))}
        )
        month = month_after(month)
