from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import pytest

from adapters_factory import random_lora
from manylora.adapters.ref import AdapterTier
from manylora.adapters.residency.entry import AdapterEntries, SlotLease
from manylora.adapters.residency.transfers import MAX_UNDER_WAY
from manylora.errors import (
    AdapterIncompatibleError,
    AdapterUnavailableError,
    EngineError,
    NeverFitsError,
    PageAccountingError,
    StaleSlotError,
)
from manylora.registry.usage.latency import PLACES
from residency_parts import ResidencyParts, prepare, store

ROOT = Path(__file__).resolve().parents[3]


def test_an_adapter_goes_from_the_store_to_the_device_and_back_to_the_host(tmp_path: Path) -> None:
    parts, (ref, *_), pages = prepare(tmp_path)
    residency = parts.residency
    assert (residency.state(ref.digest), residency.pages_needed(ref)) == ("stored", None)
    residency.hold(ref)
    assert residency.waiting_reason(ref.digest) == "LOADING"
    assert residency.acquire(ref.digest) is None
    parts.loads.run_one()
    assert residency.state(ref.digest) == "stored"  # nothing the engine sees changes before tick
    residency.tick(0)
    assert (residency.state(ref.digest), residency.transfers.is_copying) == ("host", True)
    parts.copies.run_one()
    residency.tick(0)
    assert (residency.state(ref.digest), residency.transfers.is_copying) == ("device", False)
    assert parts.pool.counts()["adapter"] == pages == residency.pages_needed(ref)
    assert parts.evict_all() == 0  # it is held
    residency.release_hold(ref.digest)
    assert parts.evict_all() == pages
    assert residency.state(ref.digest) == "host"
    assert (residency.transfers.loads, parts.evictor.evictions) == (
        {"stored>device:ok": 1},
        {"adapter": 1},
    )
    residency.check()


def test_a_slot_that_was_reused_is_noticed(tmp_path: Path) -> None:
    parts, (first, second, _), _ = prepare(tmp_path, slots=1)
    parts.load(first)
    old = parts.residency.acquire(first.digest)
    assert old is not None
    parts.residency.release(first.digest)
    parts.load(second)
    new = parts.residency.acquire(second.digest)
    assert new is not None
    assert new.slot == old.slot
    for stale in (
        old,
        SlotLease(old.slot, new.generation, first.digest),
        SlotLease(old.slot, old.generation, second.digest),
        SlotLease(-1, 1, first.digest),
        SlotLease(5, 1, first.digest),
    ):
        with pytest.raises(StaleSlotError):
            parts.residency.slots.check_lease(stale)
    parts.residency.slots.check_lease(new)


