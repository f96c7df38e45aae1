from __future__ import annotations

import pytest

from manylora.adapters.lora.layout import LoraLayout
from manylora.adapters.residency.images import HostImage, HostImages
from manylora.errors import PageAccountingError
from manylora.memory.arena import HostSlab, SwapSpace


def make_images(num_pages: int = 6) -> HostImages:
    return HostImages(HostSlab(num_pages, 256, pinned=False))


def add(images: HostImages, digest: str, count: int = 2) -> HostImage:
    pages = images.reserve(count)
    assert pages is not None
    image = HostImage(
        digest=digest,
        layout=LoraLayout(count, ()),
        ranks={},
        scalings={},
        pages=images.slab_views(pages),
        slab_pages=pages,
    )
    images.add(image)
    return image


def test_an_image_in_use_keeps_its_pages() -> None:
    images = make_images()
    first = add(images, "a")
    images.release(add(images, "b"))
    other = add(images, "c", count=4)
    assert sorted(images.page_counts()) == ["a", "c"]
    assert not set(first.slab_pages) & set(other.slab_pages)
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


def test_room_for_others_is_made_whole_or_not_at_all() -> None:
    images = make_images()
    in_use = add(images, "a")
    for digest in "cb":
        images.release(add(images, digest))
    image = images.hold("c")  # used last, so dropped last
    assert image is not None
    images.release(image)
    assert not images.make_room(5)
    assert sorted(images.page_counts()) == ["a", "b", "c"]
    assert images.make_room(0)
    assert images.make_room(1)
    assert sorted(images.page_counts()) == ["a", "c"]
    assert images.make_room(4)
    assert sorted(images.page_counts()) == ["a"]
    assert in_use.slab_pages
    images.check()


def test_dropped_images_are_told_once() -> None:
    images = make_images()
    for digest in "abc":
        images.release(add(images, digest))
    assert images.take_gone() == []
    assert images.make_room(3)
    assert images.take_gone() == ["a", "b"]
    assert images.take_gone() == []
    images.drop("c")
    assert images.take_gone() == ["c"]


def test_pages_that_swapped_kv_has_are_counted_beside_the_images() -> None:
    slab = HostSlab(6, 256, pinned=False)
    images = HostImages(slab)
    swap = SwapSpace(slab, images.make_room, max_pages=4)
    images.release(add(images, "a", count=4))
    swapped = swap.take(3)
    assert swapped is not None
    assert images.page_counts() == {}
    images.check(swap.num_used)
    with pytest.raises(PageAccountingError, match="others have 0"):
        images.check()
    assert images.reserve(4) is None  # what is swapped out is not dropped for an image
    slab.free(swapped)
    images.check()


def test_pages_that_another_thread_took_first_are_not_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slab = HostSlab(4, 256, pinned=False)
    images = HostImages(slab)
    allocate = slab.allocate

    def come_second(count: int) -> list[int] | None:
        allocate(3)
        return allocate(count)

    monkeypatch.setattr(slab, "allocate", come_second)
    assert images.reserve(2) is None
    images.check(num_other_used=3)
