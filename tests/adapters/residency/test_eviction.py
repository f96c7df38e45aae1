"""What goes first, what goes with it, and what it costs to have it again."""

from __future__ import annotations

from pathlib import Path

import pytest

from manylora.errors import PageAccountingError
from manylora.memory.eviction import HALF_LIFE_S
from residency_parts import COSTS, prepare


def test_packing_happens_once_and_a_swap_in_is_page_copies_and_one_table_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, (ref, *_), pages = prepare(tmp_path)
    parts.load(ref)
    parts.evict_all()
    rows, arena = parts.tables.num_written, parts.arena.bytes.clone()
    parts.copier.copied.clear()
    monkeypatch.setattr(parts.blobs, "open", lambda *_: pytest.fail("the blob was read again"))
    assert parts.matches(parts.load(ref), parts.loras[ref.digest])
    (copied,) = parts.copier.copied
    assert (len(copied), parts.tables.num_written - rows, parts.loader.num_loads) == (pages, 1, 1)
    changed = [page for page in range(len(arena)) if not arena[page].equal(parts.arena.bytes[page])]
    assert set(changed) <= set(copied)
    assert parts.residency.transfers.loads == {"stored>device:ok": 1, "host>device:ok": 1}


@pytest.mark.parametrize("for_swapped_kv", [False, True])
def test_what_is_in_host_memory_goes_before_what_must_be_read_again(
    tmp_path: Path, for_swapped_kv: bool
) -> None:
    parts, (dear, cheap, _), pages = prepare(tmp_path, num_pages=100)
    for ref in (dear, cheap):
        parts.load(ref)
    if for_swapped_kv:
        assert parts.images.make_room(
            parts.slab.num_free + pages
        )  # drops the image used least recently
    else:
        parts.images.drop(dear.digest)
    parts.residency.tick(0)  # where the loss of the image is noticed
    assert parts.evictor.make_room(parts.pool.num_free + pages)
    assert [parts.residency.state(ref.digest) for ref in (dear, cheap)] == ["device", "host"]


def test_what_is_used_more_often_goes_later_also_after_it_was_away(tmp_path: Path) -> None:
    parts, (often, seldom, _), pages = prepare(tmp_path, num_pages=100)
    for _ in range(3):
        parts.load(often)
        parts.evict_all()
    parts.load(often)
    for ref in (often, seldom):
        parts.load(ref)
    assert parts.evictor.make_room(parts.pool.num_free + pages)
    assert [parts.residency.state(ref.digest) for ref in (often, seldom)] == ["device", "host"]


def test_being_brought_in_and_running_for_the_first_time_is_one_use(tmp_path: Path) -> None:
    parts, (ref, *_), _ = prepare(tmp_path)
    uses = parts.residency.known[ref.digest].uses
    parts.load(ref)
    parts.clock[0] += HALF_LIFE_S
    for value, num_runs in ((0.5, 1), (1.5, 2), (2.5, 3)):
        assert parts.residency.acquire(ref.digest) is not None
        (resident,) = parts.residency.residents()
        parts.residency.release(ref.digest, last_step=1)
        assert (uses.value, uses.last_s, resident.uses) == (value, HALF_LIFE_S, num_runs)


def test_a_request_that_found_no_pages_after_all_did_not_use_its_adapter(tmp_path: Path) -> None:
    """It is tried again in every step, which must not make its adapter look busy."""
    parts, (ref, *_), _ = prepare(tmp_path)
    parts.load(ref)
    for _ in range(5):
        assert parts.residency.acquire(ref.digest) is not None
        parts.residency.release(ref.digest)
    (resident,) = parts.residency.residents()
    assert (parts.residency.known[ref.digest].uses.value, resident.uses) == (1, 0)


def test_an_adapters_cached_prefixes_go_with_it_and_nobody_elses(tmp_path: Path) -> None:
    parts, (first, second, _), pages = prepare(tmp_path, num_pages=100)
    for digest in (first.digest, second.digest, None):
        if digest is not None:
            parts.load(first if digest == first.digest else second)
            assert parts.residency.acquire(digest) is not None
        parts.prefixes.release(parts.cache_blocks(digest, 3), 0)
        if digest is not None:
            parts.residency.release(digest)
        parts.clock[0] += 1
    by_digest = {resident.digest: resident for resident in parts.residency.residents()}
    assert by_digest[first.digest].prefix_pages == 3
    free = parts.pool.num_free
    parts.residency.forget(first.digest)
    assert parts.prefixes.groups() == {second.digest: 3, None: 3}
    assert parts.pool.num_free == free + pages + 3
    assert parts.evictor.evictions == {"adapter": 1, "prefix": 3}
    parts.residency.check()
    parts.prefixes.check([])


