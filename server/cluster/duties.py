"""Duties of a replica when the registry or the list of replicas changes.

It pins the adapters that are its part of the pins, and lets deleted adapters go. No server tells another to: each reads
the registry, and all compute the same order of replicas for an adapter.
"""

from __future__ import annotations

from functools import partial

from manylora.server.cluster.loads import ranked
from manylora.server.process.threads import repeat
from manylora.server.services import Services

LOOK_S = 0.5
"""Seconds between two looks; a change is followed within a second."""


class Duties:
    """Follows changes. Thread: the event loop's."""

    def __init__(self) -> None:
        self._name = ""
        self._replicas: tuple[str, ...] = ()
        """Names of the ready ones; empty before the first look, when there are no duties."""
        self._seen: object = None

    def is_own(self, digest: str, copies: int) -> bool:
        """True if this replica is among the first `copies` in the order of replicas for an adapter."""
        return self._name in ranked(digest, self._replicas)[:copies]

    async def follow(self, services: Services) -> None:
        """Look for changes, for ever."""
        self._name = services.server_name
        await repeat(partial(self._look, services), LOOK_S, "changes_not_followed")

    async def _look(self, services: Services) -> None:
        registry = services.registry
        listed = await registry.servers.listed("replica")
        replicas = tuple(server.name for server in listed if server.state == "ready")
        now = (await registry.last_change(), replicas)
        if now == self._seen:
            return
        self._replicas = replicas
        await services.versions.pins.sync()
        await _drop_deleted(services)
        self._seen = now


async def _drop_deleted(services: Services) -> None:
    """Have the engine drop adapters that are no version's any more; requests that run with them finish."""
    digests = {resident.digest for resident in (await services.engine_status()).residents}
    known = await services.registry.adapters.version_names(digests)
    for digest in digests - known.keys():
        await services.engine.drop_adapter(digest)
