"""Weights of ephemeral versions, which lie in this server's memory for as long as a request may need them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from manylora.errors import AdapterUnavailableError
from manylora.registry.names import model_not_found
from manylora.server.versions.resolved_model import ResolvedModel

if TYPE_CHECKING:
    from manylora.adapters.blobs.memory import MemoryBlobs
    from manylora.engine.process.client import EngineClient


class EphemeralWeights:
    """Weights in memory, by their SHA-256 (64 hex digits), and the requests that hold them. Thread: the event loop's.

    Args:
        blobs: The weights.
        engine: Loads adapters from them.
        server: Name of this server, by which a version says who has its weights.
    """

    def __init__(self, blobs: MemoryBlobs, engine: EngineClient, server: str) -> None:
        self.blobs = blobs
        self._engine = engine
        self._server = server
        self._held: Counter[str] = Counter()
        """Requests by the weights of their version."""

    def hold(self, model: ResolvedModel, now: datetime) -> Callable[[], None]:
        """Keep the weights of an ephemeral version for a request; returns the function that ends that.

        Raises:
            NotFoundError: The version's time is over; code model_not_found.
            AdapterUnavailableError: This server's memory does not have the weights; code adapter_not_here.
        """
        version = model.version
        if version is None or (version.expires_at is not None and version.expires_at <= now):
            raise model_not_found(model.name)
        weights = version.weights_sha256
        if version.held_by != self._server or weights not in self.blobs:
            message = f"Version {version.version} of `{model.name}` is ephemeral, and not in the memory of this server."
            hint = "Ask the server that it was pushed to, or push it to this one."
            raise AdapterUnavailableError(f"{message} {hint}", code="adapter_not_here")
        self._held[weights] += 1

        def release() -> None:
            self._held[weights] -= 1
            if not self._held[weights]:
                del self._held[weights]

        return release

    def is_used(self, weights: str) -> bool:
        """Return true if a request that has not ended may still have to load these weights, in memory or stored."""
        return self._held[weights] > 0 or self._engine.uses(weights)

    async def free(self, weights: str) -> None:
        """Free weights that no version has any more; a sweep deletes a blob of them in the store."""
        self.blobs.delete(weights)
        await self._engine.drop_weights(weights)
