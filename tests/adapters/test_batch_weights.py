from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from adapters_factory import random_lora, tiny_base
from lora_arena import BASE, BATCHES, MAX_RANK, LoraArena, fill
from numerics import assert_close
from weft.adapters.base_shape import SITES
from weft.adapters.batch_weights import PACK_COST, RECENT_STEPS, STABLE_STEPS, BatchWeights, StepWork
from weft.adapters.weight_bank import Linear
from weft.engine.model.linear import can_pack, make_linear

UNLIMITED = 1 << 30


def make(lora_arena: LoraArena, limit_bytes: int = UNLIMITED, *, packed: bool = True) -> BatchWeights:
    return BatchWeights(
        lora_arena.arena, lora_arena.tables, BASE, limit_bytes, make_linear=transposed_linear if packed else None
    )


def settle(lora_arena: LoraArena, batch_weights: BatchWeights, row_slots: list[int]) -> None:
    """Run steps of one batch until the banks are what they will be."""
    idle_steps = 0
    for _ in range(2000):
        before = replace(batch_weights.work)
        batch_weights.prepare(row_slots, lora_arena.step_generations(row_slots))
        idle_steps = idle_steps + 1 if batch_weights.work == before else 0
        if idle_steps > RECENT_STEPS + STABLE_STEPS:
            return
    raise AssertionError("the banks never come to rest")


def transposed_linear(weight: torch.Tensor) -> Linear:
    """A weight in another layout, like a packed one."""
    transposed = weight.t().contiguous()
    return lambda x: x @ transposed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("row_slots", BATCHES.values(), ids=BATCHES.keys())
def test_a_step_equals_plain_products(row_slots: list[int], dtype: torch.dtype) -> None:
    lora_arena = fill(dtype)
    batch_weights = make(lora_arena)
    lora_arena.check(batch_weights, row_slots)  # as they came
    settle(lora_arena, batch_weights, row_slots)
    lora_arena.check(batch_weights, row_slots)  # grouped and packed
    assert all(bank.is_packed for bank in batch_weights._banks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("row_slots", BATCHES.values(), ids=BATCHES.keys())
def test_a_step_straight_from_the_pages_equals_plain_products(row_slots: list[int], dtype: torch.dtype) -> None:
    lora_arena = fill(dtype)
    batch_weights = make(lora_arena, 0)
    for _ in range(2):
        lora_arena.check(batch_weights, row_slots)
    assert batch_weights.num_bytes == 0


@pytest.mark.parametrize("limit_mib", [0, 0.2, 0.5, 1, 4])
def test_the_limit_is_kept_and_what_is_beyond_comes_from_the_pages(limit_mib: float) -> None:
    lora_arena = fill()
    batch_weights = make(lora_arena, int(limit_mib * (1 << 20)))
    for _ in range(2):
        lora_arena.check(batch_weights, BATCHES["few rows"])
        assert batch_weights.num_bytes <= limit_mib * (1 << 20)
        settle(lora_arena, batch_weights, BATCHES["few rows"])


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="this CPU has no packed bf16 products")
def test_a_step_equals_plain_products_with_the_engines_packed_weights() -> None:
    lora_arena = fill(torch.bfloat16)
    batch_weights = BatchWeights(lora_arena.arena, lora_arena.tables, BASE, UNLIMITED, make_linear)
    for row_slots in BATCHES.values():
        settle(lora_arena, batch_weights, row_slots)
        lora_arena.check(batch_weights, row_slots)
        assert all(bank.is_packed for bank in batch_weights._banks)


