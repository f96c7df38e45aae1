"""What the scheduler needs of the residency, as a protocol: the real one fits, and a simulated one does too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from weft.adapters.ref import AdapterRef, AdapterTier
from weft.adapters.residency.slots import SlotLease
from weft.engine.status import ResidentAdapter


class AdapterResidency(Protocol):
    """Where adapters are, and the holds on them; `weft.adapters.residency.residency.Residency` is the real one."""

    reserve_pages: int
    """Pages that placing an adapter leaves to running requests; set by the scheduler."""

    @property
    def is_copying(self) -> bool:
        """Whether an adapter has pages that cannot be evicted yet, because they are being copied; O(1)."""

    @property
    def lacks_slot(self) -> bool:
        """Whether no slot is free or on its way to be, because requests run with, or hold, all that have one."""

    def state(self, digest: str, /) -> AdapterTier:
        """Where the adapter is now."""

    def pages_needed(self, ref: AdapterRef, /) -> int | None:
        """Pages it takes on the device; None while unknown."""

    def want(self, ref: AdapterRef, /) -> None:
        """Start loading if needed, and hold it for one waiting request."""

    def unwant(self, digest: str, /) -> None:
        """Drop one hold."""

    def drop_holds(self, keep: str | None = None, /) -> None:
        """Drop the holds of all waiting requests, except those on the adapter `keep`."""

    def expect(self, digests: Sequence[str], /) -> None:
        """Adapters of waiting requests, first to be served first: they are loaded and get pages in this order."""

    def acquire(self, digest: str, /) -> SlotLease | None:
        """Take a running reference; None while it is not on the device."""

    def release(self, digest: str, last_step: int = 0, /) -> None:
        """Give a running reference back; `last_step` is the last step that may still read the adapter."""

    def waiting_reason(self, digest: str, /) -> Literal["LOADING", "NO_ROOM"]:
        """Why a wanted adapter is not on the device yet."""

    def residents(self) -> Sequence[ResidentAdapter]:
        """Adapters on the device, in the host slab, or on their way."""
