"""The objects that the routes work with: made once at the start, and found in `app.state.services`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, cast

from fastapi import Depends
from starlette.requests import Request

import manylora
from manylora.errors import EngineUnavailableError
from manylora.server.limits.accounts import Accounts
from manylora.server.limits.arrivals import Arrivals
from manylora.server.telemetry.feed import EngineFeed

if TYPE_CHECKING:
    from manylora.adapters.blobs.store import BlobStore
    from manylora.config import Config
    from manylora.engine.process.client import EngineClient
    from manylora.engine.status import EngineReady, EngineStatus
    from manylora.engine.text.tokenizer import Tokenizer
    from manylora.registry.db.models import TenantRow
    from manylora.registry.registry import Registry
    from manylora.server.http.json_body import BodyReader
    from manylora.server.limits.gate import Gate
    from manylora.server.process.drain import Drain
    from manylora.server.sandbox.chat_renderer import ChatRenderer
    from manylora.server.sandbox.grammar_checker import GrammarChecker
    from manylora.server.telemetry.metrics import Metrics
    from manylora.server.uploads.uploads import Uploads
    from manylora.server.versions.garbage import BlobGarbage, EphemeralWeights
    from manylora.server.versions.names import ModelNames
    from manylora.server.versions.pins import PinKeeper

STATUS_S = 10.0
"""Longest wait in seconds for the engine's status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Time as this server reads it."""

    monotonic: Callable[[], float] = time.monotonic
    """Seconds that never jump."""
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerLimits:
    """Limits that a request passes before the engine sees it."""

    gate: Gate
    """Decides which requests may wait in the engine."""
    accounts: Accounts = field(default_factory=Accounts)
    """Use of the limits of tenants and keys."""
    arrivals: Arrivals = field(default_factory=Arrivals)
    """Decides which tenant's request the event loop goes on with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Versions of adapters on this server."""

    names: ModelNames
    weights: EphemeralWeights
    pins: PinKeeper
    garbage: BlobGarbage


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The parts of a server."""

    config: Config
    server_name: str
    """Name of this server among those over one database."""
    clock: Clock = field(default_factory=Clock)
    registry: Registry
    blobs: BlobStore
    engine: EngineClient
    ready: EngineReady
    """State of the engine at its first start; a restart changes only the boot id."""
    tokenizer: Tokenizer
    chats: ChatRenderer
    """Renders chats for the tokenizer."""
    grammars: GrammarChecker
    """Checks grammars for the tokenizer."""
    versions: Versions
    uploads: Uploads
    limits: CallerLimits
    bodies: BodyReader
    drain: Drain
    metrics: Metrics
    engine_feed: EngineFeed = field(default_factory=EngineFeed)
    """Live feed of the engine, shared by all listeners."""
    default_tenant: TenantRow | None = None
    """Tenant for which an admin acts by default; set where authentication is off."""

    @property
    def served_name(self) -> str:
        """Name by which clients call the base."""
        return base_names(self.config)[0]

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
        """Text that changes whenever seeded sampling may change."""
        kv = "-kv-int8" if self.ready.geometry.is_kv_int8 else ""
        digest = self.ready.base.digest.removeprefix("sha256:")[:12]
        numbers = f"{self.ready.dtype}-{self.ready.memory.weights}{kv}"
        return f"manylora-{manylora.__version__}-{digest}-{numbers}"


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
