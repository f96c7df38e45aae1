"""One adapter that is on the device or on its way there, as the evictor sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from weft.adapters.host_images import HostImage
from weft.adapters.known_adapters import KnownAdapter
from weft.adapters.load_queue import LAST_TURN, LoadJob
from weft.adapters.ref import AdapterRef
from weft.memory.eviction import UseCount
from weft.memory.pool import PageKind


class Stage(Enum):
    """How far it is."""

    QUEUED = "queued"
    LOADING = "loading"
    PLACING = "placing"
    COPYING = "copying"
    DEVICE = "device"


@dataclass(eq=False, kw_only=True)
class Entry:
    """An adapter with what it has. Changed by the residency alone."""

    ref: AdapterRef
    known: KnownAdapter
    wanted_s: float
    worth_of: Callable[[Entry], tuple[float, int]]
    evict_entry: Callable[[Entry], None]
    kind: PageKind = "adapter"
    depth: int = 0
    stage: Stage = Stage.QUEUED
    origin: Literal["stored", "host"] = "stored"
    holds: int = 0
    running: int = 0
    held_pages: int = 0
    """What it counts in the residency's sum of pages that only wait for requests."""
    turn: int = LAST_TURN
    """When it is needed, the least first."""
    job: LoadJob | None = None
    image: HostImage | None = None
    """In use from LOADING's end until it is on the device."""
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    last_step: int = 0
    """The last step that may have read its pages."""
    comes_for_pin: bool = False
    """It was started because it is pinned, and comes even if nobody wants it."""
    is_kept: bool = False
    """Its pin keeps it on the device."""
    goes_last: bool = False
    """It is pinned, beyond the share that pins may keep."""
    is_counted: bool = False
    """The first use that follows was counted when it arrived."""
    is_forgotten: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether it is on the device and nobody waits for it or runs with it."""
        return self.stage is Stage.DEVICE and not self.holds and not self.running

    @property
    def num_pages(self) -> int:
        """Pages on the device."""
        return len(self.pages)

    @property
    def uses(self) -> UseCount:
        """How often it is used; remembered while it is away."""
        return self.known.uses

    def worth(self) -> tuple[float, int]:
        """Seconds to have it and its cached prefixes again, and their pages."""
        return self.worth_of(self)

    def evict(self) -> None:
        """Leave the device, its cached prefixes with it."""
        self.evict_entry(self)
