"""Adapters outside the engine: the store they are loaded from, the copies to the device, the tables of the kernels."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manylora.adapters.lora.layout import LoraLayout
from manylora.adapters.ref import AdapterRef, LoraSpec
from manylora.adapters.residency.images import HostImage, HostImages
from manylora.errors import AdapterUnavailableError, NeverFitsError
from simulation.pages import DevicePages, HostPage, SimulatedSlab, Weights
from simulation.virtual_time import VirtualTime

if TYPE_CHECKING:
    from simulation.scenario import Scenario


class PlannedError(RuntimeError):
    """A fault of the scenario."""


def adapter(name: str, tenant: str = "t") -> AdapterRef:
    """An adapter whose digest follows from its name."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    return AdapterRef(
        tenant_id=tenant,
        adapter_id=name,
        version=1,
        digest="sha256:" + digest,
        weights_sha256=digest,
        config=LoraSpec(rank=8, alpha=8.0),
    )


@dataclass(frozen=True, kw_only=True)
class LoadFaults:
    """Rates of failures of loads and copies, and the times that these take."""

    load_s: float = 0.1
    """Seconds to load one page."""
    copy_s: float = 0.01
    """Seconds to copy one page."""
    fails: float = 0.0
    """Share of loads that raise."""
    hangs: float = 0.0
    """Share of loads that take minutes."""
    copy_fails: float = 0.0
    """Share of copies that raise, some after the first page."""


def image_of(digest: str, num_pages: int, images: HostImages, slab: SimulatedSlab) -> HostImage:
    """An adapter's image, in the slab where that has room; the caller adds it to the images."""
    slab_pages = images.reserve(num_pages) or ()
    pages: Any = [slab.host_pages[page] for page in slab_pages] or [
        HostPage() for _ in range(num_pages)
    ]
    for index, page in enumerate(pages):
        page.content = Weights(digest, index)
    layout = LoraLayout(num_pages, ())
    return HostImage(
        digest=digest, layout=layout, ranks={}, scalings={}, pages=pages, slab_pages=slab_pages
    )


class SimulatedLoader:
    """Makes images of as many pages as an adapter has, after a while.

    Args:
        scenario: The pages of each adapter, how long loads take, and how often what goes wrong.
        time: What it sleeps in.
        rng: Which load fails or hangs.
        images: Where images are kept.
        slab: The pages of images.
        failed: Takes the digests of adapters of which a load failed.
    """

    def __init__(
        self,
        scenario: Scenario,
        time: VirtualTime,
        rng: random.Random,
        images: HostImages,
        slab: SimulatedSlab,
        failed: set[str],
    ) -> None:
        self._sizes = scenario.adapters
        self._max_pages = scenario.num_pages - scenario.num_groups
        self._faults = scenario.faults
        self._time = time
        self._rng = rng
        self.images = images
        self._slab = slab
        self.missing: set[str] = set()
        """Adapters whose blob is gone."""
        self.failed = failed
        """Adapters of which a load failed."""

    def load(self, ref: AdapterRef, *, is_paced: bool = True) -> HostImage:  # noqa: ARG002 - as the real one
        """As the real one: read, reserve, pack."""
        size = self._sizes[ref.digest]
        seconds = self._faults.load_s * size * self._rng.uniform(0.5, 1.5)
        if self._rng.random() < self._faults.hangs:
            seconds += 300.0
        self._time.sleep(seconds)
        self._read(ref.digest)
        if size > self._max_pages:
            self.failed.add(ref.digest)
            raise NeverFitsError(
                f"The adapter needs {size} pages; at most {self._max_pages} are there."
            )
        image = image_of(ref.digest, size, self.images, self._slab)
        try:
            self._time.sleep(seconds / 4)
            self._pack(ref.digest)
        except BaseException:
            self.images.cancel(image.slab_pages)
            raise
        return image

    def _pack(self, digest: str) -> None:
        if self._rng.random() < self._faults.fails:
            self.failed.add(digest)
            raise PlannedError("packing failed")

    def _read(self, digest: str) -> None:
        if digest in self.missing:
            self.failed.add(digest)
            raise AdapterUnavailableError("The adapter's weights are not in the store.")
        if self._rng.random() < self._faults.fails:
            self.failed.add(digest)
            raise self._rng.choice(
                [OSError("disk"), MemoryError("host"), PlannedError("a fault of the loader")]
            )


class SimulatedCopier:
    """Writes what the host pages hold when the copy of each is done, or at once where few pages are copied."""

    def __init__(
        self,
        time: VirtualTime,
        rng: random.Random,
        device: DevicePages,
        faults: LoadFaults,
        failed: set[str],
        pages_at_once: int = 0,
    ) -> None:
        self.pages_at_once = pages_at_once
        self._time = time
        self._rng = rng
        self._device = device
        self._faults = faults
        self._failed = failed

    def fence(self) -> float:
        """Mark of all copies launched until now."""
        return self._time.now_s

    def copy(self, sources: Sequence[Any], pages: Sequence[int], _fence: float) -> None:
        """Overwrite device pages one after the other."""
        self._write(sources, pages, self._time.sleep)

    def copy_now(self, sources: Sequence[Any], pages: Sequence[int]) -> None:
        """Copy pages in no time."""
        self._write(sources, pages, lambda _seconds: None)

    def _write(
        self, sources: Sequence[Any], pages: Sequence[int], sleep: Callable[[float], None]
    ) -> None:
        fails_at = (
            self._rng.randrange(len(pages)) if self._rng.random() < self._faults.copy_fails else -1
        )
        for index, (source, page) in enumerate(zip(sources, pages, strict=True)):
            sleep(self._faults.copy_s * self._rng.uniform(0.5, 1.5))
            if index == fails_at:
                content = source.content
                self._failed.add(content.digest if isinstance(content, Weights) else "")
                raise PlannedError("a copy failed")
            self._device.contents[page] = source.content


class SimulatedTables:
    """Remembers which pages each adapter slot points at."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.rows: dict[int, list[int]] = {}

    def write(
        self,
        slot: int,
        layout: LoraLayout,
        pages: Sequence[int],
        _ranks: Mapping[tuple[int, int], int],
        _scalings: Mapping[tuple[int, int], float],
    ) -> None:
        """Overwrite a row."""
        if len(pages) != layout.num_pages or not 0 <= slot < self.slots:
            raise ValueError("a table row does not fit its layout")
        self.rows[slot] = list(pages)
