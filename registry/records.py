"""Answers of the registry: frozen records without tables and HTTP bodies. Times are in UTC, with a timezone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar
from zoneinfo import ZoneInfo

from manylora.adapters.ref import AdapterRef, LoraSpec
from manylora.registry.limits import UNLIMITED, Limits

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Scope = Literal["infer", "adapters", "usage"]
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
FILES = (CONFIG_FILE, WEIGHTS_FILE)
SCOPES: tuple[Scope, ...] = ("infer", "adapters", "usage")

Bucket = Literal["1m", "1h", "1d"]
GroupBy = Literal["tenant", "adapter", "version", "key", "status", "service_class"]
ServiceClass = Literal["interactive", "batch"]
"""Kind of a request: a client waits for it (interactive), or it is a line of a batch. Prices may differ."""
RankBy = Literal["requests", "prompt_tokens", "completion_tokens", "total_tokens", "cost"]

VersionWeights = Mapping[int, int]
"""Versions by number, each with its weight among them."""

RecordT = TypeVar("RecordT")
DataT = TypeVar("DataT", bound="DataclassInstance")
UTC_ZONE = ZoneInfo("UTC")


def to_record(kind: type[DataT], row: object, **given: object) -> DataT:
    """The record of a row: the row's columns of the same names, and the fields that are given."""
    names = (field.name for field in fields(kind) if field.name not in given)
    return kind(**{name: getattr(row, name) for name in names}, **given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[RecordT]):
    """One page of a listing."""

    items: tuple[RecordT, ...]
    next: str | None
    """Pass it as `after` to get the next page; None: this is the last."""

    @classmethod
    def of(
        cls, found: Sequence[RecordT], limit: int, cursor: Callable[[RecordT], str]
    ) -> Page[RecordT]:
        """The first `limit` of what was found with a LIMIT of one more; `cursor` names a place in the listing."""
        items = tuple(found[:limit])
        return cls(items=items, next=cursor(items[-1]) if len(found) > limit else None)


