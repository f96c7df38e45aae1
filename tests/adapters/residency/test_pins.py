from __future__ import annotations

from pathlib import Path

import pytest

from manylora.adapters.ref import AdapterRef
from manylora.adapters.residency.pins import Pins
from residency_parts import ResidencyParts, prepare


def on_device(parts: ResidencyParts, refs: list[AdapterRef]) -> list[bool]:
    return [parts.residency.state(ref.digest) == "device" for ref in refs]


def test_a_pinned_adapter_is_brought_in_and_stays_until_it_is_unpinned(tmp_path: Path) -> None:
    parts, (ref, *_), pages = prepare(tmp_path)
    parts.residency.pin(ref, True)
    parts.settle()
    assert parts.residency.state(ref.digest) == "device"
    assert parts.evict_all() == 0
    assert [adapter.pinned for adapter in parts.residency.residents()] == [True]
    parts.residency.pin(ref, False)
    assert parts.evict_all() == pages
    parts.settle()
    assert parts.residency.state(ref.digest) == "host"
    parts.residency.check()


@pytest.mark.parametrize(
    ("sizes", "kept"), [({"slots": 4, "num_pages": 200}, 2), ({"slots": 3}, 1), ({"slots": 1}, 0)]
)
def test_pins_never_keep_others_out(tmp_path: Path, sizes: dict[str, int], kept: int) -> None:
    parts, refs, _ = prepare(tmp_path, count=5, **{"num_pages": 100, **sizes})
    for ref in refs:
        parts.residency.pin(ref, True)
    for ref in refs:
        parts.load(ref)
    parts.evict_all()
    assert on_device(parts, refs) == [True] * kept + [False] * (5 - kept)


def test_pinned_beyond_the_share_goes_after_all_that_is_not_pinned(tmp_path: Path) -> None:
    parts, refs, pages = prepare(tmp_path, count=3, slots=3, num_pages=100)
    for ref in refs[:2]:
        parts.residency.pin(ref, True)
    for ref in refs:
        parts.load(ref)
        parts.clock[0] += 1
    assert parts.evictor.make_room(parts.pool.num_free + pages)
    assert on_device(parts, refs) == [True, True, False]
    parts.residency.pin(refs[0], False)  # the second is the one that is kept now
    assert parts.evict_all() == pages
    assert on_device(parts, refs) == [False, True, False]


def test_as_many_are_brought_in_as_the_share_keeps_one_after_the_other(tmp_path: Path) -> None:
    parts, refs, _ = prepare(tmp_path, count=4, slots=4, num_pages=100)
    for ref in refs:
        parts.residency.pin(ref, True)
    parts.residency.tick(0)
    assert len(parts.loads.pending) == 1
    parts.settle()
    assert on_device(parts, refs) == [True, True, False, False]
    assert parts.loader.num_loads == 2


def test_what_is_wanted_comes_first(tmp_path: Path) -> None:
    """A pinned adapter waits while one that is wanted has no room, though it would fit itself."""
    parts, (running, wanted, pinned), pages = prepare(tmp_path, count=3)
    parts.load(running)
    assert parts.residency.acquire(running.digest)
    kv = parts.pool.allocate(parts.pool.num_free - 2 * pages, "kv")
    assert kv is not None
    parts.residency.transfers.reserve_pages = pages + 1
    parts.residency.hold(wanted)
    parts.residency.pin(pinned, True)
    parts.settle()
    assert (parts.residency.waiting_reason(wanted.digest), parts.pool.num_free) == (
        "NO_ROOM",
        2 * pages,
    )
    parts.residency.transfers.reserve_pages = 0
    parts.settle()
    assert on_device(parts, [running, wanted, pinned]) == [True, True, True]


def test_a_pinned_adapter_takes_what_is_idle_and_nothing_that_is_in_use(tmp_path: Path) -> None:
    parts, (running, idle, pinned), pages = prepare(tmp_path, count=3)
    parts.load(running)
    assert parts.residency.acquire(running.digest)
    kv = parts.pool.allocate(parts.pool.num_free, "kv")
    assert kv is not None
    parts.residency.pin(pinned, True)
    parts.settle()
    assert on_device(parts, [running, pinned]) == [True, False]
    parts.pool.free(kv[:1], 0)
    parts.settle()
    assert parts.residency.state(pinned.digest) == "host"  # it was read, so that its size is known
    assert parts.pool.num_free == 1
    parts.pool.free(kv[1:pages], 0)
    parts.load(idle)  # what is wanted comes first
    parts.settle()
    assert on_device(parts, [running, idle, pinned]) == [True, False, True]


