"""The objects that the routes work with: made once at the start, and found in `app.state.services`."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, cast

from fastapi import Depends
from starlette.requests import Request

import manylora
from manylora.errors import EngineUnavailableError
from manylora.server.adapters.upload_guards import Intake
from manylora.server.http.body import Pace
from manylora.server.limits.arrivals import Arrivals
from manylora.server.limits.fair_semaphore import FairSemaphore
from manylora.server.limits.windows import Accounts
from manylora.server.long_work import LongWork
from manylora.server.status.feed import EngineFeed

if TYPE_CHECKING:
    from manylora.adapters.blobs.memory import MemoryBlobs
    from manylora.adapters.blobs.store import BlobStore
    from manylora.adapters.ref import AdapterRef
    from manylora.config import Config
    from manylora.engine.process.client import EngineClient
    from manylora.engine.status import EngineReady, EngineStatus
    from manylora.engine.text.tokenizer import Tokenizer
    from manylora.registry.db.models import TenantRow
    from manylora.registry.registry import Registry
    from manylora.registry.usage.prices import PriceTable
    from manylora.server.adapters.staged_files import StagedFiles
    from manylora.server.adapters.validation import AdapterValidator
    from manylora.server.drain import Drain
    from manylora.server.limits.gate import Gate
    from manylora.server.sandbox.chat_renderer import ChatRenderer
    from manylora.server.sandbox.grammar_checker import GrammarChecker
    from manylora.server.status.metrics import Metrics

STATUS_S = 10.0
"""Longest wait in seconds for the engine's status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """All that the routes need."""

    config: Config
    registry: Registry
    engine: EngineClient
    ready: EngineReady
    """What the engine was at the first start; a restart changes nothing in it but the boot id."""
    tokenizer: Tokenizer
    chats: ChatRenderer
    """Renders chats for the tokenizer."""
    grammars: GrammarChecker
    """Checks grammars for the tokenizer."""
    tokenizer_settings: Mapping[str, object]
    """What the checkpoint's tokenizer_config.json says, for clients."""
    blobs: BlobStore
    validator: AdapterValidator
    metrics: Metrics
    drain: Drain
    staged: StagedFiles
    """Files of uploads in pieces, while they come."""
    server_name: str
    """Of this server among those over one database."""
    memory: MemoryBlobs
    """Weights of ephemeral versions."""
    held: Counter[str] = field(default_factory=Counter)
    """Requests by the weights of their ephemeral version, from when they found it."""
    intake: Intake = field(default_factory=Intake)
    """Uploads that are being received right now."""
    prices: PriceTable | None = None
    """What tokens cost; None shows no cost."""
    default_tenant: TenantRow | None = None
    """The tenant an admin acts for by default; set where authentication is off."""
    removals: set[asyncio.Task[None]] = field(default_factory=set)
    """Deletions that wait for the last request of an adapter to end."""
    synced_pins: dict[str, AdapterRef] = field(default_factory=dict)
    """Adapters that the engine was told to pin, by digest."""
    is_duty: Callable[[str, int], bool] = lambda *_: True
    """Whether this server is one of those that keep so many copies of a pinned version, by digest. After its answers
    have changed, call `sync_pins`."""
    pin_turns: FairSemaphore = field(default_factory=lambda: FairSemaphore(1))
    """Whose place is held while the engine is told what to pin."""
    accounts: Accounts = field(default_factory=Accounts)
    """How much of their limits callers have used."""
    pace: Pace = field(default_factory=Pace)
    """How slowly clients may send."""
    gate: Gate
    """Decides which requests may wait in the engine."""
    arrivals: Arrivals = field(default_factory=Arrivals)
    """Decides which tenant's request the event loop goes on with."""
    long_work: LongWork = field(default_factory=LongWork)
    """Parses and tokenizes what is long."""
    batches_changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when this process made or cancelled a batch, so that the worker need not wait for its next look."""
    engine_feed: EngineFeed = field(default_factory=EngineFeed)
    """The engine's live feed, shared by all listeners."""
    monotonic: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def uses(self, weights_sha256: str) -> bool:
        """Whether a request that has not ended may still have to load these weights."""
        return self.held[weights_sha256] > 0 or self.engine.uses(weights_sha256)

    @property
    def base_names(self) -> tuple[str, ...]:
        """Names of the base, the one that clients call it by first."""
        return base_names(self.config)

    @property
    def served_name(self) -> str:
        """The name by which clients call the base."""
        return self.base_names[0]

    async def engine_status(
        self, within_s: float = STATUS_S, *, is_detailed: bool = False
    ) -> EngineStatus:
        """The engine's status, with `page_map` and `batches` if it is detailed.

        Raises:
            EngineUnavailableError: The engine is away, or busy for longer than `within_s` seconds.
        """
        try:
            async with asyncio.timeout(within_s):
                return await self.engine.status(is_detailed=is_detailed)
        except TimeoutError as error:
            raise EngineUnavailableError(
                "The engine does not answer; try again.", code="engine_busy"
            ) from error

    @property
    def fingerprint(self) -> str:
        """Changes whenever seeded sampling may change."""
        ready, kv = self.ready, "-kv-int8" if self.ready.geometry.is_kv_int8 else ""
        digest = ready.base.digest.removeprefix("sha256:")[:12]
        return f"manylora-{manylora.__version__}-{digest}-{ready.dtype}-{ready.memory.weights}{kv}"


def services_of(request: Request) -> Services:
    """The services of the app that took this request."""
    return cast(Services, request.app.state.services)


async def _wired(request: Request) -> Services:
    """`services_of` as a dependency; async, because FastAPI would run a plain function in a thread."""
    return services_of(request)


Wired = Annotated[Services, Depends(_wired)]


def base_names(config: Config) -> tuple[str, ...]:
    """Names of the base, the one that clients call it by first: `model.served_name`, the last part of the path."""
    own = config.model.path.rstrip("/").rsplit("/", 1)[-1]
    return (config.model.served_name, own) if config.model.served_name else (own,)
