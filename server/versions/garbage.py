"""Deletes what is no longer referred to: right after a delete, and the rest in sweeps every few minutes.

Weights of ephemeral versions lie in this server's memory for as long as a request may need them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

import structlog

from manylora.errors import (
    AdapterUnavailableError,
    CapacityError,
    EngineUnavailableError,
    ManyloraError,
)
from manylora.registry.names import model_not_found
from manylora.registry.records import Removed, ResolvedModel
from manylora.server.process.threads import cancel_all, in_thread

if TYPE_CHECKING:
    from manylora.adapters.blobs.memory import MemoryBlobs
    from manylora.adapters.blobs.store import BlobStore
    from manylora.engine.process.client import EngineClient
    from manylora.registry.registry import Registry
    from manylora.server.versions.pins import PinKeeper

log = structlog.get_logger("manylora.server")
IN_USE_POLL_S = 0.5
"""Seconds between looks at whether deleted adapters are still in use and whether the blob store answers."""
HOLD_S = 0.5
"""Longest time in seconds that deletes hold the database's write lock at once."""
BLOBS_AT_ONCE = 500
SWEEP_S = 300.0
"""Seconds from one sweep to the next."""
STALE_UPLOAD_S = 3600.0
"""Seconds after which a temporary blob counts as abandoned."""


@dataclass(eq=False)
class EphemeralWeights:
    """Weights in memory, by SHA-256 (64 hex digits), and the requests that hold them. Thread: the event loop's."""

    blobs: MemoryBlobs
    engine: EngineClient
    """Loads adapters from the weights."""
    server: str
    """Name of this server, by which a version says who has its weights."""
    _held: Counter[str] = field(default_factory=Counter, init=False)
    """Requests by the weights of their version."""

    def hold(self, model: ResolvedModel, now: datetime) -> Callable[[], None]:
        """Keep the weights of an ephemeral version for a request; returns the function that ends that.

        Raises:
            NotFoundError: The version's time is over; code model_not_found.
            AdapterUnavailableError: This server's memory does not have the weights; code adapter_not_here.
        """
        version = model.version
        if version is None or (version.expires_at is not None and version.expires_at <= now):
            raise model_not_found(model.name)
        weights = version.weights_sha256
        if version.held_by != self.server or weights not in self.blobs:
            message = f"Version {version.version} of `{model.name}` is ephemeral, and not in the memory of this server."
            hint = "Ask the server that it was pushed to, or push it to this one."
            raise AdapterUnavailableError(f"{message} {hint}", code="adapter_not_here")
        self._held[weights] += 1

        def release() -> None:
            self._held[weights] -= 1
            if not self._held[weights]:
                del self._held[weights]

        return release

    def is_used(self, weights: str) -> bool:
        """Return true if a request that has not ended may still have to load these weights, in memory or stored."""
        return self._held[weights] > 0 or self.engine.uses(weights)

    async def free(self, weights: str) -> None:
        """Free weights that no version has any more; a sweep deletes a blob of them in the store."""
        self.blobs.delete(weights)
        await self.engine.drop_weights(weights)


@dataclass(eq=False, kw_only=True)
class BlobGarbage:
    """Deletes adapters and blobs that no version refers to. Thread: the event loop's."""

    registry: Registry
    engine: EngineClient
    blobs: BlobStore
    weights: EphemeralWeights
    pins: PinKeeper
    is_alone: bool
    """No other server uses the blobs."""
    monotonic: Callable[[], float] = time.monotonic
    _removals: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    """Deletions that wait for the last request of an adapter to end."""

    async def remove(self, removed: Removed) -> None:
        """Drop adapters and blobs that no version refers to any more; running requests finish."""
        for digest in removed.digests:
            self.pins.forget(digest)
            try:
                await self.engine.drop_adapter(digest)
            except EngineUnavailableError:
                break  # a restarted engine holds nothing
        await self.pins.sync()
        # Requests at other servers may still have to load blobs; the sweep deletes those later.
        await self.delete(
            [each for each in removed.weights if self.is_alone or each in self.weights.blobs]
        )

    async def delete(self, weights: Iterable[str]) -> None:
        """Delete those of the blobs (64 hex digits) that no version refers to.

        Blobs in use are deleted once they are not; those that the store cannot delete now are tried again.
        """
        rest = list(weights)
        later: list[str] = []
        try:
            while rest:
                # A store that hangs is noticed here, before the database's lock is taken.
                await asyncio.to_thread(self.blobs.reach)
                used, untried = await self._delete_some(rest[:BLOBS_AT_ONCE])
                later += used
                rest = untried + rest[BLOBS_AT_ONCE:]
        except CapacityError:
            later += rest
        if later:
            self._in_background(self._delete_later(later))

    def remove_later(self, removed: Removed) -> None:
        """Remove in the background."""
        self._in_background(self.remove(removed))

    def _in_background(self, removal: Coroutine[None, None, None]) -> None:
        """Let a removal run by itself; the next sweep does the part that it does not get to."""
        task = asyncio.create_task(_quietly(removal, "removal_failed"))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def close(self) -> None:
        """Cancel the removals that run; the next start deletes what is left."""
        await cancel_all(self._removals)

    async def _delete_some(self, weights: list[str]) -> tuple[list[str], list[str]]:
        """Delete as many as `HOLD_S` allows: changes of the database wait meanwhile.

        Returns:
            Blobs in use, and blobs for which there was no time.
        """
        used = []
        async with self.registry.adapters.locking_unreferenced(weights) as unreferenced:
            doomed = sorted(unreferenced)
            until_s = self.monotonic() + HOLD_S
            while doomed and self.monotonic() < until_s:
                if self.weights.is_used(doomed[-1]):
                    used.append(doomed[-1])
                elif doomed[-1] in self.weights.blobs:
                    await self.weights.free(doomed[-1])
                else:
                    await in_thread(self.blobs.delete, doomed[-1])
                doomed.pop()
        return used, doomed

    async def _delete_later(self, weights: Iterable[str]) -> None:
        """Try again later: a preempted or waiting request may still have to load the adapter."""
        await asyncio.sleep(IN_USE_POLL_S)
        await self.delete(weights)


