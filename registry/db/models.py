"""The tables.

A `Moment` is stored as whole microseconds since 1970 (UTC). The usage tables have no NULL for "none" but the empty text
or 0: a NULL equals nothing and would split a sum. Usage and audit log refer to no other table: they stay when tenants,
keys and adapters are deleted.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedSQLExpression,
    column_property,
    mapped_column,
)

from manylora.registry.db.clock import from_micros, to_micros


class Moment(sa.TypeDecorator[datetime]):
    """A moment with a timezone; in the database microseconds since 1970."""

    impl = sa.BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, _dialect: sa.Dialect) -> int | None:
        """To the database."""
        return None if value is None else to_micros(value)

    def process_result_value(self, value: int | None, _dialect: sa.Dialect) -> datetime | None:
        """From the database, in UTC."""
        return None if value is None else from_micros(value)


class Base(DeclarativeBase):
    """Names every constraint: a migration needs the name to change one."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {
        int: sa.BigInteger,
        float: sa.Float,
        datetime: Moment,
        dict[str, Any]: sa.JSON,
        dict[str, str]: sa.JSON,
        list[str]: sa.JSON,
    }
    metadata = sa.MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


BY_KEY = {"sqlite_with_rowid": False}
"""SQLite keeps the rows in the order of their primary key: a range of hours is one piece of the file."""


def _ordered(length: int) -> sa.String:
    """Text that listings are ordered by: compared byte by byte, whatever the locale of the database."""
    return sa.String(length).with_variant(sa.String(length, collation="C"), "postgresql")


class TenantRow(Base):
    """One customer, whose objects nobody else sees."""

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    name: Mapped[str] = mapped_column(_ordered(63), unique=True)
    limits: Mapped[dict[str, Any]]
    """By name, those that are set."""
    created_at: Mapped[datetime]
    weight: Mapped[float] = mapped_column(server_default="1")
    """Its part of the engine, beside those of the other tenants with requests."""


def _tenant_name(tenant_id: Mapped[str]) -> MappedSQLExpression[str]:
    """The name of the tenant with this id, read with each row. Give a new row the name when you make it."""
    name = sa.select(TenantRow.name).where(TenantRow.id == tenant_id).correlate_except(TenantRow)
    return column_property(name.scalar_subquery(), expire_on_flush=False)


class KeyRow(Base):
    """A key; revoked ones stay as tombstones until their tenant goes."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(
        sa.ForeignKey("tenants.id", ondelete="CASCADE"), index=True
    )
    tenant: Mapped[str] = _tenant_name(tenant_id)
    name: Mapped[str | None] = mapped_column(sa.String(255))
    prefix: Mapped[str] = mapped_column(sa.String(32), unique=True)
    """The start of the secret, which shows people which key it is: `manylora_3f9c0a...`."""
    digest: Mapped[str] = mapped_column(sa.String(64))
    """HMAC-SHA256 of the whole secret, 64 hex digits."""
    scopes: Mapped[list[str]]
    expires_at: Mapped[datetime | None]
    created_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]
    limits: Mapped[dict[str, Any]] = mapped_column(server_default="{}")
    previous_prefix: Mapped[str | None] = mapped_column(sa.String(32), index=True)
    """Of the secret before the last rotation, which works until `previous_until`."""
    previous_digest: Mapped[str | None] = mapped_column(sa.String(64))
    previous_until: Mapped[datetime | None]


class SessionRow(Base):
    """A browser's session, or a link that begins one; worth what the key is that it was made with."""

    __tablename__ = "sessions"

    digest: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    """HMAC-SHA256 of the token, 64 hex digits."""
    kind: Mapped[str] = mapped_column(sa.String(16))
    """session or link."""
    key_prefix: Mapped[str] = mapped_column(sa.String(32))
    """Of the secret it stands for; empty for the admin key."""
    key_digest: Mapped[str] = mapped_column(sa.String(64))
    expires_at: Mapped[datetime] = mapped_column(index=True)


class AdapterRow(Base):
    """An adapter; its weights are those of its versions."""

    __tablename__ = "adapters"
    __table_args__ = (sa.UniqueConstraint("tenant_id", "name"),)

    id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(sa.ForeignKey("tenants.id", ondelete="CASCADE"))
    tenant: Mapped[str] = _tenant_name(tenant_id)
    name: Mapped[str] = mapped_column(_ordered(63), index=True)
    description: Mapped[str | None] = mapped_column(sa.Text)
    pinned_copies: Mapped[int] = mapped_column(sa.Integer, server_default="0")
    """On how many servers it stays on the device; 0 is not pinned."""
    next_version: Mapped[int] = mapped_column(sa.Integer)
    """Only ever grows: a version number is never given twice."""
    created_at: Mapped[datetime]


