"""Bodies of usage and latency."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, Field

from manylora.server.http.bodies import Listing, Moment, UsageSums, View


class UsageTotalsView(UsageSums):
    """Sums of usage."""

    cost: str | None = None
    """Exact, as a decimal number; absent where no prices are set."""


class GroupView(View):
    """One span of time, and one group where grouping was asked for."""

    start: str
    """Start of the whole bucket, also where the range begins within it; without `bucket`, of the range."""
    end: str
    tenant: str | None = None
    adapter: str | None = None
    """Null is the base model, where grouped by adapter or version."""
    version: int | None = None
    key: str | None = None


class UsageRowView(UsageTotalsView, GroupView):
    """Usage of one group in one span of time."""

    status: str | None = None
    service_class: str | None = None
    other: bool = False
    """True if the row is all groups below the top together, with null fields; absent without `top`."""


class UsageList(Listing[UsageRowView]):
    """Usage, with the totals of the whole range."""

    totals: UsageTotalsView
    groups: int | None = None
    """Number of groups in the whole range; absent without `group_by`."""
    currency: str | None = None
    """Currency of the costs; absent where no prices are set."""


class AdapterStatesView(View):
    """Requests by where their adapter was when they arrived."""

    device: int
    host: int
    stored: int
    base: int
    """Requests without an adapter."""
    unknown: int
    """Requests that ended before that was known."""


class TtftView(View):
    """Percentiles of the time to the first token, in seconds."""

    p50: float
    p95: float
    p99: float


class LatencyFiguresView(View):
    """Figures of how requests started."""

    requests: int
    states: AdapterStatesView
    hit_rate: float | None
    """Share of requests for adapters that found theirs on the device; null where there were none."""
    ttft_s: TtftView | None
    """At most a factor of 1.122 off; null where no request had a first token."""


class LatencyRowView(LatencyFiguresView, GroupView):
    """Latency of one group in one span of time."""


class LatencyList(View):
    """Latency, with the figures of the whole range."""

    object: Literal["list"] = "list"
    start: str
    """Start of the range asked for, widened to full hours."""
    end: str
    data: list[LatencyRowView]
    next: None
    totals: LatencyFiguresView


class UsageEventView(View):
    """One request as it is billed, however it ended."""

    id: str
    object: Literal["usage.event"] = "usage.event"
    at: Moment
    """When the request ended."""
    tenant: str | None
    key: str | None = Field(validation_alias=AliasChoices("key", "key_id"))
    adapter: str | None
    """Null is the base model."""
    version: int | None = Field(validation_alias=AliasChoices("version", "adapter_version"))
    digest: str | None = Field(validation_alias=AliasChoices("digest", "adapter_digest"))
    request_id: str
    endpoint: str
    service_class: str
    """interactive, or batch for a line of a batch."""
    status: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float | None
    ttft_s: float | None
    duration_s: float | None
    adapter_state: str | None


class UsageEventList(Listing[UsageEventView]):
    """A page of usage events, oldest first."""


class OrganizationUsageResult(View):
    """One group of OpenAI's usage shape; the project is the tenant, the model is the adapter."""

    object: Literal["organization.usage.completions.result"] = (
        "organization.usage.completions.result"
    )
    input_tokens: int
    output_tokens: int
    input_cached_tokens: int
    input_audio_tokens: int = 0
    output_audio_tokens: int = 0
    num_model_requests: int
    project_id: str | None = None
    user_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    batch: bool | None = None
    service_tier: str | None = None


class OrganizationUsageBucket(View):
    """One span of time, in Unix seconds."""

    object: Literal["bucket"] = "bucket"
    start_time: int
    end_time: int
    results: list[OrganizationUsageResult]


class OrganizationUsagePage(View):
    """Answer of GET /v1/organization/usage/completions."""

    object: Literal["page"] = "page"
    data: list[OrganizationUsageBucket]
    has_more: bool
    next_page: str | None = Field(default=None)
