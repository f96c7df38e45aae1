"""Page images of adapters in host memory: the second tier, bounded by a slab. The least recently used image goes first.

Thread-safe: loaders reserve pages while the engine's thread looks images up.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from manylora.adapters.lora.layout import LoraLayout
from manylora.errors import PageAccountingError
from manylora.memory.arena import HostSlab


@dataclass(eq=False, kw_only=True)
class HostImage:
    """One adapter, packed and ready to be copied page by page."""

    digest: str
    layout: LoraLayout
    ranks: Mapping[tuple[int, int], int]
    """True rank by (layer, module index)."""
    scalings: Mapping[tuple[int, int], float]
    pages: Sequence[torch.Tensor]
    """uint8 [page_bytes] each, in the layout's order."""
    slab_pages: Sequence[int] = ()
    """Its pages of the slab; empty for an image that found no room there and is used once."""
    users: int = field(default=0, init=False)


class HostImages:
    """Finished images by digest.

    Args:
        slab: Memory of the images.
    """

    def __init__(self, slab: HostSlab) -> None:
        self._slab = slab
        self._lock = threading.RLock()
        self._images: dict[str, HostImage] = {}
        """Images that can be found, the least recently used first."""
        self._reserved = 0
        """Slab pages of images that cannot be found: they are in the making, or were dropped while in use."""
        self._gone: list[str] = []

    def __contains__(self, digest: str) -> bool:
        with self._lock:
            return digest in self._images

    def page_counts(self) -> dict[str, int]:
        """Pages of each image, by digest."""
        with self._lock:
            return {digest: len(image.pages) for digest, image in self._images.items()}

    def take_gone(self) -> list[str]:
        """Take the digests of images that were dropped since the last call: their adapters now take longer to load."""
        with self._lock:
            gone, self._gone = self._gone, []
            return gone

    def make_room(self, count: int) -> bool:
        """Get `count` slab pages free. Unused images are dropped, the least recently used first.

        Returns:
            True if they are free; if not, nothing was dropped. Another thread may take them before the caller does.
        """
        with self._lock:
            lacking = count - self._slab.num_free
            victims: list[HostImage] = []
            for image in self._images.values():
                if lacking > 0 and image.users == 0:
                    victims.append(image)
                    lacking -= len(image.slab_pages)
            if lacking > 0:
                return False
            for image in victims:
                self._remove(image)
            return True

    def reserve(self, count: int) -> list[int] | None:
        """Take slab pages for a new image. Unused images are dropped if necessary.

        Returns:
            The slab pages, or None if there is no room even then.
        """
        with self._lock:
            # Another thread may have taken the pages first.
            pages = self._slab.allocate(count) if self.make_room(count) else None
            if pages is not None:
                self._reserved += count
            return pages

    def slab_views(self, slab_pages: Sequence[int]) -> list[torch.Tensor]:
        """The slab pages' bytes, uint8 [page_bytes] each."""
        return [self._slab.pages[page] for page in slab_pages]

    def cancel(self, slab_pages: Sequence[int]) -> None:
        """Give reserved pages back."""
        with self._lock:
            self._reserved -= len(slab_pages)
            self._slab.free(slab_pages)

    def add(self, image: HostImage, *, keep: bool = True) -> None:
        """Add a finished image, which the caller uses.

        Args:
            image: Image in reserved slab pages.
            keep: Let others find it. If not, its pages go back when the caller releases it.
        """
        with self._lock:
            image.users = 1
            if image.slab_pages and keep and image.digest not in self._images:
                self._reserved -= len(image.slab_pages)
                self._images[image.digest] = image

    def hold(self, digest: str) -> HostImage | None:
        """Find an image and use it. Its pages are kept until `release`."""
        with self._lock:
            image = self._images.pop(digest, None)
            if image is not None:
                self._images[digest] = image
                image.users += 1
            return image

    def release(self, image: HostImage) -> None:
        """End one use of an image."""
        with self._lock:
            image.users -= 1
            if image.users == 0 and self._images.get(image.digest) is not image:
                self.cancel(image.slab_pages)

    def drop(self, digest: str) -> None:
        """Forget an image; its pages go back when its last user is done."""
        with self._lock:
            image = self._images.get(digest)
            if image is not None and image.users:
                del self._images[digest]
                self._reserved += len(image.slab_pages)
            elif image is not None:
                self._remove(image)

    def check(self, num_other_used: int = 0) -> None:
        """Verify that the slab's pages are those of the images.

        Args:
            num_other_used: Slab pages that others use, such as `SwapSpace.num_used`.

        Raises:
            PageAccountingError: They are not.
        """
        self._slab.check()
        with self._lock:
            pages = [page for image in self._images.values() for page in image.slab_pages]
            used = self._slab.num_pages - self._slab.num_free
            if (
                len(set(pages)) != len(pages)
                or len(pages) + self._reserved + num_other_used != used
            ):
                raise PageAccountingError(
                    f"host images hold {len(pages)} pages, {self._reserved} are reserved and others have "
                    f"{num_other_used}, the slab has {used} in use"
                )

    def _remove(self, image: HostImage) -> None:
        del self._images[image.digest]
        self._gone.append(image.digest)
        self._slab.free(image.slab_pages)
