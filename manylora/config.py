"""The settings, as frozen dataclasses that need only the standard library.

Each part gets its own section. `manylora.server.settings` reads the values from command line, environment, YAML and
defaults. Values that depend on the machine, such as the number of pages, are results, not settings.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import unquote

from manylora.errors import ConfigError
from manylora.lora_rows import GROUP_ROWS, MAX_RANK

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Weights = Literal["auto", "bf16", "int8", "int4"]
Auth = Literal["on", "off"]
ServerRole = Literal["all", "gateway", "replica"]
MetricsAliases = Literal["none", "vllm"]
KvDtype = Literal["auto", "int8"]
Policy = Literal["fcfs", "fair"]
Overlap = Literal["auto", "on", "off"]
Inner = Literal["fifo", "shortest", "slack", "mlfq"]

GIB = 1 << 30
MIB = 1 << 20
MAX_SLOTS = 65536
_BLOB_URL = re.compile(
    r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[\w!*'()-][\w.!*'()-]*)*/?"  # characters that every S3 takes in a key
    r"|file:///.+"
    r"|(?!\w[\w+.-]+:).+",  # a folder; another scheme is not taken for one
    re.ASCII,
)
_SERVER_URL = re.compile(
    r"https?://(?:\[([\da-f.]*:[\da-f:.]*)\]|([\w.-]+))(?::(\d{1,5}))?", re.ASCII | re.IGNORECASE
)
"""Groups: an IPv6 address; or a name or an IPv4 address; a port."""


def _require(ok: bool, setting: str, expected: str, got: object) -> None:
    if not ok:
        raise ConfigError(f"{setting} must be {expected}, got {got!r}", param=setting)


def _check_choices(section: str, settings: object, **choices: object) -> None:
    """Refuse a value that is not one of the strings of a literal type."""
    for name, type_ in choices.items():
        value = getattr(settings, name)
        *others, last = get_args(type_)
        _require(
            value in (*others, last), f"{section}.{name}", f"{', '.join(others)} or {last}", value
        )


def _check_bounds(section: str, settings: object, **bounds: tuple[float, float]) -> None:
    """Refuse numbers outside their bounds, which are included. None is accepted."""
    for name, (low, high) in bounds.items():
        value = getattr(settings, name)
        expected = f">= {low}" if high == math.inf else f"{low} to {high}"
        _require(
            value is None or (low <= value <= high and value != math.inf),
            f"{section}.{name}",
            expected,
            value,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The base model and its computation."""

    path: str
    """Folder with a Hugging Face checkpoint, or a hub id. The one setting without a default."""
    served_name: str | None = None
    """Name of the base for clients; when not set, the last part of `model.path`."""
    device: Device = "auto"
    """Device of the model: auto, cpu or cuda. auto takes a CUDA device if there is one."""
    dtype: Dtype = "auto"
    """Number format of weights, KV cache and adapters: auto, float32, bfloat16 or float16. auto takes 16 bits for a
    model in 16 bits: on a CPU bfloat16, on a GPU the model's own. `memory.kv_dtype` may give the KV cache
    another format."""
    weights: Weights = "auto"
    """Format of the weights of the linear layers: auto, bf16, int8 or int4. bf16 keeps them in `model.dtype`, whatever
    that is. int8 and int4 work on a CPU only: weights are rounded when they are loaded, so that less memory is read for
    each token. auto takes int8 for a quantised checkpoint on a CPU, else bf16. docs/quantisation.md has the loss of
    quality of each."""
    max_model_len: int | None = None
    """Longest prompt plus output, in tokens; when not set, the limit of the model."""
    tool_format: str | None = None
    """Format in which the model writes calls of tools and reasoning, one of the names in docs/tools.md; when not set,
    the one that its tokenizer or its chat template names."""
    adapters_trained_on_quantised: bool = False
    """Set this if the model is an AWQ or SmoothQuant checkpoint and the adapters were trained on that checkpoint
    itself. Such a checkpoint scales the inputs of linears, so adapters of the original model do not fit it and are
    refused."""
    cuda_graphs: bool = True
    """On a GPU, replay decode steps as CUDA graphs, which spares the host most of the work of launching kernels.
    Without them the results are the same, and steps take longer."""
    threads: int = 0
    """Threads that compute one operation on a CPU; 0 takes one for a tiny model, and all usable cores for others."""

    def __post_init__(self) -> None:
        _require(bool(self.path), "model.path", "a folder or hub id", self.path)
        _check_choices("model", self, device=Device, dtype=Dtype, weights=Weights)
        _check_bounds("model", self, max_model_len=(1, math.inf), threads=(0, 1024))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """The memory of KV cache and adapters."""

    gib: float | None = None
    """Size of the page pool in GiB; when not set, a quarter of the free memory but at most 4 on a CPU, and on a GPU the
    memory that is left beside weights, CUDA graphs, workspaces and the largest step; `manylora fit` shows each part."""
    host_gib: float | None = None
    """Host memory in GiB for adapters that are ready to be copied to the device, and for swapped KV cache; when not
    set, an eighth of the free memory but at most 2 on a CPU, and with a GPU, which pins it, a quarter but at most
    64."""
    kv_dtype: KvDtype = "auto"
    """Number format of keys and values: auto takes that of `model.dtype`. int8 holds about twice the tokens in the same
    memory, with a scale per token and head; answers may change a little."""
    prefix_cache: bool = True
    """Keep the KV cache of earlier requests for requests that begin with the same tokens."""
    poison: bool = False
    """For debugging: fill freed pages with 0xFF, so that a read of freed memory shows as NaN."""

    def __post_init__(self) -> None:
        for name, value in (("memory.gib", self.gib), ("memory.host_gib", self.host_gib)):
            _require(value is None or 0 < value <= 4096, name, "above 0, at most 4096", value)
        _check_choices("memory", self, kv_dtype=KvDtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Limits of adapters, and their loading."""

    max_rank: int = 64
    """Largest rank that is served; a multiple of 8, at most 256."""
    slots: int | None = None
    """Largest number of adapters on the device at once; when not set, as many as fit into the pool, while their tables
    stay small beside it."""
    load_threads: int = 1
    """Threads that read, check and pack adapters."""
    load_share: float = 0.06
    """On a CPU: share of one core that loading adapters may take while steps run and no request waits for a load, 0.01
    to 1; 1 means no limit. The share grows with the part of the requests that wait for loads. An idle core may always
    be used."""
    push_gib: float = 1.0
    """Largest memory in GiB for the weights of ephemeral versions, which trainers push; 0 takes none."""
    load_roots: str = ""
    """Folders of this machine that POST /v1/load_lora_adapter may load adapters from, separated by commas. Every key
    with the scope adapters may load every adapter in them; when empty, the route loads nothing."""

    def __post_init__(self) -> None:
        is_rank = GROUP_ROWS <= self.max_rank <= MAX_RANK and self.max_rank % GROUP_ROWS == 0
        _require(
            is_rank,
            "adapter.max_rank",
            f"a multiple of {GROUP_ROWS}, from {GROUP_ROWS} to {MAX_RANK}",
            self.max_rank,
        )
        _check_bounds("adapter", self, slots=(1, MAX_SLOTS), load_threads=(1, 64))
        _check_bounds("adapter", self, load_share=(0.01, 1), push_gib=(0, 4096))
        for root in self.roots:
            _require(
                root.is_absolute(),
                "adapter.load_roots",
                "absolute folders, separated by commas",
                str(root),
            )

    @property
    def roots(self) -> list[Path]:
        """`load_roots` as a list."""
        return [Path(root.strip()) for root in self.load_roots.split(",") if root.strip()]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Choice of the requests that a step computes."""

    max_running: int = 64
    """Largest number of requests in one step. Requests that are paused for others keep their memory and do not
    count."""
    step_tokens: int | None = None
    """Largest number of tokens in one step; longer prompts are computed in chunks. When not set, 512 on a CPU and 2048
    on a GPU, but at least `scheduler.max_running`."""
    max_waiting: int = 4096
    """Largest number of waiting requests, which limits memory. One tenant may have twice as many waiting requests as
    there are free places."""
    max_wait_s: float = 10.0
    """Longest predicted wait for a first token, in seconds. A request that would wait longer is refused at once, with
    429 or 503 and Retry-After."""
    policy: Policy = "fair"
    """Order of requests: fair takes first the tenants that were served least for their weight, then their adapters,
    then arrival; fcfs is first come, first served."""
    inner: Inner = "fifo"
    """Order among the requests of one tenant for one adapter: fifo by arrival, shortest by fewest predicted tokens,
    slack by least time to the deadline, mlfq by a multi-level feedback queue, in which long answers pause for short
    ones, for about half a second at most."""
    itl_target_ms: float | None = None
    """Longest time that a step should take, in milliseconds. To keep it, prompts are computed in smaller chunks, and
    batches get the time that is left. When not set, each step is filled up to `scheduler.step_tokens`."""
    batch_stretch: float = 1.25
    """Largest factor by which batches may lengthen a step in which interactive requests decode. It has an effect only
    if `scheduler.itl_target_ms` is not set."""
    overlap: Overlap = "auto"
    """Plan and launch the next step while the device computes one: on, off, or auto, which is on for a GPU and off for
    a CPU, where both would take turns."""

    def __post_init__(self) -> None:
        _check_bounds(
            "scheduler",
            self,
            max_running=(1, 4096),
            max_waiting=(1, 1 << 20),
            max_wait_s=(0.1, 3600),
        )
        _check_bounds("scheduler", self, itl_target_ms=(0.1, 60_000), batch_stretch=(1.1, 100))
        _check_choices("scheduler", self, policy=Policy, inner=Inner, overlap=Overlap)
        holds_all = self.step_tokens is None or self.max_running <= self.step_tokens <= 1 << 20
        expected = f"from scheduler.max_running ({self.max_running}) to 1048576"
        _require(holds_all, "scheduler.step_tokens", expected, self.step_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Addresses of the server, and limits of requests."""

    role: ServerRole = "all"
    """all, gateway or replica. all serves clients by itself. Where many servers share a database, a gateway takes the
    requests of clients and passes each to a replica, which computes it (docs/cluster.md)."""
    advertised_url: str | None = None
    """Address at which gateways reach this replica, such as http://10.0.0.7:8000; when not set, `server.host` and
    `server.port`. A replica that listens on all addresses (0.0.0.0) needs it."""
    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = 8000
    """Port to bind; 0 takes a free port."""
    metrics_port: int | None = None
    """Separate port for /metrics, without a key; when not set, admins read it on the main port."""
    metrics_aliases: MetricsAliases = "none"
    """none or vllm. vllm adds the metrics under vLLM's names, for routers and load generators that read those."""
    auth: Auth = "on"
    """on, or off, which lets everybody in as admin and is refused on an address that other machines can reach."""
    data_dir: Path = Path("manylora-data")
    """Folder of the database, the blobs, the usage journal and the admin key."""
    drain_s: float = 30.0
    """Seconds that running requests have to finish after SIGTERM."""
    max_body_bytes: int = MIB
    """Largest JSON body, in bytes."""
    max_upload_bytes: int = 2 * GIB
    """Largest upload of an adapter, in bytes."""
    max_logprobs: int = 20
    """Largest number of alternatives per token in `logprobs`."""
    max_choices: int = 128
    """Largest `n`, and largest number of prompts in one completions request times `n`."""
    max_stops: int = 32
    """Largest number of stop strings of a request."""
    cors_origins: str = ""
    """Origins of web pages that may call the API with a key, separated by commas, such as https://chat.example.org; *
    allows all. These pages cannot use a session of the dashboard."""

    def __post_init__(self) -> None:
        _require(bool(self.host), "server.host", "an address", self.host)
        _check_bounds(
            "server", self, port=(0, 65535), metrics_port=(0, 65535), max_choices=(1, 4096)
        )
        _check_bounds(
            "server", self, max_body_bytes=(1024, math.inf), max_upload_bytes=(1024, math.inf)
        )
        _check_bounds(
            "server", self, max_logprobs=(0, 100), max_stops=(1, 1024), drain_s=(0, math.inf)
        )
        _check_choices("server", self, role=ServerRole, auth=Auth, metrics_aliases=MetricsAliases)
        url = self.advertised_url
        is_everywhere = self.host in ("0.0.0.0", "::")  # noqa: S104 - refused
        is_own = (
            _is_server_url(url)
            if url is not None
            else not (is_everywhere and self.role == "replica")
        )
        own = "set to this server's own address, such as http://10.0.0.7:8000 or http://[fd00::7]:8000"
        _require(is_own, "server.advertised_url", own, url and re.sub(".*@", "...@", url))
        for origin in self.allowed_origins:
            is_origin = origin == "*" or re.fullmatch(r"\w+://[^/\s*]+", origin) is not None
            _require(
                is_origin, "server.cors_origins", "origins such as https://chat.example.org", origin
            )
        is_safe = self.auth == "on" or is_loopback(self.host)
        _require(
            is_safe,
            "server.auth",
            f"on when server.host is not a loopback address ({self.host})",
            self.auth,
        )

    @property
    def allowed_origins(self) -> list[str]:
        """`cors_origins` as a list, in lower case as browsers send them."""
        return [origin.strip() for origin in self.cors_origins.lower().split(",") if origin.strip()]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryConfig:
    """Storage of tenants, keys, adapters and usage."""

    database_url: str | None = None
    """sqlite:///PATH or postgresql://USER:PASSWORD@HOST/DATABASE; when not set, SQLite in the data folder."""
    blob_url: str | None = None
    """Store of the adapters: a folder, file:///folder or s3://bucket[/prefix]; when not set, blobs/ in the data
    folder. Keys, region and endpoint of S3 come from the AWS_... variables of the environment."""
    blob_cache_gib: float = 10.0
    """With S3: largest size in GiB of the copies in blob-cache/ in the data folder. The least recently used go
    first."""
    price_file: Path | None = None
    """YAML file of prices per million tokens; with it, usage shows costs."""

    def __post_init__(self) -> None:
        if self.blob_url and not _BLOB_URL.fullmatch(self.blob_url):
            # The message does not repeat the value, because it may contain a secret.
            raise ConfigError(
                "registry.blob_url must be a folder, file:///folder or s3://bucket[/prefix]. Keys, region and endpoint "
                "of S3 go into AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL.",
                param="registry.blob_url",
            )
        _check_bounds("registry", self, blob_cache_gib=(0, math.inf))

    @property
    def s3_place(self) -> tuple[str, str] | None:
        """Bucket and prefix, which may be empty; None if blobs are in a folder."""
        if not (self.blob_url or "").startswith("s3://"):
            return None
        bucket, _, prefix = str(self.blob_url).removeprefix("s3://").partition("/")
        return bucket, prefix.strip("/")

    def blob_dir(self, data_dir: Path) -> Path:
        """Folder of the adapter blobs, or of their copies if they are in S3."""
        if self.s3_place is not None:
            return data_dir / "blob-cache"
        if not self.blob_url:
            return data_dir / "blobs"
        return Path(
            unquote(self.blob_url[7:]) if self.blob_url.startswith("file://") else self.blob_url
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantDefaults:
    """Limits of a new tenant, unless it is created with others; null is no limit. Changes affect only new tenants."""

    requests_per_minute: int | None = 60_000
    """Requests in any 60 seconds. Refused requests do not count."""
    tokens_per_minute: int | None = None
    """Prompt and generated tokens in any 60 seconds."""
    concurrent_requests: int | None = 2048
    """Requests at the same time. Each needs a connection and memory."""
    tokens_per_month: int | None = None
    """Billed tokens in a calendar month (UTC)."""
    adapters: int | None = 4096
    """Number of adapters."""
    stored_bytes: int | None = 64 * GIB
    """Bytes of all versions of its adapters."""
    adapter_pages: int | None = None
    """Device pages of one adapter, beside the limit of its rank by `adapter.max_rank`."""
    pinned_pages: int | None = 1024
    """Device pages of all pinned adapters, which others cannot use. With an 8B model, 1024 pages are about 25 adapters
    of rank 16."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            _require(
                value is None or 0 <= value < 1 << 63,
                f"tenant_defaults.{name}",
                "null or >= 0",
                value,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Batches: files of requests that run on the capacity that interactive traffic leaves."""

    max_file_bytes: int = 200 * MIB
    """Largest file of requests, in bytes."""
    max_lines: int = 50_000
    """Largest number of requests in one batch."""
    max_files: int = 500
    """Largest number of files of a tenant, with results."""
    max_stored_bytes: int = 10 * GIB
    """Largest size of all files of a tenant, in bytes."""
    max_running: int = 128
    """Largest number of requests of all batches that run on this server at once. Tenants share it by weight. A tenant
    that comes later gets its share at once, above this number until lines of others have ended."""

    def __post_init__(self) -> None:
        _check_bounds("batch", self, **dict.fromkeys(self.__slots__, (1, math.inf)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings."""

    model: ModelConfig
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    tenant_defaults: TenantDefaults = field(default_factory=TenantDefaults)
    batch: BatchConfig = field(default_factory=BatchConfig)

    @property
    def blob_dir(self) -> Path:
        """Folder of the adapter blobs, or of their copies if they are in S3."""
        return self.registry.blob_dir(self.server.data_dir)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The settings of a gateway, which has no model."""

    server: ServerConfig
    registry: RegistryConfig


def _is_server_url(url: str) -> bool:
    """True if it has http or https, a host that others can reach, perhaps a port, and nothing else."""
    found = _SERVER_URL.fullmatch(url)
    if found is None or not 0 < int(found[3] or 80) <= 65535:
        return False
    try:
        return not ipaddress.ip_address(found[1] or found[2]).is_unspecified
    except ValueError:
        return found[2] is not None  # a name


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_loopback(host: str) -> bool:
    """True if `host` is reachable only from this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # it is a name
        return False


def environment() -> dict[str, str]:
    """Copy the process environment. No other place reads it."""
    return dict(os.environ)  # noqa: TID251 - this is the one place
