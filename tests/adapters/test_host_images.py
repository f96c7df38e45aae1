from __future__ import annotations

import pytest

from weft.adapters.host_images import HostImage, HostImages
from weft.adapters.layout import LoraLayout
from weft.errors import PageAccountingError
from weft.memory.host_slab import HostSlab


def make_images(num_pages: int = 6) -> HostImages:
    return HostImages(HostSlab(num_pages, 256, pinned=False))


def add(images: HostImages, digest: str, count: int = 2) -> HostImage:
    pages = images.reserve(count)
    assert pages is not None
    image = HostImage(
        digest=digest,
        layout=LoraLayout(1, count, ()),
        ranks={},
        scalings={},
        pages=images.slab_views(pages),
        slab_pages=pages,
    )
    images.add(image)
    return image


def test_room_is_made_by_dropping_images_that_nobody_uses_oldest_first() -> None:
    images = make_images()
    for digest in "abc":
        images.release(add(images, digest))
    image = images.hold("a")
    assert image is not None
    images.release(image)
    add(images, "d")
    assert sorted(images.page_counts()) == ["a", "c", "d"]
    images.check()


def test_an_image_in_use_keeps_its_pages() -> None:
    images = make_images()
    first = add(images, "a")
    images.release(add(images, "b"))
    assert images.reserve(6) is None
    assert sorted(images.page_counts()) == ["a", "b"]  # nothing is dropped in vain
    add(images, "c", count=4)
    assert sorted(images.page_counts()) == ["a", "c"]
    assert not set(first.slab_pages) & set(images._images["c"].slab_pages)
    images.check()


def test_a_dropped_image_gives_its_pages_back_when_its_last_user_is_done() -> None:
    images = make_images()
    image = add(images, "a", count=6)
    images.drop("a")
    assert "a" not in images
    assert images.hold("a") is None
    assert images.reserve(1) is None
    images.check()
    images.release(image)
    pages = images.reserve(6)
    assert pages is not None
    images.cancel(pages)
    images.check()


def test_check_finds_pages_that_no_image_has() -> None:
    images = make_images()
    images.release(add(images, "a"))
    images._images.clear()
    with pytest.raises(PageAccountingError):
        images.check()