class VersionRow(Base):
    """One immutable upload."""

    __tablename__ = "adapter_versions"
    __table_args__ = (sa.UniqueConstraint("adapter_id", "digest"),)

    adapter_id: Mapped[str] = mapped_column(
        sa.ForeignKey("adapters.id", ondelete="CASCADE"), primary_key=True
    )
    version: Mapped[int] = mapped_column(sa.Integer, primary_key=True, autoincrement=False)
    digest: Mapped[str] = mapped_column(sa.String(71), index=True)
    weights_sha256: Mapped[str] = mapped_column(sa.String(64), index=True)
    spec: Mapped[dict[str, Any]]
    rank: Mapped[int] = mapped_column(sa.Integer)
    target_modules: Mapped[list[str]]
    applied: Mapped[int] = mapped_column(sa.Integer)
    total: Mapped[int] = mapped_column(sa.Integer)
    parameters: Mapped[int]
    size_bytes: Mapped[int]
    peft_version: Mapped[str | None] = mapped_column(sa.String(64))
    created_at: Mapped[datetime]
    report: Mapped[dict[str, Any]] = mapped_column(server_default="{}")
    """What the check noticed, in the form in which clients see it."""
    held_by: Mapped[str | None] = mapped_column(sa.String(64), index=True)
    """Of an ephemeral version: the server that has its weights in memory. Null: they are in the blob store."""
    expires_at: Mapped[datetime | None] = mapped_column(index=True)
    """Of an ephemeral version, if its time is limited."""


class AliasRow(Base):
    """A name for a version, or for several by weight; goes with its versions."""

    __tablename__ = "adapter_aliases"
    __table_args__ = (
        sa.ForeignKeyConstraint(
            ["adapter_id", "version"],
            ["adapter_versions.adapter_id", "adapter_versions.version"],
            ondelete="CASCADE",
        ),
    )

    adapter_id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    alias: Mapped[str] = mapped_column(_ordered(63), primary_key=True)
    version: Mapped[int] = mapped_column(sa.Integer, primary_key=True, autoincrement=False)
    weight: Mapped[int] = mapped_column(sa.Integer, server_default="1")
    """The version's share of the requests is its part of the alias's sum."""


class GrantRow(Base):
    """Another tenant that may call an adapter, or one version of it."""

    __tablename__ = "adapter_grants"

    adapter_id: Mapped[str] = mapped_column(
        sa.ForeignKey("adapters.id", ondelete="CASCADE"), primary_key=True
    )
    tenant_id: Mapped[str] = mapped_column(
        sa.ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True, index=True
    )
    tenant: Mapped[str] = _tenant_name(tenant_id)
    version: Mapped[int] = mapped_column(
        sa.Integer, primary_key=True, autoincrement=False, server_default="0"
    )
    """0 means every version."""
    created_at: Mapped[datetime]


class UploadRow(Base):
    """An upload in pieces: announced, and not yet an adapter version."""

    __tablename__ = "uploads"

    id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(
        sa.ForeignKey("tenants.id", ondelete="CASCADE"), index=True
    )
    tenant: Mapped[str] = _tenant_name(tenant_id)
    key_id: Mapped[str] = mapped_column(sa.String(64))
    name: Mapped[str] = mapped_column(sa.String(63))
    description: Mapped[str | None] = mapped_column(sa.Text)
    activate: Mapped[bool]
    manifest: Mapped[dict[str, Any]]
    """File name to its size in bytes and its SHA-256."""
    size_bytes: Mapped[int]
    """What it reserves of its tenant's storage."""
    state: Mapped[str] = mapped_column(sa.String(16))
    """uploading, ready or rejected."""
    result: Mapped[dict[str, Any] | None]
    """How it ended: the error, or which version it became."""
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime] = mapped_column(index=True)


class UsageEventRow(Base):
    """One billable fact, under its ledger id."""

    __tablename__ = "usage_events"
    __table_args__ = (sa.Index("ix_usage_events_tenant_id_at", "tenant_id", "at"),)

    id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    at: Mapped[int] = mapped_column(index=True)
    tenant_id: Mapped[str] = mapped_column(_ordered(64))
    tenant: Mapped[str] = mapped_column(sa.String(63))
    key_id: Mapped[str] = mapped_column(_ordered(64))
    adapter_id: Mapped[str] = mapped_column(_ordered(64))
    adapter: Mapped[str] = mapped_column(sa.String(127))
    adapter_version: Mapped[int] = mapped_column(sa.Integer)
    adapter_digest: Mapped[str] = mapped_column(sa.String(71))
    request_id: Mapped[str] = mapped_column(sa.String(256))
    endpoint: Mapped[str] = mapped_column(sa.String(64))
    status: Mapped[str] = mapped_column(_ordered(64))
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    queue_s: Mapped[float | None]
    ttft_s: Mapped[float | None]
    duration_s: Mapped[float | None]
    adapter_state: Mapped[str] = mapped_column(sa.String(16))
    service_class: Mapped[str] = mapped_column(_ordered(16), server_default="interactive")


