"""How many lines run at once, and whose turn it is: tenants share alike, then the batches of a tenant.

Thread: the event loop's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    tenant_id: str
    batch_id: str
    turn: asyncio.Future[None]


class LineSlots:
    """So many places. One that falls free goes to the batch whose tenant, and which itself, has the fewest."""

    def __init__(self, total: int) -> None:
        self._free = total
        self._held: Counter[str] = Counter()
        self._waiting: list[_Waiter] = []

    async def take(self, tenant_id: str, batch_id: str) -> None:
        """Wait for a place; whoever has it calls `free`."""
        if not self._free:
            waiter = _Waiter(tenant_id, batch_id, asyncio.get_running_loop().create_future())
            self._waiting.append(waiter)
            try:
                await waiter.turn
            except asyncio.CancelledError:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
                else:  # it was our turn already
                    self.free(tenant_id, batch_id)
                raise
            return
        self._free -= 1
        self._count(tenant_id, batch_id, 1)

    def free(self, tenant_id: str, batch_id: str) -> None:
        """Leave a place."""
        self._count(tenant_id, batch_id, -1)
        if not self._waiting:
            self._free += 1
            return
        waiter = min(self._waiting, key=lambda each: (self._held[each.tenant_id], self._held[each.batch_id]))
        self._waiting.remove(waiter)
        self._count(waiter.tenant_id, waiter.batch_id, 1)
        waiter.turn.set_result(None)

    def _count(self, tenant_id: str, batch_id: str, change: int) -> None:
        for name in (tenant_id, batch_id):
            self._held[name] += change
            if not self._held[name]:
                del self._held[name]
