"""Counts of requests by time to the first token and place of their adapter; sums by adapter. Made of what is there."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_HOUR_US = 3_600_000_000
_BOUNDS_S = tuple(round(0.001 * 10 ** (number / 20), 9) for number in range(121))
_BY_KEY = {"sqlite_with_rowid": False}
_SHARED = ("tenant_id", "adapter_id", "adapter_version", "key_id", "adapter_state")


def upgrade() -> None:
    """Make the tables and fill them; let SQLite keep sums in the order of their keys."""
    op.drop_index(op.f("ix_usage_rollups_adapter_id"), "usage_rollups")
    with op.batch_alter_table("usage_rollups", table_kwargs=_BY_KEY) as rollups:
        rollups.alter_column("requests", existing_type=sa.BigInteger(), existing_nullable=False)  # makes it anew
    _make_latency()
    _make_adapters()


def _make_adapters() -> None:
    sums = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "last_at")
    op.create_table(
        "usage_adapters",
        sa.Column("adapter_id", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in sums),
        sa.PrimaryKeyConstraint("adapter_id", "key_id", name=op.f("pk_usage_adapters")),
        **_BY_KEY,
    )
    op.execute(
        "INSERT INTO usage_adapters "
        "(adapter_id, key_id, requests, prompt_tokens, cached_tokens, completion_tokens, last_at) "
        "SELECT adapter_id, key_id, sum(requests), sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens), "
        "max(last_at) FROM usage_rollups WHERE adapter_id <> '' GROUP BY adapter_id, key_id"
    )


def _make_latency() -> None:
    text = sa.String(length=64).with_variant(sa.String(length=64, collation="C"), "postgresql")
    counts = op.create_table(
        "usage_latency",
        sa.Column("at", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("tenant_id", text, nullable=False),
        sa.Column("adapter_id", text, nullable=False),
        sa.Column("adapter_version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("key_id", text, nullable=False),
        sa.Column("adapter_state", sa.String(length=16), nullable=False),
        sa.Column("bin", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("adapter", sa.String(length=127), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("at", *_SHARED, "bin", name=op.f("pk_usage_latency")),
        **_BY_KEY,
    )
    op.execute(counts.insert().from_select(["at", *_SHARED, "bin", "tenant", "adapter", "requests"], _counted()))


def _counted() -> sa.Select[tuple[object, ...]]:
    names = ("at", *_SHARED, "tenant", "adapter")
    events = sa.table("usage_events", *(sa.column(name) for name in names), sa.column("ttft_s", sa.Float()))
    seconds, at = events.c.ttft_s, sa.cast(events.c.at, sa.BigInteger)
    bounds = ((seconds < bound, number) for number, bound in enumerate(_BOUNDS_S))
    bin_of = sa.case((seconds.is_(None), -1), *bounds, else_=len(_BOUNDS_S))
    hour = at - at % sa.literal(_HOUR_US, sa.BigInteger)
    # Bins are named in a query of their own: PostgreSQL takes no two expressions with parameters for the same.
    binned = sa.select(
        hour.label("hour"), *(events.c[name] for name in (*_SHARED, "tenant", "adapter")), bin_of.label("bin")
    ).subquery()
    keys = [binned.c.hour, *(binned.c[name] for name in _SHARED), binned.c.bin]
    return sa.select(*keys, sa.func.min(binned.c.tenant), sa.func.min(binned.c.adapter), sa.func.count()).group_by(
        *keys
    )