def test_an_adapter_is_worth_its_cached_prefixes_too_and_less_when_they_are_gone(
    tmp_path: Path,
) -> None:
    parts, (ref, other, _), pages = prepare(tmp_path)
    for each in (ref, other, other):
        parts.load(each)
    assert parts.residency.acquire(ref.digest) is not None
    parts.prefixes.release(parts.cache_blocks(ref.digest, 2), 0)
    parts.residency.release(ref.digest)
    entry, busier = parts.residency.entries[ref.digest], parts.residency.entries[other.digest]
    busier.uses.note(0.0)
    parts.evictor.offer(busier)
    assert parts.residency.reload_cost(entry)[0] == pytest.approx(
        pages * COSTS.copy_s + 2 * COSTS.token_s
    )
    assert parts.residency.reload_cost(entry)[1] == pages + 2
    assert parts.evictor.first([entry, busier]) is busier
    parts.prefixes.evict_group(ref.digest)
    assert parts.residency.reload_cost(entry)[0] == pytest.approx(pages * COSTS.copy_s)
    assert parts.residency.reload_cost(entry)[1] == pages
    assert parts.evictor.first([entry, busier]) is entry


def test_an_adapter_stays_until_the_last_of_all_steps_that_read_it_is_complete(
    tmp_path: Path,
) -> None:
    parts, (ref, *_), pages = prepare(tmp_path)
    parts.load(ref)
    assert parts.residency.acquire(ref.digest) is not None
    assert parts.residency.acquire(ref.digest) is not None
    parts.residency.release(ref.digest, last_step=7)
    parts.residency.release(ref.digest, last_step=3)
    parts.residency.tick(3)
    assert parts.evict_all() == 0
    parts.residency.tick(7)
    assert parts.evict_all() == pages


def test_blocks_that_a_request_holds_may_not_lose_their_adapter(tmp_path: Path) -> None:
    parts, (ref, *_), _ = prepare(tmp_path)
    parts.load(ref)
    assert parts.residency.acquire(ref.digest) is not None
    held = parts.cache_blocks(ref.digest, 2)
    parts.residency.release(ref.digest)  # too early
    with pytest.raises(PageAccountingError, match="hold its cached blocks"):
        parts.residency.forget(ref.digest)
    assert len(held) == 2


def test_check_finds_cached_blocks_of_an_adapter_that_is_not_there(tmp_path: Path) -> None:
    parts, (ref, *_), _ = prepare(tmp_path)
    parts.cache_blocks(ref.digest, 1)
    with pytest.raises(PageAccountingError, match="not on the device"):
        parts.residency.check()


def test_check_finds_an_adapter_in_use_that_can_be_evicted(tmp_path: Path) -> None:
    parts, (ref, *_), _ = prepare(tmp_path)
    parts.load(ref)
    parts.residency.check()
    assert parts.residency.acquire(ref.digest) is not None
    parts.evictor.offer(parts.residency.entries[ref.digest])
    with pytest.raises(PageAccountingError, match="in use and evictable"):
        parts.residency.check()


def test_for_a_slot_the_adapter_goes_that_is_used_least_and_no_cached_block(
    tmp_path: Path,
) -> None:
    parts, refs, _ = prepare(tmp_path, count=3, slots=2, num_pages=100)
    parts.prefixes.release(parts.cache_blocks(None, 3), 0)
    for ref in (*refs[:2], refs[0]):
        parts.clock[0] += 1
        parts.load(ref)
    parts.load(refs[2])
    assert [parts.residency.state(ref.digest) for ref in refs] == ["device", "host", "device"]
    assert parts.prefixes.groups() == {None: 3}


def test_cached_prefixes_make_way_for_an_adapter_that_is_wanted(tmp_path: Path) -> None:
    parts, (ref, *_), pages = prepare(tmp_path)
    parts.prefixes.release(parts.cache_blocks(None, parts.pool.num_free), 0)
    assert parts.pool.num_free == 0
    parts.load(ref)
    assert parts.prefixes.groups() == {None: parts.pool.capacity - pages}
    parts.prefixes.check([])


def test_a_larger_adapter_waits_while_a_slot_alone_would_not_do(tmp_path: Path) -> None:
    parts, (idle, large, _), pages = prepare(tmp_path, slots=1)
    parts.load(idle)
    kv = parts.pool.allocate(parts.pool.num_free, "kv")
    assert kv is not None
    parts.residency.transfers.reserve_pages = 1
    parts.residency.hold(large)
    parts.settle()
    assert parts.residency.state(idle.digest) == "device"  # evicting it would not do, so it was not
    parts.residency.transfers.reserve_pages = 0
    parts.settle()
    assert [parts.residency.state(ref.digest) for ref in (idle, large)] == ["host", "device"]
    assert len(kv) == parts.pool.capacity - pages
