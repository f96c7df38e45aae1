"""Keeps the engine's pins equal to the registry's: a pinned adapter's current version stays on the device.

The engine knows pins by digest, and several adapters may have the same one; so each change is followed by comparing
all of them. A pin brings the adapter to the device as soon as there is room, so that its first request need not wait.
"""

from __future__ import annotations

from weft.server.services import Services


async def settle_pins(services: Services) -> None:
    """Tell the engine where its pins differ from the registry's."""
    async with services.pin_lock:
        pinned = await services.registry.pinned_adapters()
        wanted = {adapter.current.digest for adapter in pinned}
        for digest, ref in list(services.told_pins.items()):
            if digest not in wanted:
                await services.engine.pin_adapter(ref, False)
                del services.told_pins[digest]
        for adapter in pinned:
            ref = adapter.ref()
            if ref.digest not in services.told_pins:
                services.metrics.learn_adapter(ref.digest, adapter.tenant, adapter.name)
                await services.engine.pin_adapter(ref, True)
                services.told_pins[ref.digest] = ref
