"""Adapter slots, which are rows of the adapter tables: the adapter in each, and its generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from manylora.errors import PageAccountingError, StaleSlotError
from manylora.memory.pool import PagePool


class SlotLease(NamedTuple):
    """An adapter slot in one generation."""

    slot: int
    generation: int
    digest: str


class AdapterSlots:
    """Hands out adapter slots. Each time a slot is taken, its generation goes up.

    Args:
        count: Number of slots.
    """

    def __init__(self, count: int) -> None:
        self._pool = PagePool(count, first_page=0)
        """Pool of the slots, which are handed out and quarantined like pages."""
        self.complete = self._pool.complete
        """Note that all steps up to one are complete."""
        self._generations = [0] * count
        self._leases: list[SlotLease | None] = [None] * count

    @property
    def num_free(self) -> int:
        """Slots that can be taken now."""
        return self._pool.num_free

    @property
    def all_taken(self) -> bool:
        """True if no slot can be taken now or once a step is complete."""
        return not self._pool.num_free and not self._pool.num_quarantined

    def take(self, digest: str) -> SlotLease | None:
        """Take a slot for an adapter; None if none is free."""
        slots = self._pool.allocate(1, "adapter")
        if slots is None:
            return None
        (slot,) = slots
        self._generations[slot] += 1
        lease = self._leases[slot] = SlotLease(slot, self._generations[slot], digest)
        return lease

    def free(self, slot: int, last_step: int) -> None:
        """Free a slot; it can be taken again once `last_step` is complete.

        Raises:
            PageAccountingError: The slot is free.
        """
        self._pool.free([slot], last_step)
        self._leases[slot] = None

    def check_lease(self, lease: SlotLease) -> None:
        """Verify that a lease still holds.

        Raises:
            StaleSlotError: The slot was freed or reused since, or never had that adapter.
        """
        current = self._leases[lease.slot] if 0 <= lease.slot < len(self._leases) else None
        if current != lease:
            raise StaleSlotError(
                f"adapter slot {lease.slot} is {current or 'free'}, expected {lease}"
            )

    def check(self, owners: Mapping[int, str]) -> None:
        """Verify that exactly these slots are taken, by these adapters.

        Raises:
            PageAccountingError: If not, or if a slot is in two places.
        """
        self._pool.check()
        taken = {slot: lease.digest for slot, lease in enumerate(self._leases) if lease is not None}
        if taken != owners or len(taken) != self._pool.counts()["adapter"]:
            raise PageAccountingError(f"adapter slots: {len(taken)} taken, owners are {owners}")
