"""The adapter slots, which are rows of the adapter tables: the adapter in each, and how often it was reused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from weft.errors import PageAccountingError, StaleSlotError


class SlotLease(NamedTuple):
    """An adapter slot as of one generation."""

    slot: int
    generation: int
    digest: str


class AdapterSlots:
    """Hands out adapter slots; each time a slot is taken its generation goes up.

    Args:
        count: Slots.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._cooling: list[tuple[int, int]] = []
        """(last step that may use it, slot)."""
        self._generations = [0] * count
        self._leases: list[SlotLease | None] = [None] * count
        self._completed_step = 0

    @property
    def num_free(self) -> int:
        """Slots that can be taken now."""
        return len(self._free)

    @property
    def all_taken(self) -> bool:
        """Whether there is none that can be taken now, or as soon as a step is complete."""
        return not self._free and not self._cooling

    def take(self, digest: str) -> SlotLease | None:
        """Take a slot for an adapter, or None."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._generations[slot] += 1
        lease = self._leases[slot] = SlotLease(slot, self._generations[slot], digest)
        return lease

    def free(self, slot: int, last_step: int) -> None:
        """Free a slot; it can be taken again once `last_step` is complete.

        Raises:
            PageAccountingError: The slot is free.
        """
        if self._leases[slot] is None:
            raise PageAccountingError(f"adapter slot {slot} is free already")
        self._leases[slot] = None
        self._cooling.append((last_step, slot))
        self.complete(self._completed_step)

    def complete(self, step: int) -> None:
        """Note that all steps up to `step` are complete."""
        self._completed_step = max(self._completed_step, step)
        self._free.extend(slot for last_step, slot in self._cooling if last_step <= self._completed_step)
        self._cooling = [(last_step, slot) for last_step, slot in self._cooling if last_step > self._completed_step]

    def check_lease(self, lease: SlotLease) -> None:
        """Verify that a lease still holds.

        Raises:
            StaleSlotError: The slot was freed or reused since, or never had that adapter.
        """
        current = self._leases[lease.slot] if 0 <= lease.slot < len(self._leases) else None
        if current != lease:
            raise StaleSlotError(f"adapter slot {lease.slot} is {current or 'free'}, expected {lease}")

    def check(self, owners: Mapping[int, str]) -> None:
        """Verify that exactly these slots are taken, by these adapters.

        Raises:
            PageAccountingError: If not, or if a slot is in two places.
        """
        taken = {slot: lease.digest for slot, lease in enumerate(self._leases) if lease is not None}
        free = [*self._free, *(slot for _, slot in self._cooling)]
        if taken != owners or sorted([*free, *taken]) != list(range(len(self._leases))):
            raise PageAccountingError(f"adapter slots: {len(taken)} taken, {len(free)} free, owners are {owners}")
