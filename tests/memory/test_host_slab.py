from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from manylora.errors import ConfigError, PageAccountingError
from manylora.memory.arena import HostSlab, SwapSpace


def test_a_double_free_raises_and_changes_nothing() -> None:
    slab = HostSlab(4, 256, pinned=False)
    pages = slab.allocate(2)
    assert pages is not None
    slab.free(pages[:1])
    with pytest.raises(PageAccountingError):
        slab.free(pages)
    assert slab.num_free == 3
    slab.check()


def test_threads_never_get_the_same_page() -> None:
    slab = HostSlab(8, 256, pinned=False)
    collisions: list[int] = []
    holders: dict[int, int] = {}

    def work(thread: int) -> None:
        for _ in range(300):
            pages = slab.allocate(3)
            if pages is None:
                continue
            collisions.extend(page for page in pages if holders.setdefault(page, thread) != thread)
            for page in pages:
                holders.pop(page, None)
            slab.free(pages)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    slab.check()
    assert collisions == []
    assert slab.num_free == 8


def test_more_than_its_share_is_refused_before_room_is_made_for_it() -> None:
    asked: list[int] = []

    def make_room(count: int) -> bool:
        asked.append(count)
        return True

    swap = SwapSpace(HostSlab(6, 64, pinned=False), make_room, max_pages=4)
    assert swap.take(5) is None
    assert len(swap.take(3) or []) == 3
    assert swap.take(2) is None
    assert (asked, swap.num_used) == ([3], 3)


def test_a_loader_that_takes_the_room_first_is_no_fault() -> None:
    slab = HostSlab(4, 64, pinned=False)

    def make_room(count: int) -> bool:
        assert slab.allocate(2) is not None  # as a loader's thread may, just after
        return True

    swap = SwapSpace(slab, make_room, 4)
    assert swap.take(3) is None
    assert (swap.num_used, slab.num_free) == (0, 2)


class Cudart:
    """Registers memory as CUDA's runtime does, or refuses."""

    def __init__(self, register_status: int = 0, unregister_status: int = 0) -> None:
        self.statuses = register_status, unregister_status
        self.registered: list[tuple[int, int]] = []
        self.unregistered: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        self.registered.append((address, size))
        return self.statuses[0]

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.unregistered.append(address)
        return self.statuses[1]

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802
        return {2: "out of memory", 700: "an illegal memory access was encountered"}[status]


def test_a_pinned_slab_has_exactly_its_bytes_and_begins_at_a_page_of_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    slab = HostSlab(5, 768, pinned=True)
    assert slab.pages.shape == (5, 768)
    assert cudart.registered == [(slab.pages.data_ptr(), 5 * 768)]
    assert slab.pages.data_ptr() % mmap.PAGESIZE == 0
    assert slab.pages.untyped_storage().nbytes() == 5 * 768
    slab.pages[4].fill_(7)
    slab.close()
    slab.close()
    assert cudart.unregistered == [slab.pages.data_ptr()]
    assert (slab.pages[4] == 7).all(), "an image that is still read is not freed"


def test_a_slab_that_nobody_closed_ends_its_page_locking_before_its_memory_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    slab = HostSlab(5, 768, pinned=True)
    ((address, _),) = cudart.registered
    del slab
    assert cudart.unregistered == [address]


def test_only_a_pinned_slab_with_pages_asks_for_page_locking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: 1 / 0)
    assert HostSlab(0, 768, pinned=True).allocate(1) is None
    HostSlab(2, 768, pinned=False).close()


def test_memory_that_cannot_be_page_locked_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = Cudart(register_status=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    said = r"memory\.host_gib: 1\.00 GiB of host memory cannot be page-locked .*: out of memory; .*ulimit -l"
    with pytest.raises(ConfigError, match=said):
        HostSlab(1 << 10, 1 << 20, pinned=True)
    assert cudart.unregistered == []


def test_more_memory_than_the_system_maps_is_refused_too() -> None:
    with pytest.raises(
        ConfigError, match=r"memory\.host_gib: .* GiB of host memory cannot be page-locked"
    ):
        HostSlab(1 << 36, 1 << 20, pinned=True)


def test_a_device_that_is_lost_does_not_keep_the_slab_from_closing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(unregister_status=700))
    HostSlab(1, 768, pinned=True).close()
    assert "host memory stays page-locked: an illegal memory access" in caplog.text
