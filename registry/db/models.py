"""The tables.

A `Moment` is stored as whole microseconds since 1970 (UTC). The usage tables have no NULL for "none" but the empty text
or 0: a NULL equals nothing and would split a sum. Usage and audit log refer to no other table: they stay when tenants,
keys and adapters are deleted.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedColumn,
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
        """Encode for the database."""
        return None if value is None else to_micros(value)

    def process_result_value(self, value: int | None, _dialect: sa.Dialect) -> datetime | None:
        """Decode from the database, in UTC."""
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


_TEXT64 = sa.String(64).with_variant(sa.String(64, collation="C"), "postgresql")
"""Text that listings may be ordered by: compared byte by byte, whatever the locale of the database."""


def _goes_with(key: str, **options: Any) -> MappedColumn[Any]:  # noqa: ANN401 - of mapped_column
    """The id of a row with which this one is deleted."""
    return mapped_column(sa.ForeignKey(key, ondelete="CASCADE"), **options)


Text64 = Annotated[str, mapped_column(_TEXT64)]
Text255 = Annotated[str, mapped_column(sa.String(255))]
LongText = Annotated[str, mapped_column(sa.Text)]
Int32 = Annotated[int, mapped_column(sa.Integer)]
Id = Annotated[str, mapped_column(_TEXT64, primary_key=True)]
NumberKey = Annotated[int, mapped_column(sa.Integer, primary_key=True, autoincrement=False)]


class TenantRow(Base):
    """One customer, whose objects nobody else sees."""

    __tablename__ = "tenants"

    id: Mapped[Id]
    name: Mapped[Text64] = mapped_column(unique=True)
    limits: Mapped[dict[str, Any]]
    """Limits that are set, by name."""
    created_at: Mapped[datetime]
    weight: Mapped[float]
    """Share of the engine, relative to the weights of other tenants with requests."""


def _tenant_name(tenant_id: Mapped[str]) -> MappedSQLExpression[str]:
    """The name of the tenant with this id, read with each row. Give a new row the name when you make it."""
    name = sa.select(TenantRow.name).where(TenantRow.id == tenant_id).correlate_except(TenantRow)
    return column_property(name.scalar_subquery(), expire_on_flush=False)


class KeyRow(Base):
    """A key; revoked ones stay as tombstones until their tenant goes."""

    __tablename__ = "api_keys"

    id: Mapped[Id]
    tenant_id: Mapped[str] = _goes_with("tenants.id", index=True)
    tenant: Mapped[str] = _tenant_name(tenant_id)
    name: Mapped[Text255 | None]
    prefix: Mapped[Text64] = mapped_column(unique=True)
    """The start of the secret, which shows people which key it is: `manylora_3f9c0a...`."""
    digest: Mapped[Text64]
    """HMAC-SHA256 of the whole secret, 64 hex digits."""
    scopes: Mapped[list[str]]
    expires_at: Mapped[datetime | None]
    created_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]
    limits: Mapped[dict[str, Any]]
    previous_prefix: Mapped[Text64 | None] = mapped_column(index=True)
    """Prefix of the secret before the last rotation, which works until `previous_until`."""
    previous_digest: Mapped[Text64 | None]
    previous_until: Mapped[datetime | None]


class SessionRow(Base):
    """A browser's session, or a link that begins one; worth what the key is that it was made with."""

    __tablename__ = "sessions"

    digest: Mapped[Id]
    """HMAC-SHA256 of the token, 64 hex digits."""
    kind: Mapped[Text64]
    """session or link."""
    key_prefix: Mapped[Text64]
    """Prefix of the secret that it stands for; empty for the admin key."""
    key_digest: Mapped[Text64]
    expires_at: Mapped[datetime] = mapped_column(index=True)