def test_banks_that_would_cost_much_less_in_other_groups_are_built_anew() -> None:
    base = tiny_base(hidden=1024, kv=256, intermediate=4096, num_layers=1)
    lora_arena = LoraArena(base, torch.float32)
    for slot in range(6):
        lora_arena.put(slot, random_lora(base, 32, seed=slot))
    batch_weights = BatchWeights(lora_arena.arena, lora_arena.tables, base, UNLIMITED)
    for slot in (0, 5, 1, 4, 2, 3):  # two share a bank, and rows of others lie between theirs
        batch_weights.prepare([slot], lora_arena.step_generations([slot]))
    row_slots = sorted([*range(6)] * 16)
    settle(lora_arena, batch_weights, row_slots)
    assert batch_weights.rebuilds == 1
    lora_arena.check(batch_weights, row_slots)


def test_a_batch_of_the_base_only_has_no_lora_work() -> None:
    lora_arena = fill()
    assert make(lora_arena).prepare([-1, -1, -1], {}) is None
    assert make(lora_arena).prepare([], {}) is None


def test_adapters_that_come_and_go_are_always_right() -> None:
    lora_arena = fill()
    batch_weights = make(lora_arena)
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        if step % 7 == 3:  # an eviction and a load into the same slot
            layers = (1,) if step % 2 else None
            lora_arena.put(step % 8, random_lora(BASE, 8 * (1 + step % 3), seed=100 + step, layers=layers))
        count = 1 + step % 9
        row_slots = sorted((torch.randint(-1, 8, (count,), generator=generator)).tolist())
        lora_arena.check(batch_weights, row_slots, seed=step)


def test_a_slot_with_a_new_generation_is_never_served_old_weights() -> None:
    lora_arena = fill()
    batch_weights = make(lora_arena)
    settle(lora_arena, batch_weights, [0, 1, 2])
    lora_arena.put(1, random_lora(BASE, 8, seed=99))
    lora_arena.check(batch_weights, [0, 1, 2])


def test_columns_that_had_another_adapter_are_zero_where_the_new_one_changes_nothing() -> None:
    lora_arena = fill(loras=[random_lora(BASE, 8, seed=1), random_lora(BASE, 8, seed=2)])
    batch_weights = make(lora_arena)
    lora_arena.check(batch_weights, [0, 1])
    lora_arena.put(1, random_lora(BASE, 8, seed=3, layers=(1,)))
    lora_arena.check(batch_weights, [0, 1])


def test_weights_are_copied_once_and_not_in_every_step() -> None:
    lora_arena = fill()
    batch_weights = make(lora_arena)
    settle(lora_arena, batch_weights, [0, 1, 2])
    lora_arena.arena.poison(range(1, lora_arena.arena.num_pages))
    for row_slots in ([0, 1, 2], [1], [0, 2]):
        lora_arena.check(batch_weights, row_slots)


def test_evicted_adapters_are_never_read_again_when_banks_are_built_anew() -> None:
    lora_arena = fill()
    batch_weights = make(lora_arena)
    lora_arena.check(batch_weights, [0, 1, 2, 3])
    lora_arena.arena.poison(lora_arena._pages[3])  # slot 3 was evicted
    settle(lora_arena, batch_weights, [0, 1, 2])
    lora_arena.check(batch_weights, [0, 1, 2])
    settle(lora_arena, batch_weights, [0])
    lora_arena.check(batch_weights, [0])
    assert batch_weights.rebuilds >= 1


def test_what_is_no_longer_used_is_given_back() -> None:
    lora_arena = fill()
    batch_weights = make(lora_arena)
    settle(lora_arena, batch_weights, list(range(8)))
    most = batch_weights.num_bytes
    settle(lora_arena, batch_weights, [0, 3])
    assert batch_weights.num_bytes < most / 4
    lora_arena.check(batch_weights, [0, 3])


def test_neighbours_change_nothing_beyond_rounding() -> None:
    lora_arena = fill()
    generations = lora_arena.step_generations([0, 2, 3])
    x = torch.randn(6, BASE.modules[0].in_features)
    y = torch.zeros(6, sum(BASE.site_widths(0)))
    together = y.clone()
    step = make(lora_arena).prepare([0, 0, 2, 2, 3, 3], generations)
    assert step is not None
    step.apply(0, 0, x, together)
    single = make(lora_arena).prepare([2, 2], generations)
    assert single is not None
    apart = y[2:4].clone()
    single.apply(0, 0, x[2:4].clone(), apart)
    assert_close(together[2:4], apart)


