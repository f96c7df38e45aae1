"""The services that answer a generation, each under a type as narrow as its use. `services.py` adds all others."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from fastapi import Depends
from starlette.requests import Request

import manylora
from manylora.registry.db.clock import utc_now
from manylora.server.limits.accounts import Accounts
from manylora.server.limits.turns import Arrivals

if TYPE_CHECKING:
    from manylora.config import Config
    from manylora.engine.request import GenerationRequest, RequestOutput
    from manylora.engine.status import EngineReady
    from manylora.engine.text.tokenizer import Tokenizer
    from manylora.registry.db.models import TenantRow
    from manylora.registry.limits import Limits
    from manylora.registry.records import ResolvedModel, UsageEvent
    from manylora.server.http.body import BodyReader
    from manylora.server.limits.gate import Gate
    from manylora.server.process.drain import Drain
    from manylora.server.sandbox.chat_renderer import ChatRenderer
    from manylora.server.sandbox.grammar_checker import GrammarChecker
    from manylora.server.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Time as this server reads it."""

    monotonic: Callable[[], float] = time.monotonic
    """Seconds that never jump."""
    now: Callable[[], datetime] = utc_now
    started_at: datetime = field(default_factory=utc_now)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerLimits:
    """Limits that a request passes before the engine sees it."""

    gate: Gate
    """Decides which requests may wait in the engine."""
    accounts: Accounts = field(default_factory=Accounts)
    """Use of the limits of tenants and keys."""
    arrivals: Arrivals = field(default_factory=Arrivals)
    """Decides which tenant's request the event loop goes on with."""


class Engine(Protocol):
    """The engine as a generation uses it: an `EngineClient`."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of a request; closing the iterator aborts it."""

    def abort(self, request_id: str) -> None:
        """End a request."""


class Ledger(Protocol):
    """The usage ledger as a generation uses it: a `UsageLedger`."""

    def check(self) -> None:
        """Raise `CapacityError` if the end of a request cannot be recorded."""

    def mint_id(self) -> str:
        """A new ledger id."""

    def progress(self, event: UsageEvent) -> None:
        """Record the progress of a request."""

    async def record(self, event: UsageEvent) -> None:
        """Record the end of a request."""

    async def month_tokens(self, holder_id: str, month: datetime, but: Collection[str]) -> int:
        """Tokens of a month that were billed to a tenant or a key, without the events of these ids."""


class TenantLookup(Protocol):
    """Tenants as their callers need them: the registry's `Tenants`."""

    async def get_tenant(self, name: str) -> TenantRow:
        """The tenant of a name."""

    async def tenant_limits(self, tenant_id: str) -> Limits:
        """The limits of a tenant."""


class ModelLookup(Protocol):
    """Names of models as requests use them: `ModelNames`."""

    async def resolve(
        self,
        tenant_id: str | None,
        model: str | None,
        adapter_id: str | None = None,
        *,
        sticky: str = "",
    ) -> ResolvedModel:
        """The model that a request names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreServices:
    """The services of a server that a generation takes."""

    config: Config
    clock: Clock = field(default_factory=Clock)
    engine: Engine
    ready: EngineReady
    """State of the engine at its first start; a restart changes only the boot id."""
    tokenizer: Tokenizer
    chats: ChatRenderer
    """Renders chats for the tokenizer."""
    grammars: GrammarChecker
    """Checks grammars for the tokenizer."""
    ledger: Ledger
    tenants: TenantLookup
    models: ModelLookup
    hold_weights: Callable[[ResolvedModel, datetime], Callable[[], None]]
    """Keeps the weights of an ephemeral version for a request; returns the function that ends that."""
    limits: CallerLimits
    bodies: BodyReader
    drain: Drain
    metrics: Metrics
    default_tenant: TenantRow | None = None
    """Tenant for which an admin acts by default; set where authentication is off."""
    fingerprint: str = field(init=False)
    """Text that changes whenever seeded sampling may change."""

    def __post_init__(self) -> None:
        kv = "-kv-int8" if self.ready.geometry.is_kv_int8 else ""
        digest = self.ready.base.digest.removeprefix("sha256:")[:12]
        numbers = f"{self.ready.dtype}-{self.ready.memory.weights}{kv}"
        made = f"manylora-{manylora.__version__}-{digest}-{numbers}"
        object.__setattr__(self, "fingerprint", made)


async def services_of(request: Request) -> Any:  # noqa: ANN401 - what `Core` and `Wired` say
    """The app's services, as a dependency; async, because FastAPI would run a plain function in a thread."""
    return request.app.state.services


Core = Annotated[CoreServices, Depends(services_of)]
