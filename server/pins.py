"""Keeps the engine's pins equal to the registry's: a pinned adapter's current version may not be evicted.

The engine knows pins by digest, and several adapters may have the same one; so each change is followed by comparing
all of them.
"""

from __future__ import annotations

from weft.server.services import Services


async def settle_pins(services: Services) -> None:
    """Tell the engine where its pins differ from the registry's."""
    async with services.pin_lock:
        wanted = await services.registry.pinned_digests()
        for digest in services.told_pins.difference(wanted):
            await services.engine.pin_adapter(digest, False)
            services.told_pins.discard(digest)
        for digest in wanted:
            if digest not in services.told_pins:
                await services.engine.pin_adapter(digest, True)
                services.told_pins.add(digest)
