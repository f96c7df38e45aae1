"""What residency tells of itself: who is in memory, and whether its accounts add up. Reads, and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from weft.adapters.ref import AdapterRef, AdapterTier, ResidentAdapter
from weft.adapters.residency.entry import Entry, KnownAdapters, Stage
from weft.adapters.residency.images import HostImages
from weft.adapters.residency.pins import Pins
from weft.adapters.residency.slots import AdapterSlots
from weft.errors import PageAccountingError
from weft.memory.eviction import Evictor
from weft.memory.pool import PagePool
from weft.memory.prefix_cache import PrefixCache


def residents(
    entries: Mapping[str, Entry], images: HostImages, known: KnownAdapters, pins: Pins, prefixes: PrefixCache | None
) -> list[ResidentAdapter]:
    """Adapters in memory or on their way there, those of the device first."""
    found = [
        ResidentAdapter(
            digest=digest,
            tier=_tier(entry.stage),
            pages=entry.known.num_pages or 0,
            running=entry.running,
            pinned=digest in pins,
            holds=entry.holds,
            uses=entry.known.num_runs + entry.running,
            prefix_pages=0 if prefixes is None else prefixes.group_reload_cost(digest)[1],
            slot=entry.slot,
            loads=entry.known.loads.count,
            load_p95_s=entry.known.loads.p95_s,
        )
        for digest, entry in sorted(entries.items(), key=lambda item: item[1].stage is not Stage.DEVICE)
        if entry.stage is not Stage.QUEUED
    ]
    for digest, pages in images.page_counts().items():
        entry, remembered = entries.get(digest), known.get(digest)
        if entry is None or entry.stage is Stage.QUEUED:
            found.append(
                ResidentAdapter(
                    digest=digest,
                    tier="host",
                    pages=pages,
                    running=0,
                    pinned=digest in pins,
                    holds=0 if entry is None else entry.holds,
                    uses=remembered.num_runs,
                    loads=remembered.loads.count,
                    load_p95_s=remembered.loads.p95_s,
                )
            )
    return found


def check_entries(
    entries: Mapping[str, Entry],
    pool: PagePool,
    slots: AdapterSlots,
    evictor: Evictor,
    prefixes: PrefixCache | None,
) -> None:
    """Verify that pages, slots and what is offered to the evictor are those of the adapters.

    Raises:
        PageAccountingError: They are not.
    """
    pages = [page for entry in entries.values() for page in entry.pages]
    if len(set(pages)) != len(pages) or len(pages) != pool.counts()["adapter"]:
        raise PageAccountingError(f"adapters hold {len(pages)} pages, the pool says {pool.counts()}")
    slots.check({entry.slot: digest for digest, entry in entries.items() if entry.slot >= 0})
    for digest, entry in entries.items():
        on_device = entry.stage is Stage.DEVICE
        if (entry.slot >= 0) != bool(entry.pages) or (entry.running and not on_device) or entry.holds < 0:
            raise PageAccountingError(f"adapter {digest} is {entry.stage.name} with what that does not allow")
        if (entry in evictor) != (entry.is_idle and not entry.is_kept):
            raise PageAccountingError(f"adapter {digest} is in use and can be evicted, or neither")
    on_device_now = {digest for digest, entry in entries.items() if entry.stage is Stage.DEVICE}
    stray = (prefixes.groups().keys() if prefixes is not None else set()) - on_device_now - {None}
    if stray:
        raise PageAccountingError(f"adapters have cached blocks and are not on the device: {stray}")


def check_sums(
    entries: Mapping[str, Entry],
    by_stage: Mapping[Stage, Mapping[str, Entry]],
    held: Mapping[str, Entry],
    held_pages: int,
    missing_pins: Sequence[AdapterRef],
) -> None:
    """Verify what residency keeps beside its entries, so as not to look at all of them in each step.

    Raises:
        PageAccountingError: It does not agree with them.
    """
    staged = {digest: entry for stage, those in by_stage.items() for digest, entry in those.items()}
    if staged != entries or any(
        entry.stage is not stage for stage, those in by_stage.items() for entry in those.values()
    ):
        raise PageAccountingError("adapters are sorted by stages that they are not in")
    if held != {digest: entry for digest, entry in entries.items() if entry.holds}:
        raise PageAccountingError("adapters are listed with holds that they do not have")
    waiting = sum(entry.num_pages for entry in held.values() if not entry.running)
    if held_pages != waiting:
        raise PageAccountingError(f"{held_pages} pages are said to wait for requests, adapters have {waiting}")
    if any(ref.digest in entries for ref in missing_pins):
        raise PageAccountingError("a pinned adapter is said to be missing, and is there")


def _tier(stage: Stage) -> AdapterTier | Literal["loading"]:
    if stage is Stage.DEVICE:
        return "device"
    return "loading" if stage in (Stage.LOADING, Stage.COPYING) else "host"
