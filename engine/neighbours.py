"""What scheduler and core need of their neighbours, as protocols: the real parts fit, and a simulator's do too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from weft.adapters.adapter_slots import SlotLease
from weft.adapters.ref import AdapterRef
from weft.adapters.resident import LoadFailure
from weft.engine.plan import ChunkResult, StepPlan
from weft.engine.status import ResidentAdapter


class AdapterResidency(Protocol):
    """Where adapters are, and the holds on them; `weft.adapters.residency.Residency` is the real one."""

    reserve_pages: int
    """Pages that placing an adapter leaves to running requests; set by the scheduler."""

    @property
    def is_copying(self) -> bool:
        """Whether an adapter has pages that cannot be evicted yet, because they are being copied; O(1)."""

    @property
    def lacks_slot(self) -> bool:
        """Whether no slot is free or on its way to be, because requests run with, or hold, all that have one."""

    def state(self, digest: str, /) -> Literal["device", "host", "stored"]:
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

    def check_slot(self, slot: int, generation: int, digest: str, /) -> None:
        """Raise StaleSlotError unless the slot still is what the lease says."""

    def residents(self) -> Sequence[ResidentAdapter]:
        """Adapters on the device, in the host slab, or on their way."""


class CoreResidency(AdapterResidency, Protocol):
    """What the core needs on top: it drives the loads and reports them."""

    @property
    def loads(self) -> dict[str, int]:
        """Loads since start, by `from>to:result`."""

    @property
    def load_seconds(self) -> float:
        """Sum over all loads."""

    @property
    def load_p95_s(self) -> dict[str, float]:
        """Seconds that 95 % of the last loads took at most, by `from>to`."""

    def tick(self, step: int, /) -> Sequence[LoadFailure]:
        """Finish loads and start copies; `step` is the last completed step."""

    def pin(self, ref: AdapterRef, pinned: bool, /) -> None:
        """Set whether the adapter stays on the device, and is brought there."""

    def forget(self, digest: str, /) -> None:
        """Let go of a deleted adapter as soon as nobody uses it."""

    def check(self, num_swap_pages: int = 0, /) -> None:
        """Raise where the accounts do not add up; so many host pages hold the KV cache of preempted requests."""

    def close(self) -> None:
        """End the loading threads."""


class StepRunner(Protocol):
    """Carries out a plan; `weft.engine.runner.ModelRunner` is the real one."""

    def execute(self, plan: StepPlan, /) -> list[ChunkResult]:
        """Run the step; one result per chunk, in the plan's order."""

    def close(self) -> None:
        """Give the device memory back."""