class _OfHour:
    """What rows of sums by hour are about; these columns are the first of the primary key."""

    __table_args__ = BY_KEY

    at: Mapped[int] = mapped_column(primary_key=True, sort_order=-1, autoincrement=False)
    """The hour's first microsecond."""
    tenant_id: Mapped[str] = mapped_column(_ordered(64), primary_key=True, sort_order=-1)
    adapter_id: Mapped[str] = mapped_column(_ordered(64), primary_key=True, sort_order=-1)
    adapter_version: Mapped[int] = mapped_column(
        sa.Integer, primary_key=True, sort_order=-1, autoincrement=False
    )
    key_id: Mapped[str] = mapped_column(_ordered(64), primary_key=True, sort_order=-1)
    tenant: Mapped[str] = mapped_column(sa.String(63))
    adapter: Mapped[str] = mapped_column(sa.String(127))


class _Sums:
    """What rows of sums hold; written in the transaction that inserts the events."""

    requests: Mapped[int]
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    last_at: Mapped[int]
    """When the latest event ended, in microseconds since 1970."""


class UsageRollupRow(_OfHour, _Sums, Base):
    """Sums of one hour."""

    __tablename__ = "usage_rollups"

    status: Mapped[str] = mapped_column(_ordered(64), primary_key=True, server_default="")
    service_class: Mapped[str] = mapped_column(
        _ordered(16), primary_key=True, server_default="interactive"
    )


class UsageLatencyRow(_OfHour, Base):
    """Requests of one hour by their time to the first token; written in the transaction that inserts the events.

    Lines of batches do not count: nobody waits for them.
    """

    __tablename__ = "usage_latency"

    adapter_state: Mapped[str] = mapped_column(sa.String(16), primary_key=True)
    bin: Mapped[int] = mapped_column(sa.Integer, primary_key=True, autoincrement=False)
    """A bin of `latency.BOUNDS_S`."""
    requests: Mapped[int]


class UsageAdapterRow(_Sums, Base):
    """Sums of all hours of an adapter and a key."""

    __tablename__ = "usage_adapters"
    __table_args__ = BY_KEY

    adapter_id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    key_id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)


class UsageMonthRow(Base):
    """Tokens of a calendar month (UTC) of a tenant and a key: what limits per month are compared with."""

    __tablename__ = "usage_months"
    __table_args__ = BY_KEY

    month: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The month's first microsecond."""
    tenant_id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    key_id: Mapped[str] = mapped_column(sa.String(64), primary_key=True, index=True)
    prompt_tokens: Mapped[int]
    completion_tokens: Mapped[int]


class LimitBucketRow(Base):
    """What all servers together have taken of a limit per minute. It drains at a sixtieth of the limit per second."""

    __tablename__ = "limit_buckets"

    holder_id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    """A tenant or a key."""
    kind: Mapped[str] = mapped_column(sa.String(32), primary_key=True)
    used: Mapped[float]
    """At the moment `at`; what servers hold counts as used."""
    at: Mapped[int]
    """Microseconds since 1970 by the database's clock."""
    returned: Mapped[float]
    """All that was ever given back: `used + returned` falls only as the bucket drains."""


class LimitLeaseRow(Base):
    """What one server holds of a limit."""

    __tablename__ = "limit_leases"

    holder_id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    kind: Mapped[str] = mapped_column(sa.String(32), primary_key=True)
    owner: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    """The server's name."""
    amount: Mapped[int]
    until: Mapped[int]
    """When it no longer counts, unless its owner renews it before: microseconds by the database's clock."""


class IdempotencyRow(Base):
    """A change that a client may send again under the same key, and what it was answered."""

    __tablename__ = "idempotency_keys"

    tenant_id: Mapped[str] = mapped_column(
        sa.ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True
    )
    key: Mapped[str] = mapped_column(sa.String(255), primary_key=True)
    body_digest: Mapped[str] = mapped_column(sa.String(64))
    status: Mapped[int] = mapped_column(sa.Integer)
    response: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(index=True)


