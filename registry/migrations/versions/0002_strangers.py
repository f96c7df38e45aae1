"""Limits of keys, grants of single versions, weighted aliases, resumable uploads, reports, usage by status."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_COMPARED = (
    ("tenants", "name", 63),
    ("adapters", "name", 63),
    ("adapter_aliases", "alias", 63),
    *((table, column, 64) for table in ("usage_events", "usage_rollups") for column in ("tenant_id", "adapter_id")),
    *((table, column, 64) for table in ("usage_events", "usage_rollups") for column in ("key_id", "status")),
)
"""Texts by which lists are ordered and paged: by their bytes, whatever the database's language."""


def upgrade() -> None:
    """Change the tables, keeping what is in them."""
    op.add_column("api_keys", sa.Column("limits", sa.JSON(), nullable=False, server_default="{}"))
    op.add_column("api_keys", sa.Column("previous_prefix", sa.String(length=32), nullable=True))
    op.add_column("api_keys", sa.Column("previous_digest", sa.String(length=64), nullable=True))
    op.add_column("api_keys", sa.Column("previous_until", sa.BigInteger(), nullable=True))
    op.create_index(op.f("ix_api_keys_previous_prefix"), "api_keys", ["previous_prefix"], unique=False)
    op.add_column("adapter_versions", sa.Column("report", sa.JSON(), nullable=False, server_default="{}"))
    with op.batch_alter_table("adapter_grants") as grants:
        grants.add_column(sa.Column("version", sa.Integer(), nullable=False, server_default="0"))
        grants.drop_constraint("pk_adapter_grants", type_="primary")
        grants.create_primary_key("pk_adapter_grants", ["adapter_id", "tenant_id", "version"])
    with op.batch_alter_table("adapter_aliases") as aliases:
        aliases.add_column(sa.Column("weight", sa.Integer(), nullable=False, server_default="1"))
        aliases.drop_constraint("pk_adapter_aliases", type_="primary")
        aliases.create_primary_key("pk_adapter_aliases", ["adapter_id", "alias", "version"])
    _make_uploads()
    _add_status_to_rollups()
    if op.get_bind().dialect.name == "postgresql":
        for table, column, length in _COMPARED:
            op.alter_column(table, column, type_=sa.String(length, collation="C"))


def _make_uploads() -> None:
    op.create_table(
        "uploads",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("activate", sa.Boolean(), nullable=False),
        sa.Column("manifest", sa.JSON(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("result", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_uploads_tenant_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_uploads")),
    )
    op.create_index(op.f("ix_uploads_tenant_id"), "uploads", ["tenant_id"], unique=False)
    op.create_index(op.f("ix_uploads_expires_at"), "uploads", ["expires_at"], unique=False)


def _add_status_to_rollups() -> None:
    with op.batch_alter_table("usage_rollups") as rollups:
        rollups.add_column(sa.Column("status", sa.String(length=64), nullable=False, server_default=""))
        rollups.drop_constraint("pk_usage_rollups", type_="primary")
        rollups.create_primary_key(
            "pk_usage_rollups", ["at", "tenant_id", "adapter_id", "adapter_version", "key_id", "status"]
        )
    op.execute(sa.text("DELETE FROM usage_rollups"))
    keys = "tenant_id, adapter_id, adapter_version, key_id, status"
    op.execute(
        sa.text(
            "INSERT INTO usage_rollups (at, tenant_id, adapter_id, adapter_version, key_id, status, tenant, adapter, "  # noqa: S608 - constants
            "requests, prompt_tokens, cached_tokens, completion_tokens, last_at) "
            f"SELECT at - at % 3600000000, {keys}, min(tenant), min(adapter), count(*), sum(prompt_tokens), "
            "sum(cached_tokens), sum(completion_tokens), max(at) FROM usage_events "
            f"GROUP BY at - at % 3600000000, {keys}"
        )
    )
