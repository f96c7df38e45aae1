"""Bodies that Weft sends, except the streamed ones; the OpenAPI page is made of them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field


def iso(moment: datetime) -> str:
    """UTC in ISO-8601, with milliseconds and a final Z."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


Moment = Annotated[str, BeforeValidator(lambda value: iso(value) if isinstance(value, datetime) else value)]
"""A time as clients see it, made of a datetime."""


class View(BaseModel):
    """Base of all response bodies; made of anything with the same attributes."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), from_attributes=True
    )


ViewT = TypeVar("ViewT", bound=View)


class Listing(View, Generic[ViewT]):
    """Rows, and where the next page begins."""

    object: Literal["list"] = "list"
    data: list[ViewT]
    next: str | None


class FindingView(View):
    """One thing that is wrong with an adapter."""

    code: str
    message: str
    """What was expected, and what came."""
    param: str | None
    """The field of the config, or the first tensor, that is wrong; null where it is a file as a whole."""
    hint: str
    """What to do."""


class ErrorFields(View):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str
    findings: list[FindingView] = Field(default_factory=list)
    """Only where an adapter is refused: all that is wrong with it, at most 20 things; `message` says the first."""


class ErrorView(View):
    """Every error, whatever its status."""

    error: ErrorFields


class TenantView(View):
    """A tenant."""

    id: str
    object: Literal["tenant"] = "tenant"
    name: str
    limits: dict[str, int]
    weight: float
    """Its part of the engine, beside those of the other tenants with requests."""
    created_at: Moment


class TenantList(Listing[TenantView]):
    """A page of tenants."""


class KeyView(View):
    """A key, without its secret."""

    id: str
    object: Literal["key"] = "key"
    tenant: str
    name: str | None
    prefix: str
    scopes: list[str]
    limits: dict[str, int]
    expires_at: Moment | None
    created_at: Moment


class NewKeyView(KeyView):
    """A key with its secret, shown this once."""

    key: str


class KeyList(Listing[KeyView]):
    """A tenant's keys."""


class NamedView(View):
    """The caller's tenant."""

    id: str
    name: str


class HeldView(View):
    """Numbers by the name of a limit, for each holder."""

    tenant: dict[str, int]
    key: dict[str, int]


class MeView(View):
    """Who calls, and what is taken of the limits."""

    object: Literal["me"] = "me"
    role: Literal["admin", "tenant"]
    tenant: NamedView | None
    key: KeyView | None
    """None for the admin key."""
    limits: HeldView
    """What is set."""
    used: HeldView
    """What counts against a rate or quota now; tokens with what running requests reserve."""


class SessionView(View):
    """A browser's session; its cookie is in the header."""

    object: Literal["session"] = "session"
    role: Literal["admin", "tenant"]
    tenant: str | None
    expires_at: Moment


class LinkView(View):
    """What begins a session once."""

    object: Literal["session.link"] = "session.link"
    link: str
    expires_at: Moment


class AppliedModules(View):
    """How many of the base's modules an adapter changes, counted over all layers."""

    applied: int
    total: int


class UsageSums(View):
    """What every sum of usage has."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class AdapterUsageView(UsageSums):
    """All that was ever asked of an adapter."""

    last_used_at: Moment | None


class ReportView(View):
    """What the check of an upload noticed."""

    dtype: list[str]
    layout: Literal["peft", "mlx"]
    """How the matrices lie in the file; MLX's are the transposes of PEFT's."""
    renamed: int
    """Tensors in whose names wrappers, an adapter's name or a multimodal model's were passed over."""
    warnings: list[str]
    """What looks like a mistake; the adapter is served all the same."""


class VersionView(View):
    """One immutable upload."""

    object: Literal["adapter.version"] = "adapter.version"
    name: str
    tenant: str
    version: int
    digest: str
    rank: int
    """The largest of any module."""
    target_modules: list[str]
    applied_modules: AppliedModules
    parameters: int
    size_bytes: int
    residency: Literal["stored", "host", "device"]
    created_at: Moment
    report: ReportView | None
    """Null for versions from before there were reports."""


class VersionList(Listing[VersionView]):
    """An adapter's versions, newest first."""


class AdapterView(View):
    """An adapter, with what its current version is."""

    id: str
    object: Literal["adapter"] = "adapter"
    name: str
    tenant: str
    version: int
    digest: str
    state: Literal["ready"] = "ready"
    rank: int
    target_modules: list[str]
    applied_modules: AppliedModules
    parameters: int
    size_bytes: int
    pages: int | None
    """Pages it takes on the device; null where its weights cannot be read now."""
    residency: Literal["stored", "host", "device"]
    load_p95_s: float | None
    """Seconds that 95 % of its last 32 loads onto the device took at most; null while it is in no memory."""
    pinned: bool
    aliases: dict[str, int | dict[str, int]]
    """Alias to version, or to the weights of the versions among which it splits its requests."""
    description: str | None
    created_at: Moment
    report: ReportView | None
    """Of the version; null where it is from before there were reports."""
    usage: AdapterUsageView | None = None
    """On GET only."""


class UploadFileView(View):
    """A file of an upload."""

    size: int
    sha256: str
    received: int
    """Bytes that are here: the next one to send."""


class UploadView(View):
    """An upload in pieces."""

    id: str
    object: Literal["upload"] = "upload"
    name: str
    tenant: str
    description: str | None
    activate: bool
    state: Literal["uploading", "ready", "rejected"]
    files: dict[str, UploadFileView]
    missing: list[str]
    """Files that are not all here."""
    result: dict[str, Any] | None
    """How it ended: the adapter as the answer showed it, or the error."""
    expires_at: Moment
    created_at: Moment


class UploadList(Listing[UploadView]):
    """A page of uploads, oldest first."""