class AuditRow(Base):
    """One change of what exists."""

    __tablename__ = "audit_log"

    id: Mapped[int] = mapped_column(
        sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True
    )
    at: Mapped[datetime]
    actor: Mapped[str] = mapped_column(sa.String(64))
    """A key id, or `admin`."""
    action: Mapped[str] = mapped_column(sa.String(64))
    """`tenant.create`, `adapter.publish` and so on."""
    tenant: Mapped[str] = mapped_column(sa.String(63))
    """Name of the tenant whose object changed."""
    target: Mapped[str] = mapped_column(sa.String(255))
    """What changed: a name, `name@version` or a key id."""
    detail: Mapped[dict[str, Any]]


class FileRow(Base):
    """A file of a tenant: requests of a batch, or results. Its bytes are a blob. Times are seconds since 1970."""

    __tablename__ = "files"

    id: Mapped[str] = mapped_column(_ordered(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(
        sa.ForeignKey("tenants.id", ondelete="CASCADE"), index=True
    )
    filename: Mapped[str] = mapped_column(sa.String(255))
    purpose: Mapped[str] = mapped_column(sa.String(16))
    """batch or batch_output."""
    size_bytes: Mapped[int]
    sha256: Mapped[str] = mapped_column(sa.String(64), index=True)
    created_at: Mapped[int]
    expires_at: Mapped[int] = mapped_column(index=True)


class BatchRow(Base):
    """A batch, and which server runs it. Times are seconds since 1970."""

    __tablename__ = "batches"

    id: Mapped[str] = mapped_column(_ordered(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(
        sa.ForeignKey("tenants.id", ondelete="CASCADE"), index=True
    )
    key_id: Mapped[str] = mapped_column(sa.String(64))
    """The key that made it, for which its lines run; empty for the admin key."""
    endpoint: Mapped[str] = mapped_column(sa.String(64))
    input_file_id: Mapped[str] = mapped_column(sa.String(64))
    input_sha256: Mapped[str] = mapped_column(sa.String(64))
    output_file_id: Mapped[str | None] = mapped_column(sa.String(64))
    error_file_id: Mapped[str | None] = mapped_column(sa.String(64))
    labels: Mapped[dict[str, str] | None]
    """The client's `metadata`."""
    errors: Mapped[dict[str, Any] | None]
    """What is wrong with its input, as a list in OpenAI's shape."""
    total: Mapped[int] = mapped_column(sa.Integer, default=0)
    completed: Mapped[int] = mapped_column(sa.Integer, default=0)
    failed: Mapped[int] = mapped_column(sa.Integer, default=0)
    status: Mapped[str] = mapped_column(sa.String(16), index=True)
    created_at: Mapped[int]
    expires_at: Mapped[int]
    in_progress_at: Mapped[int | None]
    finalizing_at: Mapped[int | None]
    completed_at: Mapped[int | None]
    failed_at: Mapped[int | None]
    expired_at: Mapped[int | None]
    cancelling_at: Mapped[int | None]
    cancelled_at: Mapped[int | None]
    owner: Mapped[str] = mapped_column(sa.String(64), default="")
    """The server that runs it; empty for none."""
    lease_until: Mapped[int] = mapped_column(default=0)
    """When another server may take it over, unless its owner says before that it goes on."""

    @property
    def request_counts(self) -> dict[str, int]:
        """Lines: all, and those that ended well or not."""
        return {"total": self.total, "completed": self.completed, "failed": self.failed}


class BatchResultRow(Base):
    """The result of one line, until the batch ends and all of them become files; written with its usage event."""

    __tablename__ = "batch_results"

    batch_id: Mapped[str] = mapped_column(
        _ordered(64), sa.ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True
    )
    line: Mapped[int] = mapped_column(sa.Integer, primary_key=True, autoincrement=False)
    is_error: Mapped[bool]
    result: Mapped[str] = mapped_column(sa.Text)
    """A line of the output file or the error file."""


class ServerRow(Base):
    """A server over this database, as it last said."""

    __tablename__ = "servers"

    name: Mapped[str] = mapped_column(_ordered(64), primary_key=True)
    role: Mapped[str] = mapped_column(sa.String(16))
    boot_id: Mapped[str] = mapped_column(sa.String(64))
    url: Mapped[str] = mapped_column(sa.String(255))
    state: Mapped[str] = mapped_column(sa.String(16))
    model: Mapped[str] = mapped_column(sa.String(255))
    base: Mapped[str] = mapped_column(sa.String(80))
    version: Mapped[str] = mapped_column(sa.String(64))
    seen_at: Mapped[datetime] = mapped_column(index=True)
