"""What a replica does by itself when the registry, or the list of replicas, changes.

It pins the adapters that are its part of the pins, and lets deleted adapters go. No server tells another to: each reads
the registry, and all compute the same order of replicas for an adapter.
"""

from __future__ import annotations

import asyncio

import structlog

from weft.errors import CapacityError
from weft.server.cluster.loads import ranked
from weft.server.pins import sync_pins
from weft.server.services import Services

log = structlog.get_logger("weft.server")
LOOK_S = 0.5
"""Seconds between two looks; a change is followed within a second."""


class Duties:
    """Follows changes. Thread: the event loop's."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._replicas: tuple[str, ...] = (services.server_name,)
        self._seen: object = None

    def is_own(self, digest: str, copies: int) -> bool:
        """Whether this replica is among the first ones for an adapter that is to be on so many."""
        return self._services.server_name in ranked(digest, self._replicas)[:copies]

    async def follow(self) -> None:
        """Look for changes, for ever."""
        while True:
            try:
                await self._look()
            except CapacityError as error:
                log.warning("changes_not_followed", error=error.message)  # the next look does it
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        registry = self._services.registry
        listed = await registry.servers.listed("replica")
        replicas = tuple(server.name for server in listed if server.state == "ready")
        now = (await registry.last_change(), replicas)
        if now == self._seen:
            return
        self._replicas = replicas
        await sync_pins(self._services)
        await self._drop_deleted()
        self._seen = now

    async def _drop_deleted(self) -> None:
        """Have the engine drop adapters that no version is any more; those that run finish."""
        status = await self._services.engine_status()
        digests = {resident.digest for resident in status.residents}
        known = await self._services.registry.adapters.version_names(digests)
        for digest in digests - known.keys():
            await self._services.engine.drop_adapter(digest)