class AdapterRow(Base):
    """An adapter; its weights are those of its versions."""

    __tablename__ = "adapters"
    __table_args__ = (sa.UniqueConstraint("tenant_id", "name"),)

    id: Mapped[Id]
    tenant_id: Mapped[str] = _goes_with("tenants.id")
    tenant: Mapped[str] = _tenant_name(tenant_id)
    name: Mapped[Text64] = mapped_column(index=True)
    description: Mapped[LongText | None]
    pinned_copies: Mapped[Int32]
    """On how many servers it stays on the device; 0 is not pinned."""
    next_version: Mapped[Int32]
    """Only ever grows: a version number is never given twice."""
    created_at: Mapped[datetime]


class VersionRow(Base):
    """One immutable upload."""

    __tablename__ = "adapter_versions"
    __table_args__ = (sa.UniqueConstraint("adapter_id", "digest"),)

    adapter_id: Mapped[str] = _goes_with("adapters.id", primary_key=True)
    version: Mapped[NumberKey]
    digest: Mapped[Text255] = mapped_column(index=True)
    weights_sha256: Mapped[Text64] = mapped_column(index=True)
    spec: Mapped[dict[str, Any]]
    rank: Mapped[Int32]
    target_modules: Mapped[list[str]]
    applied: Mapped[Int32]
    total: Mapped[Int32]
    parameters: Mapped[int]
    size_bytes: Mapped[int]
    peft_version: Mapped[Text64 | None]
    created_at: Mapped[datetime]
    report: Mapped[dict[str, Any]]
    """Report of the check, in the form in which clients see it."""
    held_by: Mapped[Text64 | None] = mapped_column(index=True)
    """Server that has the weights of an ephemeral version in memory; null if they are in the blob store."""
    expires_at: Mapped[datetime | None] = mapped_column(index=True)
    """End of an ephemeral version; null if its time is not limited."""


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

    adapter_id: Mapped[Id]
    alias: Mapped[Text64] = mapped_column(primary_key=True)
    version: Mapped[NumberKey]
    weight: Mapped[Int32]
    """The version's share of the requests is its part of the alias's sum."""


class GrantRow(Base):
    """Another tenant that may call an adapter, or one version of it."""

    __tablename__ = "adapter_grants"

    adapter_id: Mapped[str] = _goes_with("adapters.id", primary_key=True)
    tenant_id: Mapped[str] = _goes_with("tenants.id", primary_key=True, index=True)
    tenant: Mapped[str] = _tenant_name(tenant_id)
    version: Mapped[NumberKey]
    """0 means every version."""
    created_at: Mapped[datetime]


class UploadRow(Base):
    """An upload in pieces: announced, and not yet an adapter version."""

    __tablename__ = "uploads"

    id: Mapped[Id]
    tenant_id: Mapped[str] = _goes_with("tenants.id", index=True)
    tenant: Mapped[str] = _tenant_name(tenant_id)
    name: Mapped[Text64]
    description: Mapped[LongText | None]
    activate: Mapped[bool]
    files: Mapped[dict[str, Any]]
    """File name to its `size` in bytes and its `sha256`, as its sender announced them."""
    size_bytes: Mapped[int]
    """Bytes that it reserves of its tenant's storage."""
    state: Mapped[Text64]
    """uploading, ready or rejected."""
    result: Mapped[dict[str, Any] | None]
    """End of the upload: the error, or the adapter's body."""
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime] = mapped_column(index=True)


class UsageEventRow(Base):
    """One billable fact, under its ledger id."""

    __tablename__ = "usage_events"
    __table_args__ = (sa.Index("ix_usage_events_tenant_id_at", "tenant_id", "at"),)

    id: Mapped[Id]
    at: Mapped[int] = mapped_column(index=True)
    tenant_id: Mapped[Text64]
    tenant: Mapped[Text64]
    key_id: Mapped[Text64]
    adapter_id: Mapped[Text64]
    adapter: Mapped[Text255]
    adapter_version: Mapped[Int32]
    adapter_digest: Mapped[Text255]
    request_id: Mapped[LongText]
    endpoint: Mapped[Text64]
    status: Mapped[Text64]
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    queue_s: Mapped[float | None]
    ttft_s: Mapped[float | None]
    duration_s: Mapped[float | None]
    adapter_state: Mapped[Text64]
    service_class: Mapped[Text64]


