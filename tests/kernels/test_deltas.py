"""What adapters add to a projection, added by the operation that reads it: the same bits as by one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from implementations import BF16, F16, F32, TRITON, Implementation
from manylora.adapters.lora.step import fill_tiles, tile_capacity
from manylora.kernels.sgmv import LoraDelta, Tiles
from numerics import assert_rows_close, bits
from oracles import ORACLES
from projected import Projected
from scattered_kv import AttentionCase
from scattered_lora import ScatteredLora, SgmvCase

IMPLEMENTATIONS = [TRITON]
RANKS = (0, 1, 8, 16, 64, 128)
BATCHES: dict[str, list[int]] = {
    "one row of the base": [-1],
    "base only": [-1] * 18,
    "one adapter": [4] * 19,
    "each its own": list(range(-1, 6)),
    "prompt and rows": [-1, -1, *[0] * 3, *[1] * 20, 2, 3, *[5] * 17],
}


def leaves_out(impl: Implementation, row_slots: list[int], dtype: torch.dtype) -> bool:
    """Whether it is too slow for each batch with each dtype: the interpreter takes one with the other."""
    return impl.is_interpreted and (len(row_slots) % 2 == 0) == (dtype == F32)


with_batches = pytest.mark.parametrize(
    ("row_slots", "tile_rows"),
    [
        *(pytest.param(row_slots, 16, id=name) for name, row_slots in BATCHES.items()),
        (BATCHES["prompt and rows"], 64),
    ],
)


class Site:
    """Adapters of one site and its base layer's output; tiles cover all rows, and some are unused."""

    def __init__(
        self,
        row_slots: Sequence[int],
        widths: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        tile_rows: int = 16,
    ) -> None:
        case = SgmvCase(len(row_slots), "identical", 100, widths, dtype, RANKS, tile_rows)
        self.lora = ScatteredLora(case, device)
        capacity = tile_capacity(len(row_slots), len(RANKS), tile_rows) + 2
        self.tiles = torch.full((3, capacity), 99, dtype=torch.int32, device=device)
        self.lora.tiles = Tiles(self.tiles, tile_rows)
        self.set_rows(row_slots)

    def set_rows(self, row_slots: Sequence[int]) -> None:
        """Write other rows and adapters into the tiles, which stay where they are."""
        tiles = np.empty(self.tiles.shape, dtype=np.int32)
        fill_tiles(tiles, row_slots, self.lora.case.tile_rows)
        self.tiles.copy_(torch.from_numpy(tiles))
        self.lora.row_slots = list(row_slots)

    def delta(self, impl: Implementation) -> LoraDelta:
        lora, shrink = self.lora, impl.kernels.shrink
        assert shrink is not None
        return shrink(lora.x, lora.operands())

    def added(self, impl: Implementation) -> torch.Tensor:
        """The output with the delta, by an operation of its own."""
        return self.lora.apply(impl.kernels.sgmv)


def _counters(device: torch.device) -> torch.Tensor:
    from manylora.kernels.triton.rows import _counters

    return _counters(device, 256)


@with_batches
def test_the_gate_of_a_delta(
    row_slots: list[int], tile_rows: int, impl: Implementation, dtype: torch.dtype
) -> None:
    if leaves_out(impl, row_slots, dtype):
        return
    site = Site(row_slots, (100, 100), dtype, impl.device, tile_rows)
    fused = impl.kernels.silu_and_mul(site.lora.y.clone(), site.delta(impl))
    assert torch.equal(bits(fused), bits(impl.kernels.silu_and_mul(site.added(impl))))
    assert_rows_close(fused.cpu(), ORACLES.silu_and_mul(site.lora.expected()), 4)


