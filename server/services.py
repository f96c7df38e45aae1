"""All services that the routes work with: made once at the start, and found in `app.state.services`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends

from manylora.errors import EngineUnavailableError
from manylora.server.core_services import CoreServices, services_of
from manylora.server.telemetry.feed import EngineFeed

if TYPE_CHECKING:
    from manylora.adapters.blobs.store import BlobStore
    from manylora.config import Config
    from manylora.engine.process.client import EngineClient
    from manylora.engine.status import EngineStatus
    from manylora.registry.registry import Registry
    from manylora.server.uploads.uploads import Uploads
    from manylora.server.versions.garbage import BlobGarbage, EphemeralWeights
    from manylora.server.versions.pins import PinKeeper

STATUS_S = 10.0
"""Longest wait in seconds for the engine's status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Versions of adapters on this server."""

    weights: EphemeralWeights
    pins: PinKeeper
    garbage: BlobGarbage


@dataclass(frozen=True, slots=True, kw_only=True)
class Services(CoreServices):
    """The parts of a server."""

    server_name: str
    """Name of this server among those over one database."""
    registry: Registry
    blobs: BlobStore
    engine: EngineClient
    versions: Versions
    uploads: Uploads
    engine_feed: EngineFeed = field(default_factory=EngineFeed)
    """Live feed of the engine, shared by all listeners."""

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


Wired = Annotated[Services, Depends(services_of)]


def base_names(config: Config) -> tuple[str, ...]:
    """Names of the base, the one that clients call it by first: `model.served_name`, the last part of the path."""
    own = config.model.path.rstrip("/").rsplit("/", 1)[-1]
    return (config.model.served_name, own) if config.model.served_name else (own,)