class _OfHour:
    """Subject of a row of sums by hour; these columns are the first of the primary key."""

    __table_args__ = BY_KEY

    at: Mapped[int] = mapped_column(primary_key=True, sort_order=-1, autoincrement=False)
    """The hour's first microsecond."""
    tenant_id: Mapped[Text64] = mapped_column(primary_key=True, sort_order=-1)
    adapter_id: Mapped[Text64] = mapped_column(primary_key=True, sort_order=-1)
    adapter_version: Mapped[Int32] = mapped_column(
        primary_key=True, sort_order=-1, autoincrement=False
    )
    key_id: Mapped[Text64] = mapped_column(primary_key=True, sort_order=-1)
    tenant: Mapped[Text64]
    adapter: Mapped[Text255]


class _Sums:
    """Figures of a row of sums; written in the transaction that inserts the events."""

    requests: Mapped[int]
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    completion_tokens: Mapped[int]


class UsageRollupRow(_OfHour, _Sums, Base):
    """Sums of one hour."""

    __tablename__ = "usage_rollups"

    status: Mapped[Text64] = mapped_column(primary_key=True)
    service_class: Mapped[Text64] = mapped_column(primary_key=True)


class UsageLatencyRow(_OfHour, Base):
    """Requests of one hour by their time to the first token; written in the transaction that inserts the events.

    Lines of batches do not count: nobody waits for them.
    """

    __tablename__ = "usage_latency"

    adapter_state: Mapped[Text64] = mapped_column(primary_key=True)
    bin: Mapped[NumberKey]
    """A bin of `latency.BOUNDS_S`."""
    requests: Mapped[int]


class UsageAdapterRow(_Sums, Base):
    """Sums of all hours of an adapter and a key."""

    __tablename__ = "usage_adapters"
    __table_args__ = BY_KEY

    adapter_id: Mapped[Id]
    key_id: Mapped[Id]
    last_at: Mapped[int]
    """End of the latest event, in microseconds since 1970."""


class UsageMonthRow(Base):
    """Tokens of a calendar month (UTC) of a tenant and a key: what limits per month are compared with."""

    __tablename__ = "usage_months"
    __table_args__ = BY_KEY

    month: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The month's first microsecond."""
    tenant_id: Mapped[Id]
    key_id: Mapped[Text64] = mapped_column(primary_key=True, index=True)
    prompt_tokens: Mapped[int]
    completion_tokens: Mapped[int]


class LimitBucketRow(Base):
    """Part of a limit per minute that all servers have taken. It drains at a sixtieth of the limit per second."""

    __tablename__ = "limit_buckets"

    holder_id: Mapped[Id]
    """A tenant or a key."""
    kind: Mapped[Text64] = mapped_column(primary_key=True)
    used: Mapped[float]
    """At the moment `at`; what servers hold counts as used."""
    at: Mapped[int]
    """Microseconds since 1970 by the database's clock."""
    returned: Mapped[float]
    """All that was ever given back: `used + returned` falls only as the bucket drains."""


class LimitAllocationRow(Base):
    """Part of a limit that one server holds."""

    __tablename__ = "limit_allocations"

    holder_id: Mapped[Id]
    kind: Mapped[Text64] = mapped_column(primary_key=True)
    owner: Mapped[Id]
    """The server's name."""
    amount: Mapped[int]
    until: Mapped[int]
    """End of the allocation, unless its owner renews it before: microseconds by the database's clock."""


class IdempotencyRow(Base):
    """A change that a client may send again under the same key, and what it was answered."""

    __tablename__ = "idempotency_keys"

    tenant_id: Mapped[str] = _goes_with("tenants.id", primary_key=True)
    key: Mapped[Text255] = mapped_column(primary_key=True)
    body_digest: Mapped[Text64]
    status: Mapped[Int32]
    response: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(index=True)


