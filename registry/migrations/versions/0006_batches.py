"""Files, batches and results of their lines; usage by what a request was: interactive, or a line of a batch."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_ID = sa.String(length=64).with_variant(sa.String(length=64, collation="C"), "postgresql")
_CLASS = sa.String(length=16).with_variant(sa.String(length=16, collation="C"), "postgresql")
_CLASS_KEYS = ["at", "tenant_id", "adapter_id", "adapter_version", "key_id", "status", "service_class"]


def upgrade() -> None:
    """Add the tables and the columns; all that was used until now was interactive."""
    op.add_column("usage_events", sa.Column("service_class", _CLASS, nullable=False, server_default="interactive"))
    with op.batch_alter_table("usage_rollups", table_kwargs={"sqlite_with_rowid": False}) as rollups:
        rollups.add_column(sa.Column("service_class", _CLASS, nullable=False, server_default="interactive"))
        rollups.drop_constraint("pk_usage_rollups", type_="primary")
        rollups.create_primary_key("pk_usage_rollups", _CLASS_KEYS)
    _make_files()
    _make_batches()


def _make_files() -> None:
    op.create_table(
        "files",
        sa.Column("id", _ID, nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("filename", sa.String(length=255), nullable=False),
        sa.Column("purpose", sa.String(length=16), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_files_tenant_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    for column in ("tenant_id", "sha256", "expires_at"):
        op.create_index(op.f(f"ix_files_{column}"), "files", [column], unique=False)


def _make_batches() -> None:
    texts = {"key_id": 64, "endpoint": 64, "input_file_id": 64, "input_sha256": 64, "status": 16, "owner": 64}
    numbers = {name: sa.Integer() for name in ("total", "completed", "failed")}
    numbers |= {name: sa.BigInteger() for name in ("created_at", "expires_at", "lease_until")}
    steps = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    op.create_table(
        "batches",
        sa.Column("id", _ID, nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        *(sa.Column(name, sa.String(length=length), nullable=False) for name, length in texts.items()),
        *(sa.Column(name, kind, nullable=False) for name, kind in numbers.items()),
        *(sa.Column(name, sa.String(length=64)) for name in ("output_file_id", "error_file_id")),
        *(sa.Column(name, sa.JSON()) for name in ("labels", "errors")),
        *(sa.Column(f"{name}_at", sa.BigInteger()) for name in steps),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_batches_tenant_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    for column in ("tenant_id", "status"):
        op.create_index(op.f(f"ix_batches_{column}"), "batches", [column], unique=False)
    op.create_table(
        "batch_results",
        sa.Column("batch_id", _ID, nullable=False),
        sa.Column("line", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("is_error", sa.Boolean(), nullable=False),
        sa.Column("result", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name=op.f("fk_batch_results_batch_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("batch_id", "line", name=op.f("pk_batch_results")),
    )
