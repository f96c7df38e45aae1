"""The engine's pins, kept equal to the registry's: a pinned adapter's current version stays on the device.

A pin asks for a number of copies: among several servers, `PinKeeper.keeps_pin` says which pins this one has to keep.

The engine knows pins by digest, and several adapters may share one, so each change compares all pins. A pinned
adapter is loaded as soon as there is room; its first request need not wait.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from manylora.adapters.ref import AdapterRef
from manylora.errors import AdapterUnavailableError, ForbiddenError
from manylora.registry.records import Adapter, VersionFacts
from manylora.server.process.fair_semaphore import FairSemaphore
from manylora.server.process.threads import acting

if TYPE_CHECKING:
    from manylora.engine.process.client import EngineClient
    from manylora.registry.registry import Registry


@dataclass(eq=False, kw_only=True)
class PinKeeper:
    """Tells the engine what to pin. Thread: the event loop's."""

    registry: Registry
    engine: EngineClient
    server: str
    """Name of this server."""
    pages: Callable[[VersionFacts], Awaitable[int | None]]
    """Gives the device pages of a version; None where its weights cannot be read."""
    on_pin: Callable[[str, str, str, int], None]
    """Called with digest, tenant, name and rank of an adapter before it is pinned."""
    on_refusal: Callable[[str], None]
    """Called with the name of the limit that refuses a pin."""
    keeps_pin: Callable[[str, int], bool] = lambda *_: True
    """Tells for a digest and a number of copies if this server keeps one of them. After a change of its answers, call
    `sync`."""
    _synced: dict[str, AdapterRef] = field(default_factory=dict, init=False)
    """Adapters that the engine has pinned, by digest."""
    _turns: FairSemaphore = field(default_factory=lambda: FairSemaphore(1), init=False)

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Wait for the tenant's turn to change pins, and have it for the length of the block."""
        return self._turns.place(*acting.get())

    async def check_pages(
        self, adapter: Adapter, versions: Iterable[VersionFacts], copies: int
    ) -> None:
        """Return if the adapter's tenant may have `copies` of these versions pinned.

        The limit is the tenant's, also for an admin.

        Raises:
            ForbiddenError: Together with the other pins they exceed the limit; code quota.pinned_pages.
            AdapterUnavailableError: Its weights cannot be read, so their number of pages is unknown.
        """
        limit = (await self.registry.tenants.tenant_limits(adapter.tenant_id)).pinned_pages
        if limit is None:
            return
        pages = 0
        for version in versions:
            count = await self.pages(version)
            if count is None:
                raise AdapterUnavailableError(
                    "The adapter's weights cannot be read now; try again later."
                )
            pages += count * copies
        taken = await self.pinned_pages(adapter.tenant_id, besides=adapter.id)
        if taken + pages > limit:
            self.on_refusal("pinned_pages")
            numbers = f"is {limit}: {taken} are pinned, and this adapter takes {pages}"
            message = f"The tenant's limit pinned_pages {numbers}. Unpin another one."
            raise ForbiddenError(message, code="quota.pinned_pages", param="pinned")

    async def pinned_pages(self, tenant_id: str, besides: str | None = None) -> int:
        """Device pages of all copies of the tenant's pinned adapters, without the one of the id `besides`."""
        pages = 0
        for adapter in await self.registry.adapters.pinned_adapters():
            if adapter.tenant_id == tenant_id and adapter.id != besides:
                pages += (await self.pages(adapter.current) or 0) * adapter.pinned_copies
        return pages

    async def sync(self) -> None:
        """Send the engine the changes that make its pins those of the registry that this server has to keep."""
        async with self.turn():
            every = await self.registry.adapters.pinned_adapters()
            own = [adapter for adapter in every if self._is_kept_here(adapter)]
            wanted = {adapter.current.digest for adapter in own}
            for digest, ref in list(self._synced.items()):
                if digest not in wanted:
                    await self.engine.pin_adapter(ref, False)
                    del self._synced[digest]
            for adapter in own:
                ref = adapter.ref(adapter.current)
                if ref.digest not in self._synced:
                    self.on_pin(ref.digest, adapter.tenant, adapter.name, ref.config.rank)
                    await self.engine.pin_adapter(ref, True)
                    self._synced[ref.digest] = ref

    def forget(self, digest: str) -> None:
        """Note that the engine drops this adapter, and its pin with it."""
        self._synced.pop(digest, None)

    def _is_kept_here(self, adapter: Adapter) -> bool:
        holder = adapter.current.held_by
        if holder is not None:
            return holder == self.server
        return self.keeps_pin(adapter.current.digest, adapter.pinned_copies)