@pytest.mark.parametrize("packed", [False, True])
def test_an_adapter_that_overflows_does_not_reach_the_rows_of_others(packed: bool) -> None:
    huge = random_lora(BASE, 8, seed=1)
    for a in huge.lora_a.values():
        a.fill_(1e4)
    lora_arena = fill(loras=[huge, random_lora(BASE, 8, seed=2)])
    batch_weights = make(lora_arena, packed=packed)
    width = BASE.modules[0].in_features
    for _ in range(STABLE_STEPS + 2):
        step = batch_weights.prepare([0, 0, 1, 1], lora_arena.step_generations([0, 1]))
    assert step is not None
    x = torch.full((4, width), 1e36)
    x[2:] = torch.randn(2, width)
    y = torch.zeros(4, sum(BASE.site_widths(0)))
    x[3, 0] = 3e37  # with the other adapter's A it overflows
    step.apply(0, 0, x, y)
    assert not torch.isfinite(y[0]).all()
    assert torch.isfinite(y[2:]).all()


@pytest.mark.parametrize("packed", [False, True])
def test_weights_beyond_the_number_format_do_not_reach_the_rows_of_others(packed: bool) -> None:
    """The other rows meet them as zeros, but zero times infinity is not a number."""
    wild = random_lora(BASE, 8, seed=1, alpha=8 * 64.0)
    wild = replace(wild, lora_b={key: 5000 * b.sign() for key, b in wild.lora_b.items()})
    lora_arena = fill(torch.float16, [wild, random_lora(BASE, 8, seed=2)])
    batch_weights = make(lora_arena, packed=packed)
    row_slots = [0, 1]
    alone = lora_arena.run(make(lora_arena, 0), row_slots)
    settle(lora_arena, batch_weights, row_slots)
    together = lora_arena.run(batch_weights, row_slots)
    assert len(batch_weights._banks) == 1
    for site, y in together.items():
        assert_close(y[1:], alone[site][1:])


def test_no_step_copies_packs_or_frees_more_than_its_share() -> None:
    lora_arena = fill()
    batch_weights = make(lora_arena)
    columns = MAX_RANK + batch_weights.bank_columns
    piece = max(  # a site's new columns, and an adapter's in them
        sum((BASE.modules[module].in_features + BASE.modules[module].out_features) * columns for module in site.modules)
        * lora_arena.arena.dtype.itemsize
        for site in SITES
    )
    batches = [[0, 1, 2]] * 60 + [[*range(8)]] * 300 + [[5], [6, 7], [0, 2, 4]] * 4 + [[0, 3]] * 100
    done = StepWork()
    for row_slots in batches:
        before = replace(batch_weights.work)
        batch_weights.prepare(row_slots, lora_arena.step_generations(row_slots))
        done = batch_weights.work
        assert done.copied - before.copied <= batch_weights.step_bytes + piece
        assert done.packed - before.packed <= batch_weights.step_bytes // PACK_COST + piece
        assert done.freed - before.freed <= batch_weights.step_bytes + piece
    assert batch_weights.rebuilds > 0
    assert min(done.copied, done.packed, done.freed) > 5 * (batch_weights.step_bytes + piece)


def test_a_new_adapter_is_right_in_every_step_until_it_is_held_in_whole() -> None:
    lora_arena = fill()
    batch_weights = make(lora_arena)
    row_slots = BATCHES["few rows"]
    settle(lora_arena, batch_weights, row_slots[:4])
    copied: list[int] = []
    while not copied or batch_weights.work.copied != copied[-1]:
        copied.append(batch_weights.work.copied)
        lora_arena.check(batch_weights, row_slots, seed=len(copied))
    assert len(copied) > 3