def test_adapters_that_only_wait_hold_at_most_a_quarter_of_the_pool(tmp_path: Path) -> None:
    parts, refs, pages = prepare(tmp_path, count=8, slots=8)
    quarter = parts.pool.capacity // 4
    for ref in refs:
        parts.residency.hold(ref)
    parts.settle()
    on_device = [ref for ref in refs if parts.residency.state(ref.digest) == "device"]
    assert len(on_device) == max(1, quarter // pages)
    assert parts.residency.waiting_reason(refs[-1].digest) == "NO_ROOM"
    assert (
        parts.residency.acquire(on_device[0].digest) is not None
    )  # it runs now, so its hold counts no more
    parts.settle()
    assert sum(parts.residency.state(ref.digest) == "device" for ref in refs) == len(on_device) + 1


def spoilt(content: bytes) -> Iterator[bytes]:
    """With a bit flipped, cut short, and with more at the end."""
    for position in (0, 7, 8, 9, 200, -1):
        changed = bytearray(content)
        changed[position] ^= 0x20
        yield bytes(changed)
    yield from (content[:0], content[:5], content[:100], content[:-1], content + b"more")


def test_a_missing_or_corrupt_blob_fails_once_and_a_later_want_tries_again(tmp_path: Path) -> None:
    parts, (ref, *_), _ = prepare(tmp_path)
    path = parts.blobs.path(ref.weights_sha256)
    sound = path.read_bytes()
    broken = list(spoilt(sound))
    for content in (None, *broken):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        parts.residency.hold(ref)
        parts.residency.hold(ref)
        parts.loads.run_all()
        (failure,) = parts.residency.tick(0)
        assert failure.digest == ref.digest
        assert isinstance(failure.error, AdapterUnavailableError)
        assert failure.error.code == (
            "adapter_blob_missing" if content is None else "adapter_blob_corrupt"
        ), content
        assert parts.residency.tick(0) == []
        parts.residency.release_hold(ref.digest)  # the request's hold went with the failure
        assert parts.slab.num_free == parts.slab.num_pages
        parts.residency.check()
    path.write_bytes(sound)
    parts.load(ref)
    assert parts.residency.transfers.loads == {
        "stored>device:failed": 1 + len(broken),
        "stored>device:ok": 1,
    }


def test_an_adapter_larger_than_the_pool_or_than_the_largest_rank_is_refused(
    tmp_path: Path,
) -> None:
    parts, refs, pages = prepare(tmp_path, rank=64, num_pages=12, slab_pages=0)
    assert pages > 11
    for residency_parts, kind, said in (
        (parts, NeverFitsError, str(pages)),
        (ResidencyParts(tmp_path, max_rank=8), AdapterIncompatibleError, "adapter.max_rank"),
    ):
        residency_parts.residency.hold(refs[0])
        residency_parts.loads.run_all()
        (failure,) = residency_parts.residency.tick(0)
        assert isinstance(failure.error, kind)
        assert said in failure.error.message


def test_a_fault_in_a_loader_thread_fails_the_adapter_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, (ref, *_), _ = prepare(tmp_path)
    monkeypatch.setattr(parts.blobs, "open", lambda *_: 1 / 0)
    parts.residency.hold(ref)
    parts.loads.run_all()
    (failure,) = parts.residency.tick(0)
    assert failure.error.code == "adapter_load_failed"
    parts.residency.check()


def test_forgetting_is_fine_in_every_state(tmp_path: Path) -> None:
    """Nor is the size of an adapter forgotten while it is in use, which waiting requests ask for."""
    parts, (ref, other, _), pages = prepare(tmp_path)
    residency = parts.residency
    residency.forget(ref.digest)  # stored
    residency.hold(ref)
    residency.release_hold(ref.digest)
    assert not residency.residents()  # the load had not started
    residency.hold(ref)
    residency.forget(ref.digest)  # loading for a request that waits: it is served
    parts.settle()
    assert residency.state(ref.digest) == "device"
    lease = residency.acquire(ref.digest)
    assert lease is not None
    residency.release_hold(ref.digest)
    residency.forget(ref.digest)  # running
    residency.slots.check_lease(lease)
    assert residency.pages_needed(ref) == parts.pool.counts()["adapter"] == pages
    residency.release(ref.digest)
    assert (residency.state(ref.digest), residency.pages_needed(ref)) == ("stored", None)
    parts.load(other)
    residency.forget(other.digest)  # idle
    assert residency.state(other.digest) == "stored"
    assert parts.pool.counts()["adapter"] == 0
    assert parts.slab.num_free == parts.slab.num_pages
    residency.check()


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_load_that_nobody_wants_any_more_ends_in_the_host_slab_unless_its_adapter_is_forgotten(
    tmp_path: Path, is_forgotten: bool
) -> None:
    parts, (ref, *_), _ = prepare(tmp_path)
    parts.residency.hold(ref)
    parts.loads.run_one()
    parts.residency.release_hold(ref.digest)
    if is_forgotten:
        parts.residency.forget(ref.digest)
    parts.settle()
    assert parts.residency.state(ref.digest) == ("stored" if is_forgotten else "host")
    assert parts.pool.counts()["adapter"] == 0
    assert (parts.slab.num_free == parts.slab.num_pages) == is_forgotten
    parts.residency.check()


def test_a_copy_that_nobody_wants_any_more_leaves_the_adapter_idle(tmp_path: Path) -> None:
    parts, (ref, *_), pages = prepare(tmp_path)
    parts.residency.hold(ref)
    parts.loads.run_one()
    parts.residency.tick(0)
    parts.residency.release_hold(ref.digest)
    assert parts.evict_all() == 0  # its pages are being written
    parts.settle()
    assert parts.evict_all() == pages


def test_without_any_room_in_the_slab_adapters_are_served_all_the_same(tmp_path: Path) -> None:
    parts, (ref, *_), _ = prepare(tmp_path, slab_pages=1)
    assert parts.matches(parts.load(ref), parts.loras[ref.digest])
    parts.evict_all()
    assert parts.residency.state(ref.digest) == "stored"


def test_an_adapter_in_host_memory_does_not_wait_behind_loads(tmp_path: Path) -> None:
    """However many there are, and though they may hang."""
    parts = ResidencyParts(tmp_path, num_pages=200, slots=32)
    loras = [
        random_lora(parts.base, 1, seed=seed, modules=(0,), layers=(0,))
        for seed in range(MAX_UNDER_WAY + 2)
    ]
    cached, *others = store(parts, tmp_path, loras)
    parts.load(cached)
    parts.evict_all()
    for ref in others:
        parts.residency.hold(ref)
    parts.residency.hold(cached)
    assert (len(parts.loads.pending), len(parts.copies.pending)) == (MAX_UNDER_WAY, 1)
    parts.copies.run_one()
    parts.residency.tick(0)
    assert parts.residency.state(cached.digest) == "device"
    assert parts.residency.waiting_reason(others[-1].digest) == "NO_ROOM"
    parts.settle()
    assert all(parts.residency.state(ref.digest) == "device" for ref in others)  # the rest follow


def test_only_so_many_adapters_wait_for_pages_with_their_images_in_use(tmp_path: Path) -> None:
    parts = ResidencyParts(tmp_path, num_pages=8, slab_pages=100, slots=32)
    loras = [
        random_lora(parts.base, 1, seed=seed, modules=(0,), layers=(0,))
        for seed in range(MAX_UNDER_WAY + 3)
    ]
    refs = store(parts, tmp_path, loras)
    for ref in refs:
        parts.load(ref)
    parts.evict_all()
    kv = parts.pool.allocate(parts.pool.num_free, "kv")
    assert kv is not None
    for ref in refs:
        parts.residency.hold(ref)
    for ref in refs:
        parts.images.drop(ref.digest)
    assert (
        parts.slab.num_pages - parts.slab.num_free == MAX_UNDER_WAY
    )  # an image in use keeps its page
    parts.pool.free(kv, 0)
    for ref in refs:
        parts.settle()
        assert parts.residency.acquire(ref.digest) is not None
        parts.residency.release(ref.digest)
        parts.residency.release_hold(ref.digest)


def test_a_reference_too_many_given_back_is_noticed(tmp_path: Path) -> None:
    parts, (ref, *_), _ = prepare(tmp_path)
    parts.load(ref)
    with pytest.raises(EngineError):
        parts.residency.release(ref.digest)


def test_check_finds_a_page_that_left_by_the_back_door(tmp_path: Path) -> None:
    parts, (ref, *_), _ = prepare(tmp_path)
    parts.load(ref)
    page = next(page for page in range(parts.pool.num_pages) if parts.pool.state(page) == "adapter")
    parts.pool.free([page], 0)
    with pytest.raises(PageAccountingError):
        parts.residency.check()


def test_loader_threads_and_the_engine_thread_do_not_get_in_each_others_way(tmp_path: Path) -> None:
    threads = (ThreadPoolExecutor(max_workers=3), ThreadPoolExecutor(max_workers=1))
    parts = ResidencyParts(tmp_path, num_pages=16, slab_pages=8, slots=3, executors=threads)
    refs = store(parts, tmp_path, [random_lora(parts.base, 8, seed=seed) for seed in range(6)])
    draw = random.Random(0)
    residency = parts.residency
    served: Counter[str] = Counter()
    deadline = time.monotonic() + 120
    step = 0
    while min(served[ref.digest] for ref in refs) < 4:
        assert time.monotonic() < deadline, served
        ref = draw.choice(refs)
        residency.hold(ref)
        for _ in range(50):
            step += 1
            assert residency.tick(step) == []
            if (lease := residency.acquire(ref.digest)) is not None:
                assert parts.matches(lease.slot, parts.loras[ref.digest])
                served[ref.digest] += 1
                residency.release(ref.digest)
                break
            time.sleep(0.0005)
        residency.release_hold(ref.digest)
        if draw.random() < 0.2:
            residency.forget(draw.choice(refs).digest)
        residency.check()
        parts.pool.check()
    residency.transfers.close()
    residency.check()


def test_other_threads_say_when_there_is_something_to_take_in(tmp_path: Path) -> None:
    told: list[str] = []
    parts = ResidencyParts(tmp_path, notify=lambda: told.append("done"))
    (ref,) = store(parts, tmp_path, [random_lora(parts.base, 8, seed=0)])
    parts.residency.hold(ref)
    assert told == []
    parts.loads.run_one()
    assert told == ["done"]
    parts.residency.tick(0)
    parts.copies.run_one()
    assert told == ["done", "done"]


def test_what_is_expected_first_is_loaded_first(tmp_path: Path) -> None:
    parts, (a, b, c), _ = prepare(tmp_path, num_pages=100)
    for ref in (a, b, c):
        parts.residency.hold(ref)
    parts.residency.expect([b.digest])
    parts.residency.expect([c.digest, "unknown", c.digest, b.digest])  # the last word holds
    for _ in range(3):
        parts.loads.run_one()
    parts.residency.tick(0)
    assert list(parts.images.page_counts()) == [c.digest, b.digest, a.digest]


def test_what_is_expected_first_gets_pages_first(tmp_path: Path) -> None:
    parts, (a, b, _), pages = prepare(tmp_path)
    kv = parts.pool.allocate(parts.pool.num_free, "kv")
    assert kv is not None
    for ref in (a, b):
        parts.residency.hold(ref)
    parts.settle()
    assert [parts.residency.state(ref.digest) for ref in (a, b)] == ["host", "host"]
    parts.residency.expect([b.digest, a.digest])
    parts.pool.free(kv[:pages], 0)
    parts.settle()
    assert [parts.residency.state(ref.digest) for ref in (a, b)] == ["host", "device"]


def test_among_those_that_wait_for_a_loader_the_one_expected_first_starts_first(
    tmp_path: Path,
) -> None:
    parts, refs, _ = prepare(tmp_path, count=MAX_UNDER_WAY + 3, num_pages=100, slab_pages=200)
    for ref in refs:
        parts.residency.hold(ref)
    parts.residency.expect([refs[-1].digest])
    parts.loads.run_one()
    parts.residency.tick(0)
    parts.loads.pending.rotate(
        1
    )  # which submitted call runs is of no account: the queue chooses the job
    parts.loads.run_one()
    parts.residency.tick(0)
    assert parts.residency.state(refs[-1].digest) == "host"


def test_a_small_image_is_copied_at_once_and_a_tick_copies_so_many_pages_at_most(
    tmp_path: Path,
) -> None:
    parts, refs, pages = prepare(tmp_path, num_pages=100)
    parts.copier.pages_at_once = 2 * pages
    for ref in refs:
        parts.residency.hold(ref)
    parts.loads.run_all()
    parts.residency.tick(0)
    assert [parts.residency.state(ref.digest) for ref in refs] == ["device", "device", "host"]
    assert len(parts.copies.pending) == 1
    parts.copies.run_one()
    parts.residency.tick(0)
    for ref in refs:
        parts.residency.release_hold(ref.digest)
    parts.evict_all()
    for ref in refs[:2]:  # those in host memory are there before `hold` returns
        parts.residency.hold(ref)
        lease = parts.residency.acquire(ref.digest)
        assert lease is not None
        assert parts.matches(lease.slot, parts.loras[ref.digest])
    parts.residency.check()


def test_a_copy_at_once_that_fails_is_told_by_the_next_tick_and_loses_nothing(
    tmp_path: Path,
) -> None:
    parts, (ref, *_), pages = prepare(tmp_path)
    parts.load(ref)
    parts.evict_all()
    parts.copier.pages_at_once = 2 * pages
    parts.copier.fails = True
    parts.residency.hold(ref)
    parts.residency.check()
    parts.copier.fails = False
    parts.residency.hold(ref)  # by another request, before the first was told: it ends with it
    assert [failure.digest for failure in parts.residency.tick(0)] == [ref.digest]
    assert parts.evict_all() == pages
    assert parts.residency.transfers.loads == {
        "stored>device:ok": 1,
        "host>device:failed": 1,
        "host>device:ok": 1,
    }
    assert parts.pool.num_free == parts.pool.capacity
    parts.residency.check()


def test_a_step_does_not_look_at_adapters_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, refs, _ = prepare(tmp_path, num_pages=100)
    for ref in refs[:2]:
        parts.load(ref)
        parts.residency.pin(ref, True)
    residency = parts.residency
    for way in ("__iter__", "keys", "values", "items"):
        monkeypatch.setattr(
            AdapterEntries, way, lambda *_: pytest.fail("all adapters were looked at")
        )
    residency.hold(refs[2])
    residency.expect([ref.digest for ref in refs])
    residency.tick(0)
    parts.settle()
    assert residency.acquire(refs[2].digest) is not None
    residency.release(refs[2].digest)
    residency.release_hold(refs[2].digest)
    residency.tick(1)


def test_the_places_of_an_adapter_are_listed_in_one_type() -> None:
    folders = ("adapters", "benchmarks", "engine", "registry", "server", "manylora")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {
        path.relative_to(ROOT)
        for path in files
        if re.search(r'Literal\[[^\]]*"host"', path.read_text())
    }
    assert found == {Path("adapters/ref.py")}
    assert set(PLACES) == set(get_args(AdapterTier))