async def _quietly(work: Coroutine[None, None, object], failure: str) -> None:
    """Log an error of `work` as `failure`: the next sweep does the rest."""
    try:
        await work
    except (ManyloraError, OSError) as error:
        log.warning(failure, exc_info=error)


@dataclass(eq=False, kw_only=True)
class Sweeper:
    """Deletes leftovers every `SWEEP_S` seconds.

    These are ephemeral versions whose time is over or whose weights went with an earlier life of this server, expired
    uploads with their files, files without an upload, abandoned temporary blobs, blobs that no
    version refers to, and expired answers. Each sweep looks for all of them, so a sweep that is cut short loses
    nothing. Thread: the event loop's.
    """

    garbage: BlobGarbage
    sweep_staged: Callable[[], Awaitable[int]]
    """Deletes files of uploads that are gone; returns the number of uploads."""
    owns_store: bool
    """No other server writes to the blob store."""
    _unreferenced: set[str] = field(default_factory=set, init=False)
    """Blobs that the last sweep found. Where other servers may use them, they are deleted at the second time."""

    async def start(self) -> asyncio.Task[None]:
        """Sweep once, then go on in the task that this returns; the next start sweeps what is left when it ends."""
        await _quietly(self.sweep(is_start=True), "sweep_failed")
        return asyncio.create_task(self._go_on())

    async def sweep(self, is_start: bool = False) -> dict[str, int]:
        """Delete leftovers.

        Args:
            is_start: True if this process has not begun to write anything.

        Returns:
            Number of deleted leftovers, by kind.
        """
        registry = self.garbage.registry
        if is_start:
            await self.garbage.remove(await registry.ephemeral.lose(self.garbage.weights.server))
        await self.garbage.remove(await registry.ephemeral.expire())
        uploads, answers = await registry.uploads.forget_old()
        # Before this process begins to write, nothing writes to a store of its own.
        age_s = 0.0 if is_start and self.owns_store else STALE_UPLOAD_S
        swept = {
            "uploads": uploads,
            "answers": answers,
            "staged": await self.sweep_staged(),
            "files": await registry.files.forget_expired(),
            "batches": await registry.batches.forget_old(),
            "temporary": await asyncio.to_thread(self.garbage.blobs.sweep, age_s),
            "blobs": await self._sweep_blobs(),
            "weights": await self._sweep_memory(),
        }
        if any(swept.values()):
            log.info("swept", **swept)
        return swept

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await _quietly(self.sweep(), "sweep_failed")

    async def _sweep_blobs(self) -> int:
        digests = await asyncio.to_thread(lambda: list(self.garbage.blobs.digests()))
        doomed: list[str] = []
        for start in range(0, len(digests), BLOBS_AT_ONCE):
            doomed += await self.garbage.registry.adapters.unreferenced(
                digests[start : start + BLOBS_AT_ONCE]
            )
        if not self.garbage.is_alone:
            found = set(doomed)
            doomed = list(found & self._unreferenced)
            self._unreferenced = found
        await self.garbage.delete(doomed)
        return len(doomed)

    async def _sweep_memory(self) -> int:
        """Free weights that no ephemeral version has: one of them may have become a usual version, for example."""
        registry = self.garbage.registry
        weights = self.garbage.weights
        if not weights.blobs.digests():
            return 0
        async with registry.adapters.locking_unreferenced(()):
            here = set(weights.blobs.digests())
            gone = here - await registry.ephemeral.weights(self.garbage.weights.server)
            doomed = [each for each in gone if not weights.is_used(each)]
            for each in doomed:
                await weights.free(each)
        return len(doomed)