class AuditRow(Base):
    """One change of what exists."""

    __tablename__ = "audit_log"

    id: Mapped[int] = mapped_column(
        sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True
    )
    at: Mapped[datetime]
    actor: Mapped[Text64]
    """A key id, or `admin`."""
    action: Mapped[Text64]
    """`tenant.create`, `adapter.publish` and so on."""
    tenant: Mapped[Text64]
    """Name of the tenant whose object changed."""
    target: Mapped[Text255]
    """Changed object: a name, `name@version` or a key id."""
    detail: Mapped[dict[str, Any]]


class FileRow(Base):
    """A file of a tenant: requests of a batch, or results. Its bytes are a blob. Times are seconds since 1970."""

    __tablename__ = "files"

    id: Mapped[Id]
    tenant_id: Mapped[str] = _goes_with("tenants.id", index=True)
    filename: Mapped[Text255]
    purpose: Mapped[Text64]
    """batch or batch_output."""
    size_bytes: Mapped[int]
    sha256: Mapped[Text64] = mapped_column(index=True)
    created_at: Mapped[int]
    expires_at: Mapped[int] = mapped_column(index=True)


class BatchRow(Base):
    """A batch, and which server runs it. Times are seconds since 1970."""

    __tablename__ = "batches"

    id: Mapped[Id]
    tenant_id: Mapped[str] = _goes_with("tenants.id", index=True)
    key_id: Mapped[Text64]
    """The key that made it, for which its lines run; empty for the admin key."""
    endpoint: Mapped[Text64]
    input_file_id: Mapped[Text64]
    input_sha256: Mapped[Text64]
    output_file_id: Mapped[Text64 | None]
    error_file_id: Mapped[Text64 | None]
    labels: Mapped[dict[str, str] | None]
    """The client's `metadata`."""
    errors: Mapped[dict[str, Any] | None]
    """Errors of its input, as a list in OpenAI's shape."""
    total: Mapped[Int32] = mapped_column(default=0)
    completed: Mapped[Int32] = mapped_column(default=0)
    failed: Mapped[Int32] = mapped_column(default=0)
    status: Mapped[Text64] = mapped_column(index=True)
    created_at: Mapped[int]
    expires_at: Mapped[int]
    in_progress_at: Mapped[int | None]
    finalizing_at: Mapped[int | None]
    completed_at: Mapped[int | None]
    failed_at: Mapped[int | None]
    expired_at: Mapped[int | None]
    cancelling_at: Mapped[int | None]
    cancelled_at: Mapped[int | None]
    owner: Mapped[Text64] = mapped_column(default="")
    """The server that runs it; empty for none."""
    lease_until: Mapped[int] = mapped_column(default=0)
    """Time at which another server may take it over, unless its owner renews it before."""

    @property
    def request_counts(self) -> dict[str, int]:
        """Lines: all, and those that ended well or not."""
        return {"total": self.total, "completed": self.completed, "failed": self.failed}


class BatchResultRow(Base):
    """The result of one line, until the batch ends and all of them become files; written with its usage event."""

    __tablename__ = "batch_results"

    batch_id: Mapped[str] = _goes_with("batches.id", primary_key=True)
    line: Mapped[NumberKey]
    is_error: Mapped[bool]
    result: Mapped[LongText]
    """A line of the output file or the error file."""


class ServerRow(Base):
    """A server over this database, as it last said."""

    __tablename__ = "servers"

    name: Mapped[Id]
    role: Mapped[Text64]
    boot_id: Mapped[Text64]
    url: Mapped[Text255]
    state: Mapped[Text64]
    model: Mapped[Text255]
    base: Mapped[Text255]
    version: Mapped[Text64]
    seen_at: Mapped[datetime] = mapped_column(index=True)