@with_batches
def test_the_norm_of_a_delta_and_the_residual(
    row_slots: list[int], tile_rows: int, impl: Implementation, dtype: torch.dtype
) -> None:
    if leaves_out(impl, row_slots, dtype):
        return
    site, width = Site(row_slots, (600,), dtype, impl.device, tile_rows), 600
    residual, weight = impl.randn((len(row_slots), width), dtype), impl.randn((width,), dtype, 1)
    before = residual.clone()
    for _ in range(2):  # the second finds the counters that the first has left
        fused = impl.kernels.fused_add_rms_norm(
            site.lora.y.clone(), residual, weight, 1e-6, site.delta(impl)
        )
        composed = impl.kernels.fused_add_rms_norm(site.added(impl), residual, weight, 1e-6)
        for got, expected in zip(fused, composed, strict=True):
            assert torch.equal(bits(got), bits(expected))
    assert torch.equal(residual, before)
    expected_normed, _ = ORACLES.fused_add_rms_norm(
        site.lora.expected(), residual.cpu(), weight.cpu(), 1e-6
    )
    assert_rows_close(fused[0].cpu(), expected_normed, 4)
    assert not _counters(residual.device).any()


@pytest.mark.parametrize("is_int8", [False, True], ids=["as they are", "int8"])
@pytest.mark.parametrize(
    ("sizes", "tile_rows"), [((4, 2, 24), 16), ((3, 1, 64), 64), ((2, 2, 128), 16)], ids=str
)
def test_heads_of_a_delta(
    sizes: tuple[int, int, int],
    tile_rows: int,
    is_int8: bool,
    impl: Implementation,
    dtype: torch.dtype,
) -> None:
    if impl.is_interpreted and is_int8 == (dtype == F32):
        return  # it is slow
    q_heads, kv_heads, head_dim = sizes
    case = AttentionCase(
        ((1, 9), (2, 5), (1, 1), (1, 0)), *sizes, 16, dtype, padding_rows=14, is_int8=is_int8
    )
    row_slots = [-1, 1, 1, 2, *[5] * 15]
    site = Site(
        row_slots, (q_heads * head_dim, *[kv_heads * head_dim] * 2), dtype, impl.device, tile_rows
    )
    for has_norms in (is_int8,) if impl.is_interpreted else (False, True):
        projected = Projected(case, has_norms, impl.device)
        projected.positions, projected.slots = projected.positions.int(), projected.slots.int()
        projected.qkv = site.lora.y
        fused = projected.call_with_scales(impl.kernels, site.delta(impl))
        projected.qkv = site.added(impl)
        for got, expected in zip(fused, projected.call_with_scales(impl.kernels), strict=True):
            assert torch.equal(bits(got), bits(expected))
        projected.qkv = site.lora.expected().to(impl.device)
        expected_out, _, _ = projected.call_with_scales(ORACLES)
        assert_rows_close(fused[0], expected_out, 500 if is_int8 else 8)


def test_more_adapters_than_before_in_the_same_tiles(impl: Implementation) -> None:
    site = Site([-1] * 20, (100, 100), F32, impl.device)
    for row_slots in ([-1] * 20, [2] * 20, [-1, *range(6), *[5] * 13], [-1] * 3 + [0] * 17):
        site.set_rows(row_slots)
        fused = impl.kernels.silu_and_mul(site.lora.y.clone(), site.delta(impl))
        assert_rows_close(fused.cpu(), ORACLES.silu_and_mul(site.lora.expected()), 2)
        exact = Site(row_slots, (100, 100), F32, impl.device)
        assert torch.equal(
            fused, impl.kernels.silu_and_mul(exact.lora.y.clone(), exact.delta(impl))
        )


def test_planes_arena_and_tables_of_a_base_are_not_read(impl: Implementation) -> None:
    site = Site([-1] * 5, (96, 96), BF16 if impl.is_interpreted else F16, impl.device)
    site.lora.arena.fill_(float("nan"))
    gate_up = site.lora.y.clone()
    gate_up[3, 7] = float("nan")
    fused = impl.kernels.silu_and_mul(gate_up.clone(), site.delta(impl))
    assert torch.equal(bits(fused), bits(impl.kernels.silu_and_mul(gate_up)))
    assert fused.isnan().sum() == 1