def test_without_room_a_pinned_adapter_is_not_read_over_and_over(tmp_path: Path) -> None:
    parts, (ref, *_), _ = prepare(tmp_path, slab_pages=0)
    parts.residency.transfers.reserve_pages = parts.pool.capacity - 1
    parts.residency.pin(ref, True)
    parts.settle()
    assert (parts.residency.state(ref.digest), parts.loader.num_loads) == ("stored", 1)
    parts.residency.transfers.reserve_pages = 0
    parts.settle()
    assert (parts.residency.state(ref.digest), parts.loader.num_loads) == ("device", 2)


def test_a_pinned_adapter_that_cannot_be_loaded_is_tried_once_and_again_when_pinned_anew(
    tmp_path: Path,
) -> None:
    parts, (broken, sound, _), _ = prepare(tmp_path)
    path = parts.blobs.path(broken.weights_sha256)
    content = path.read_bytes()
    path.unlink()
    parts.residency.pin(broken, True)
    parts.residency.pin(sound, True)
    assert parts.settle() == []  # nobody waits for it
    assert on_device(parts, [broken, sound]) == [False, True]
    assert parts.residency.transfers.loads == {"stored>device:failed": 1, "stored>device:ok": 1}
    path.write_bytes(content)
    parts.settle()
    assert on_device(parts, [broken]) == [False]
    parts.residency.pin(broken, True)
    parts.settle()
    assert on_device(parts, [broken, sound]) == [True, True]


def test_unpinning_or_deleting_ends_what_was_coming_for_the_pin(tmp_path: Path) -> None:
    parts, refs, _ = prepare(tmp_path)
    parts.residency.pin(refs[0], True)
    parts.residency.tick(0)
    parts.residency.pin(refs[0], False)
    assert not parts.loads.run_one() or parts.loader.num_loads == 0
    parts.residency.pin(refs[1], True)
    parts.residency.tick(0)
    parts.loads.run_one()
    parts.residency.forget(refs[1].digest)
    parts.settle()
    assert on_device(parts, refs) == [False, False, False]
    assert parts.slab.num_free == parts.slab.num_pages
    parts.residency.check()


def test_a_pinned_adapter_takes_a_slot_as_soon_as_no_step_uses_it_any_more(tmp_path: Path) -> None:
    parts, (gone, pinned, _), _ = prepare(tmp_path, slots=2)
    for ref in (gone, pinned):
        parts.load(ref)
        assert parts.residency.acquire(ref.digest) is not None
        parts.residency.release(ref.digest, last_step=1)
        parts.residency.forget(ref.digest)
    parts.residency.pin(pinned, True)
    parts.settle()
    assert on_device(parts, [pinned]) == [False]
    parts.settle(step=1)
    assert on_device(parts, [pinned]) == [True]


def test_who_wants_an_adapter_that_comes_for_its_pin_waits_for_the_same_load(
    tmp_path: Path,
) -> None:
    parts, (ref, *_), _ = prepare(tmp_path)
    parts.residency.pin(ref, True)
    parts.residency.tick(0)
    parts.residency.hold(ref)
    parts.residency.release_hold(ref.digest)  # gone again, and still it comes
    parts.residency.hold(ref)
    parts.settle()
    assert parts.residency.acquire(ref.digest) is not None
    assert parts.loader.num_loads == 1


def test_missing_pins_are_told_in_the_order_of_pinning_also_after_they_were_there(
    tmp_path: Path,
) -> None:
    _, refs, _ = prepare(tmp_path)
    pins = Pins(slots=8, num_pages=100)
    for ref in refs:
        pins.add(ref, is_here=False)
    assert pins.missing() == refs
    for ref in refs:
        pins.entered(ref.digest)
    assert pins.missing() == []
    pins.left(refs[2].digest)
    pins.left(refs[0].digest)
    pins.left(refs[0].digest)
    assert pins.missing() == [refs[0], refs[2]]
    pins.note_load(refs[1].digest, succeeded=False)
    pins.left(refs[1].digest)
    assert pins.missing() == [refs[0], refs[2]]  # it cannot be loaded
    pins.add(refs[1], is_here=False)
    assert pins.missing() == refs
    pins.discard(refs[0].digest)
    assert pins.missing() == refs[1:]