@dataclass(frozen=True, slots=True)
class Credential:
    """Name of the secret that a caller showed, without the secret."""

    prefix: str
    """Prefix by which its key is found; empty for the admin key."""
    digest: str
    """Digest as it is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A caller, as its key says."""

    role: Literal["admin", "tenant"]
    tenant_id: str | None = None
    """None for an admin."""
    tenant: str | None = None
    """The tenant's name; None for an admin."""
    key_id: str | None = None
    """None for the admin key, which has no row."""
    scopes: tuple[Scope, ...] = SCOPES
    tenant_limits: Limits = UNLIMITED
    tenant_weight: float = 1.0
    key_limits: Limits = UNLIMITED
    credential: Credential | None = field(default=None, repr=False, compare=False)
    """Credential that identified the caller; None if authentication is off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFacts:
    """Facts that the check of an upload found."""

    digest: str
    """`sha256:<64 hex>` of the canonical content."""
    weights_sha256: str
    """64 hex digits: the blob."""
    spec: LoraSpec
    rank: int
    """Largest true rank of any module."""
    target_modules: tuple[str, ...]
    applied: int
    """Modules of the base that the adapter changes, counted over all layers."""
    total: int
    """Modules of the base that an adapter could change."""
    parameters: int
    size_bytes: int
    peft_version: str | None
    """The PEFT that saved it, as its config says; None if it does not."""
    report: Mapping[str, Any]
    """Report of the check, as JSON types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterVersion(VersionFacts):
    """One immutable upload."""

    adapter_id: str
    version: int
    created_at: datetime
    held_by: str | None = None
    """Server that has the weights of an ephemeral version in memory; None if they are in the blob store."""
    expires_at: datetime | None = None
    """Time at which an ephemeral version is withdrawn; None if it has no time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ephemeral:
    """Life of a version whose weights are in memory only."""

    server: str
    """The server that has them; the version goes when that stops."""
    keep: int | None = None
    """Ephemeral versions of the adapter that stay, the new one included; None keeps all. Those that an alias means stay
    as well."""
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterIdentity:
    """Name and owner of an adapter, which each request needs."""

    id: str
    tenant_id: str
    """The owner, which for a granted adapter is not the caller."""
    tenant: str
    """The owner's name."""
    name: str
    created_at: datetime
    pinned_copies: int
    """On how many servers it is pinned; 0 is not pinned."""

    def name_for(self, tenant_id: str | None) -> str:
        """Name by which this tenant calls it: `name`, or `owner/name` of another tenant's."""
        return self.name if tenant_id == self.tenant_id else f"{self.tenant}/{self.name}"

    def ref(self, version: AdapterVersion) -> AdapterRef:
        """The reference by which engine and residency know a version."""
        return AdapterRef(
            tenant_id=self.tenant_id,
            adapter_id=self.id,
            version=version.version,
            digest=version.digest,
            weights_sha256=version.weights_sha256,
            config=version.spec,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter(AdapterIdentity):
    """An adapter as its owner sees it."""

    description: str | None
    aliases: Mapping[str, VersionWeights]
    """Meaning of each alias; the name without @ means `default`, which may be missing."""
    current: AdapterVersion
    """The version that was asked for; where none was, what `default` means most often, else the latest."""

    @property
    def pinned(self) -> bool:
        """True if it stays on the device of any server."""
        return self.pinned_copies > 0


class VersionDraft(Protocol):
    """A version to come, as its sender describes it; a body of a request or the row of an upload."""

    name: str
    description: str | None
    activate: bool
    """True if the alias `default` moves to it."""


Resolution = tuple[AdapterIdentity, Sequence[tuple[AdapterVersion, int]]]
"""Meaning of a selector to a caller: an adapter, and versions of it with their weights; one version, unless an alias
splits its requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Content that no version of any tenant refers to any more after a delete."""

    digests: tuple[str, ...] = ()
    """Content digests that the engine may drop."""
    weights: tuple[str, ...] = ()
    """Blobs (64 hex digits) that may be deleted."""


RETRIED = "retried"
"""Status of what another server was asked again, which has an event of its own: this one is no request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageEvent:
    """One billable fact: a request, whatever its end."""

    id: str
    """Ledger id, minted by the server (`UsageLedger.mint_id`); counted once however often it arrives."""
    at: datetime
    """End of the request; decides the bucket."""
    tenant_id: str | None
    """None for an admin's own request."""
    tenant: str | None
    """The tenant's name, kept so that history outlives the tenant."""
    key_id: str | None
    adapter_id: str | None
    """None for the base model."""
    adapter: str | None
    """The adapter's name, `owner/name` for one that was granted; kept so that history outlives the adapter."""
    adapter_version: int | None
    adapter_digest: str | None
    request_id: str
    """The client's own id, only echoed; what cannot be stored of it is replaced."""
    endpoint: str
    status: str
    """A finish reason, `aborted`, `error`, `RETRIED`, or `interrupted` if it is billed from a progress mark."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float | None = None
    ttft_s: float | None = None
    duration_s: float | None = None
    adapter_state: str | None = None
    """Place of the adapter on arrival: device, host or stored."""
    service_class: ServiceClass = "interactive"
    overrules: bool = False
    """Replaces what another server has recorded under this id: it knows what the client got of a broken answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotals:
    """Sums over events."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost: int = 0
    """In units of 10^-10 of the currency; 0 without prices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """Filters, groups and buckets of a question about usage."""

    start: datetime
    """The first moment that counts."""
    end: datetime
    """The first moment that no longer counts."""
    bucket: Bucket | None = None
    """Width of a row's time span (minutes, hours or days of `zone`); None makes one span of the whole range."""
    zone: ZoneInfo = UTC_ZONE
    group_by: tuple[GroupBy, ...] = ()
    top: int | None = None
    """Number of groups of the whole range that have rows of their own; all others have one row together in each bucket.
    All rows come at once, whatever the limit."""
    rank_by: RankBy = "total_tokens"
    """Figure that orders the groups; total tokens are prompt and completion tokens."""
    tenant_id: str | None = None
    """Only this tenant's usage; always set it for a tenant's own query."""
    adapters: tuple[str, ...] = ()
    """Only adapters of these names; the empty text means the base model. No names, no filter; so for all filters."""
    versions: tuple[int, ...] = ()
    key_ids: tuple[str, ...] = ()
    statuses: tuple[str, ...] = ()
    service_classes: tuple[str, ...] = ()
    after: str | None = None
    """`next` of the page before."""
    limit: int = 1000


@dataclass(frozen=True, kw_only=True)
class UsageGroup:
    """One bucket of one group; fields that the query does not group by are None."""

    start: datetime
    """The bucket's first moment, also where the range begins later; without buckets the range's."""
    end: datetime
    tenant_id: str | None = None
    tenant: str | None = None
    adapter_id: str | None = None
    adapter: str | None = None
    """The adapter's name; with grouping by adapter or version None means the base model."""
    version: int | None = None
    key_id: str | None = None
    status: str | None = None
    service_class: str | None = None


@dataclass(frozen=True, kw_only=True)
class UsageRow(UsageTotals, UsageGroup):
    """Sums of one bucket of one group."""

    other: bool = False
    """All groups below the top together; the fields of the group are None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """One page of rows, and the totals of the whole range."""

    rows: tuple[UsageRow, ...]
    totals: UsageTotals
    groups: int | None
    """Number of groups of the range; None without grouping."""
    next: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyFigures:
    """Times to the first token of requests, and places of their adapters."""

    requests: int
    states: Mapping[str, int]
    """Requests by where their adapter was on arrival: device, host, stored; or base, or unknown."""
    hit_rate: float | None
    """Part of the requests with an adapter that found it on the device; None without such requests."""
    ttft_s: Mapping[str, float] | None
    """Percentiles of the time to the first token (p50, p95, p99), in seconds; None where no request had one."""


@dataclass(frozen=True, kw_only=True)
class LatencyRow(LatencyFigures, UsageGroup):
    """Latency of one bucket of one group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyReport:
    """Rows, and the figures of the range that was asked for, widened to whole hours."""

    start: datetime
    end: datetime
    rows: tuple[LatencyRow, ...]
    totals: LatencyFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUsage(UsageTotals):
    """Usage of one adapter by all tenants since it was created."""

    last_used_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """The model that a request names."""

    name: str
    """The text that the client sent."""
    adapter: AdapterIdentity | None = None
    """None is the base."""
    version: AdapterVersion | None = None
    """Version of the adapter, always with it."""

    @property
    def ref(self) -> AdapterRef | None:
        """The reference for the engine; None is the base."""
        return self.adapter.ref(self.version) if self.adapter and self.version else None

    def usage_event(
        self,
        identity: Identity,
        tenant_id: str | None,
        tenant: str | None,
        request_id: str,
        endpoint: str,
    ) -> Callable[..., UsageEvent]:
        """Maker of the usage event of a request for it, of what is known at the end."""
        adapter = self.adapter
        version = self.version
        return partial(
            UsageEvent,
            tenant_id=tenant_id,
            tenant=tenant,
            key_id=identity.key_id,
            adapter_id=adapter.id if adapter else None,
            adapter=adapter.name_for(tenant_id) if adapter else None,
            adapter_version=version.version if version else None,
            adapter_digest=version.digest if version else None,
            request_id=request_id,
            endpoint=endpoint,
        )