def test_an_adapter_that_was_away_while_it_was_copied_goes_on_where_it_stood() -> None:
    lora_arena = fill()
    batch_weights = make(lora_arena)
    lora_arena.check(batch_weights, [2])
    lora_arena.check(batch_weights, [0, 1])
    lora_arena.put(1, random_lora(BASE, 64, seed=40))  # and another came into its slot
    for _ in range(60):
        lora_arena.check(batch_weights, [0, 1, 2])


def test_an_adapter_whose_bank_was_packed_while_it_was_away_is_copied_anew() -> None:
    lora_arena = fill(loras=[random_lora(BASE, 8, seed=1), random_lora(BASE, 64, seed=2, layers=(0, 1))])
    batch_weights = make(lora_arena)
    batch_weights.step_bytes = 1 << 30
    lora_arena.check(batch_weights, [0])
    batch_weights.step_bytes = 1
    lora_arena.put(1, random_lora(BASE, 8, seed=3))
    lora_arena.check(batch_weights, [0, 1])  # its first piece is copied
    settle(lora_arena, batch_weights, [0])
    assert all(bank.is_packed for bank in batch_weights._banks)
    batch_weights.step_bytes = 1 << 30
    for _ in range(3):
        lora_arena.check(batch_weights, [0, 1])


def test_new_banks_are_given_up_when_the_batch_changes_before_they_are_complete() -> None:
    base = tiny_base(hidden=1024, kv=256, intermediate=4096, num_layers=1)
    lora_arena = LoraArena(base, torch.float32)
    for slot in range(6):
        lora_arena.put(slot, random_lora(base, 32, seed=slot))
    batch_weights = BatchWeights(lora_arena.arena, lora_arena.tables, base, UNLIMITED)
    for slot in (0, 5, 1, 4, 2, 3):
        batch_weights.prepare([slot], lora_arena.step_generations([slot]))
    row_slots = sorted([*range(6)] * 16)
    while batch_weights._regroup is None:
        batch_weights.prepare(row_slots, lora_arena.step_generations(row_slots))
    batch_weights.prepare(row_slots, lora_arena.step_generations(row_slots))
    lora_arena.arena.poison(lora_arena._pages[5])  # its requests ended and it was evicted
    lora_arena.check(batch_weights, row_slots[:80])
    settle(lora_arena, batch_weights, row_slots[:80])
    lora_arena.check(batch_weights, row_slots[:80])
    assert batch_weights.num_bytes == sum(bank.num_bytes for bank in batch_weights._banks)


def test_banks_are_built_anew_where_old_and_new_have_no_room_beside_each_other() -> None:
    base = tiny_base(hidden=1024, kv=256, intermediate=4096, num_layers=1)
    lora_arena = LoraArena(base, torch.float32)
    for slot in range(6):
        lora_arena.put(slot, random_lora(base, 32, seed=slot))
    most = BatchWeights(lora_arena.arena, lora_arena.tables, base, UNLIMITED)
    for slot in (0, 5, 1, 4, 2, 3):
        most.prepare([slot], lora_arena.step_generations([slot]))
    batch_weights = BatchWeights(lora_arena.arena, lora_arena.tables, base, most.num_bytes)
    for slot in (0, 5, 1, 4, 2, 3):
        batch_weights.prepare([slot], lora_arena.step_generations([slot]))
    row_slots = sorted([*range(6)] * 16)
    for step in range(60):
        if step % 5 == 0:
            lora_arena.check(batch_weights, row_slots, seed=step)
        batch_weights.prepare(row_slots, lora_arena.step_generations(row_slots))
        assert batch_weights.num_bytes <= most.num_bytes
    assert batch_weights.rebuilds == 1
    assert len(batch_weights._held) == 6