class AdapterList(Listing[AdapterView]):
    """A page of adapters."""


class GrantView(View):
    """Another tenant may call an adapter."""

    object: Literal["grant"] = "grant"
    adapter: str
    tenant: str
    """Name of the grantee."""
    tenant_id: str
    version: int | None
    """Null means every version."""
    created_at: Moment


class GrantList(Listing[GrantView]):
    """An adapter's grants."""


class AuditView(View):
    """One change of what exists."""

    id: Annotated[str, BeforeValidator(str)]
    object: Literal["audit.entry"] = "audit.entry"
    at: Moment
    actor: str
    """A key's id, or `admin`."""
    action: str
    tenant: str
    target: str
    detail: dict[str, Any]


class AuditList(Listing[AuditView]):
    """A page of the audit log, newest first."""


class FitNumbers(View):
    """How much of something there is, is needed, and is left."""

    total: int
    needed: int
    left: int


class AdapterFitItem(View):
    """One adapter, or several that do not exist yet and would look alike."""

    adapter: str | None
    """Null for adapters that do not exist yet."""
    version: int | None
    digest: str | None
    """Adapters of one digest share their pages and count once."""
    rank: int
    target_modules: list[str]
    pages: int
    """Of each."""
    waste: Annotated[float, AfterValidator(lambda share: round(share, 4))]
    """Share of these pages that holds no weights, from 0 to 1."""
    count: int


class AdapterFitView(View):
    """Answer of POST /v1/adapters:fit."""

    object: Literal["adapter_fit"] = "adapter_fit"
    fits: bool
    """Whether all can be on the device at once. False only means that they take turns: idle adapters cost nothing."""
    pages: FitNumbers
    slots: FitNumbers
    kv_tokens_left: int
    """Tokens of KV cache that fit beside all of them."""
    adapters: list[AdapterFitItem]
    message: str


class ModelView(View):
    """A model in OpenAI's shape: the base, or an adapter."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    """The base's name, or the adapter version's digest."""
    parent: str | None
    """The base's name; null for the base itself."""
    max_model_len: int


class ModelList(View):
    """All models that the key may call."""

    object: Literal["list"] = "list"
    data: list[ModelView]


class UsageTotalsView(UsageSums):
    """Sums of usage."""

    cost: str | None = None
    """Exact, as a decimal number; absent where no prices are set."""


class UsageRowView(UsageTotalsView):
    """Usage of one span of time, and of one group where grouping was asked for."""

    start: str
    """Of the bucket, also where the range begins or ends within it; without `bucket`, of the range."""
    end: str
    tenant: str | None = None
    adapter: str | None = None
    """Null is the base model, where grouped by adapter."""
    version: int | None = None
    key: str | None = None
    status: str | None = None
    service_class: str | None = None
    other: bool = False
    """All groups below the top together, their fields null; absent without `top`."""


class UsageList(Listing[UsageRowView]):
    """Usage, with the totals of the whole range."""

    totals: UsageTotalsView
    groups: int | None = None
    """How many groups the whole range has; absent without `group_by`."""
    currency: str | None = None
    """Of the costs; absent where no prices are set."""


class AdapterStatesView(View):
    """Requests by where their adapter was when they arrived."""

    device: int
    host: int
    stored: int
    base: int
    """Requests without an adapter."""
    unknown: int
    """Requests that ended before anybody looked."""


class TtftView(View):
    """Seconds within which so many percent of the requests had their first token."""

    p50: float
    p95: float
    p99: float


class LatencyFiguresView(View):
    """How requests began."""

    requests: int
    states: AdapterStatesView
    hit_rate: float | None
    """Of the requests that found their adapter anywhere, the share that found it on the device; null for none."""
    ttft_s: TtftView | None
    """At most a factor of 1.122 off; null where no request had a first token."""


class LatencyRowView(LatencyFiguresView):
    """One span of time, and one group where grouping was asked for."""

    start: str
    end: str
    tenant: str | None = None
    adapter: str | None = None
    """Null is the base model, where grouped by adapter or version."""
    version: int | None = None
    key: str | None = None


class LatencyList(View):
    """Latency, with the figures of the whole range."""

    object: Literal["list"] = "list"
    start: str
    """The range that was answered: the one asked for, widened to full hours."""
    end: str
    data: list[LatencyRowView]
    next: None
    totals: LatencyFiguresView


class UsageEventView(View):
    """One billable fact: a request, however it ended."""

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


class UsageDetails(View):
    """Parts of the prompt tokens."""

    cached_tokens: int


class UsageView(View):
    """What a generation request is billed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: UsageDetails


class CompletionLogprobsView(View):
    """Parallel lists over the tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoiceView(View):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobsView | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None


class CompletionView(View):
    """Answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoiceView]
    usage: UsageView


class TopLogprobView(View):
    """A token that could have stood here."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobView(TopLogprobView):
    """A token and its alternatives."""

    top_logprobs: list[TopLogprobView]


class ChatLogprobsView(View):
    """Log-probabilities of an answer."""

    content: list[TokenLogprobView]
    refusal: None


class AnswerView(View):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoiceView(View):
    """One answer."""

    index: int
    message: AnswerView
    logprobs: ChatLogprobsView | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None


class ChatView(View):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoiceView]
    usage: UsageView


class TokenizeView(View):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeView(View):
    """Answer of POST /detokenize."""

    prompt: str


class HealthView(View):
    """Answer of GET /health and /ready."""

    status: str


class VersionNumberView(View):
    """Answer of GET /version."""

    version: str


class OrganizationUsageResult(View):
    """One group of OpenAI's usage shape; the project is the tenant, the model is the adapter."""

    object: Literal["organization.usage.completions.result"] = "organization.usage.completions.result"
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
