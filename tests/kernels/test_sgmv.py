"""The contract of SGMV."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from implementations import BF16, CPU, F16, F32, TORCH, Implementation, needs_compiler, num_threads
from manylora.kernels import native
from manylora.kernels.native.sgmv import sgmv as native_sgmv
from manylora.kernels.sgmv import SgmvOperands, SgmvSite, Tiles
from manylora.lora_rows import GROUP_ROWS, MAX_RANK, PITCH_BYTES, row_pitch_bytes
from numerics import assert_rows_close, bits
from scattered_lora import LAYER, ScatteredLora, SgmvCase, make_tiles

RANKS = (0, 8, 16, 24, 64, 128, 256)
POPULARITIES = ("distinct", "uniform", "zipf", "identical", "skewed")
NUM_TOKENS = (1, 2, 3, 7, 16, 17, 64, 133, 512)
HIDDEN = (896, 2048, 2049, 4096, 4864, 11008, 14336)
SMALL_CASES = [
    SgmvCase(1, "identical", 896, (896, 128, 128), F32),
    SgmvCase(2, "distinct", 128, (128,), F16),
    SgmvCase(3, "distinct", 896, (128,), BF16),
    SgmvCase(7, "zipf", 256, (512, 256), F32),
    SgmvCase(16, "uniform", 128, (896,), BF16),
    SgmvCase(17, "skewed", 896, (128, 64, 64), F16),
    SgmvCase(64, "uniform", 128, (256, 256), F32, tile_rows=64),
    SgmvCase(133, "zipf", 128, (128,), F32, tile_rows=64),
    SgmvCase(133, "distinct", 128, (64, 64), BF16, ranks=(0, 8, 16, 24)),
    SgmvCase(7, "uniform", 2049, (128,), F32, ranks=(16, 1, 0)),
    SgmvCase(7, "skewed", 128, (2049,), F16, ranks=(8, 24)),
    SgmvCase(3, "distinct", 4864, (896,), BF16, ranks=(64, 8, 16)),
]
CASES = [
    *SMALL_CASES,
    *(
        SgmvCase(tokens, popularity, 896, (896, 128, 128), F32 if tokens % 2 else BF16)
        for tokens in NUM_TOKENS
        for popularity in (POPULARITIES if tokens < 512 else ("distinct", "skewed"))
    ),
    *(SgmvCase(17, "uniform", hidden, (512,), BF16, ranks=(0, 24, 8)) for hidden in HIDDEN),
    *(SgmvCase(17, "zipf", 512, (hidden, hidden), F32, ranks=(8, 1, 64)) for hidden in HIDDEN),
    *(  # sizes that fit no vector
        SgmvCase(40, "uniform", in_features, widths, dtype, RANKS)
        for in_features, widths in (
            *(
                (2049, (100,)),
                (100, (24, 2049)),
                (24, (100, 24, 40)),
                (1, (1, 2, 3)),
                (15, (17, 16, 15)),
            ),
            *((1025, (129, 63, 65)), (3000, (128, 127, 257))),
        )
        for dtype in (F32, BF16)
    ),
    *(SgmvCase(150, "distinct", 896, (896, 128, 100), dtype, RANKS, 64) for dtype in (F32, BF16)),
]
GPU_CASES = [
    *(
        SgmvCase(tokens, popularity, 896, (896, 128, 128), dtype, tile_rows=rows)
        for tokens in NUM_TOKENS
        for popularity in POPULARITIES
        for dtype, rows in ((F32, 16), (BF16, 64 if tokens >= 64 else 16))
    ),
    *(
        SgmvCase(17, "uniform", hidden, (512,), dtype)
        for hidden in HIDDEN
        for dtype in (F32, F16, BF16)
    ),
    *(
        SgmvCase(17, "zipf", 512, (hidden, hidden), dtype)
        for hidden in HIDDEN
        for dtype in (F32, F16, BF16)
    ),
    SgmvCase(512, "skewed", 4096, (4096, 1024, 1024), BF16, tile_rows=128),
]


def cases(impl: Implementation) -> list[SgmvCase]:
    """What an implementation is compared with dense products for."""
    if impl.is_interpreted:
        return SMALL_CASES
    return CASES if impl.device == CPU else [*SMALL_CASES, *GPU_CASES]


def tiles_of(tiles: Sequence[tuple[int, int, int]], device: torch.device, rows: int = 64) -> Tiles:
    """From (slot, start, length) of each."""
    return Tiles(torch.tensor(tiles, dtype=torch.int32).T.contiguous().to(device), rows)


def test_implementations_equal_dense_products(impl: Implementation, case: SgmvCase) -> None:
    operands = ScatteredLora(case, impl.device)
    assert_rows_close(
        operands.apply(impl.kernels.sgmv), operands.expected(), impl.tolerance(case.dtype)
    )


def test_tiles_of_any_length_are_right(impl: Implementation, dtype: torch.dtype) -> None:
    lengths = (1, 2, 3, 15, 16, 17, 33, 64) if impl.is_interpreted else range(1, 65)
    operands = ScatteredLora(
        SgmvCase(sum(lengths), "uniform", 100, (24, 130), dtype, (8, 16, 24, 64) * 16), impl.device
    )
    operands.row_slots = [slot for slot, length in enumerate(lengths) for _ in range(length)]
    operands.tiles = make_tiles(operands.row_slots, 64, 64, impl.device)
    assert operands.tiles.numbers[2, : len(lengths)].tolist() == list(lengths)
    assert_rows_close(operands.apply(impl.kernels.sgmv), operands.expected(), impl.tolerance(dtype))


def test_rows_of_the_base_and_untouched_modules_keep_every_bit(impl: Implementation) -> None:
    operands = ScatteredLora(
        SgmvCase(64, "uniform", 128, (128, 64), F32, ranks=(0, 8, 16, 0)), impl.device
    )
    y = operands.apply(impl.kernels.sgmv)
    column = 0
    for module, width in zip(operands.site.modules, operands.site.widths, strict=True):
        untouched = [(slot, module) not in operands.dense for slot in operands.row_slots]
        assert 0 < sum(untouched) < 64
        columns = slice(column, column + width)
        assert torch.equal(y[untouched][:, columns], operands.y[untouched][:, columns])
        column += width


def test_rows_of_no_tile_keep_every_bit_and_are_not_read(
    impl: Implementation, dtype: torch.dtype
) -> None:
    operands = ScatteredLora(
        SgmvCase(40, "identical", 100, (100, 24), dtype, (24, 16)), impl.device
    )
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(-(2**15), 2**15, operands.y.shape, generator=generator).to(impl.device)
    outside = [row for row in range(40) if not (3 <= row < 10 or 20 <= row < 30 or 33 <= row < 37)]
    y_bits = bits(operands.y)
    y_bits[outside] = noise.to(y_bits.dtype)[outside]
    operands.y = y_bits.view(dtype)
    assert operands.y[outside].isnan().any()
    operands.x[outside] = float("nan")
    operands.tiles = tiles_of(
        [(0, 3, 7), (-1, 0, 3), (1, 20, 10), (1, 33, 4), (-1, 0, 0)], impl.device
    )
    y = operands.apply(impl.kernels.sgmv)
    assert torch.equal(bits(y)[outside], y_bits[outside])
    assert torch.isfinite(y[[*range(3, 10), *range(20, 30), *range(33, 37)]]).all()


def test_nothing_but_an_adapter_s_own_weights_is_read(
    impl: Implementation, dtype: torch.dtype
) -> None:
    operands = ScatteredLora(
        SgmvCase(30, "identical", 100, (130, 24), dtype, (24, 64, 8)), impl.device
    )
    operands.tiles = tiles_of([(1, 0, 30)], impl.device)
    clean = operands.apply(impl.kernels.sgmv)
    assert not torch.equal(clean, operands.y)
    # What is outside an adapter's rows is NaN already; now the other adapters are, too.
    units = operands.arena.view(-1, operands.unit)
    for slot in (0, 2):
        for part, sizes in enumerate(((100, 100), (130, 24))):
            for module, size in zip(operands.site.modules, sizes, strict=True):
                group_units = 8 * row_pitch_bytes(size, dtype.itemsize) // PITCH_BYTES
                for offset in operands.offsets[slot, LAYER, module, part].tolist():
                    units[offset : offset + group_units if offset >= 0 else offset] = float("nan")
    operands.tables.scalings[[0, 2]] = float("nan")
    assert torch.equal(operands.apply(impl.kernels.sgmv), clean)


def test_a_batch_of_the_base_alone_reads_nothing(impl: Implementation) -> None:
    operands = ScatteredLora(SgmvCase(16, "uniform", 128, (128,), F32, ranks=(8,)), impl.device)
    operands.arena.fill_(float("nan"))
    operands.tiles.numbers[0].fill_(-1)
    assert torch.equal(operands.apply(impl.kernels.sgmv), operands.y)


def test_a_step_of_no_rows_is_no_error(impl: Implementation) -> None:
    operands = ScatteredLora(SgmvCase(1, "identical", 100, (24,), F32, (8,)), impl.device)
    operands.x, operands.y = operands.x[:0], operands.y[:0]
    operands.tiles = tiles_of([(-1, 0, 0)], impl.device)
    assert operands.apply(impl.kernels.sgmv).shape == (0, 24)


def test_a_row_does_not_depend_on_the_other_adapters_of_the_batch(impl: Implementation) -> None:
    operands = ScatteredLora(
        SgmvCase(32, "identical", 256, (128, 64), F32, ranks=(24, 64, 16)), impl.device
    )
    alone = operands.apply(impl.kernels.sgmv)[16:]
    operands.tiles = make_tiles([-1] * 3 + [0] * 5 + [1] * 8 + [2] * 16, 16, 3, impl.device)
    assert_rows_close(operands.apply(impl.kernels.sgmv)[16:], alone, 0.1)
    if impl is not TORCH:
        assert torch.equal(operands.apply(impl.kernels.sgmv)[16:], alone)


@pytest.mark.parametrize("in_features", [100, 2049])
def test_a_row_has_the_same_bits_alone_and_in_any_place(
    in_features: int, impl: Implementation, dtype: torch.dtype
) -> None:
    if not impl.is_bitwise:
        return
    operands = ScatteredLora(SgmvCase(64, "uniform", in_features, (100, 24, 130), dtype, RANKS))
    together = operands.apply(impl.kernels.sgmv)
    assert not torch.equal(together, operands.y)
    operands.tiles = make_tiles(operands.row_slots, 64, len(RANKS), CPU)
    assert torch.equal(operands.apply(impl.kernels.sgmv), together)
    singles = [(slot, row, 1) for row, slot in enumerate(operands.row_slots)]
    operands.tiles = tiles_of(singles[::-1], CPU)
    assert torch.equal(operands.apply(impl.kernels.sgmv), together)
    x, y = operands.x, operands.y
    for row in range(0, 64, 3):
        slot = operands.row_slots[row]
        others = row % 7  # last of a tile of strangers, the length of which changes
        operands.x = torch.cat((x[:others].flip(0), x[row : row + 1]))
        operands.y = torch.cat((y[:others], y[row : row + 1]))
        operands.tiles = tiles_of([(slot, 0, others + 1)], CPU)
        assert torch.equal(operands.apply(impl.kernels.sgmv)[-1], together[row])


def test_results_repeat_bit_by_bit(impl: Implementation, dtype: torch.dtype) -> None:
    in_features = 128 if impl.is_interpreted else 896
    operands = ScatteredLora(
        SgmvCase(33, "zipf", in_features, (128, 128, 100), dtype, RANKS, 64), impl.device
    )
    with num_threads(1):
        first = operands.apply(impl.kernels.sgmv)
    for threads in (1, 2) if impl.is_bitwise else (1,):
        with num_threads(threads):
            assert all(
                torch.equal(operands.apply(impl.kernels.sgmv), first)
                for _ in range(1 if impl.is_interpreted else 3)
            )


def test_input_and_output_may_be_slices_of_wider_tensors(impl: Implementation) -> None:
    operands = ScatteredLora(SgmvCase(7, "uniform", 100, (100, 24), F32), impl.device)
    wide_x, wide_y = torch.full((2, 7, 300), float("nan"), device=impl.device)
    wide_x[:, 3:103] = operands.x
    wide_y[:, 10:134] = operands.y
    y = wide_y[:, 10:134]
    impl.kernels.sgmv(wide_x[:, 3:103], y, operands.operands())
    assert_rows_close(y.cpu(), operands.expected())
    assert wide_y[:, :10].isnan().all()
    assert wide_y[:, 134:].isnan().all()


def test_another_mix_of_adapters_works_in_the_same_tables(impl: Implementation) -> None:
    case = SgmvCase(16, "uniform", 128, (128,), F32, ranks=(8, 16, 64))
    worlds = [ScatteredLora(case, impl.device, seed=seed) for seed in range(3)]
    room = ScatteredLora(case, impl.device, seed=3)
    arena = room.arena.new_zeros(max(len(world.arena) for world in worlds), room.arena.shape[1])
    for world in worlds:
        world.copy_into(room.tables, room.tiles, arena)
        y = world.y.clone()
        impl.kernels.sgmv(
            world.x, y, SgmvOperands(arena, room.tables, room.tiles, world.site, LAYER)
        )
        assert_rows_close(y.cpu(), world.expected())


def test_the_constants_in_cplusplus_are_those_of_the_page_format() -> None:
    sources = sorted(Path(native.__file__).parent.glob("*.[ch]*"))
    text = "".join(path.read_text() for path in sources)
    stated = re.findall(r"\b(GROUP_ROWS|UNIT_BYTES|MAX_RANK) = (\d+);", text)
    expected = {"GROUP_ROWS": GROUP_ROWS, "UNIT_BYTES": PITCH_BYTES, "MAX_RANK": MAX_RANK}
    assert sorted(stated) == sorted((name, str(number)) for name, number in expected.items())


def test_misfits_are_refused_with_expected_and_got(impl: Implementation) -> None:
    operands = ScatteredLora(SgmvCase(3, "uniform", 128, (64, 64), F32), impl.device)
    x, y, arena, tables, tiles = (
        operands.x,
        operands.y,
        operands.arena,
        operands.tables,
        operands.tiles,
    )
    before, site = y.clone(), operands.site
    for wrong, expected in (
        (
            (x[:, 1:], y, arena, tables, tiles, site, LAYER),
            r"x: expected shape \[3, 128\], got \[3, 127\]",
        ),
        ((x, y, arena, tables, tiles, site, 2), "layer: expected 0 to 1, got 2"),
        (
            (x, y, arena, tables, tiles, SgmvSite(128, (2, 1), (64, 64)), LAYER),
            r"site.modules: expected consecutive indices below 4, got \(2, 1\)",
        ),
        (
            (x, y, arena, tables, tiles, SgmvSite(128, (4,), (128,)), LAYER),
            r"indices below 4, got \(4,\)",
        ),
        (
            (x, y, arena, tables, tiles, SgmvSite(128, (1, 2), (128,)), LAYER),
            "expected one width per module, got",
        ),
        (
            (x, y, arena, tables, tiles, SgmvSite(128, (0, 1, 2, 3), (32,) * 4), LAYER),
            "expected at most 3 slices, got",
        ),
        (
            (x, y, arena.bfloat16(), tables, tiles, site, LAYER),
            r"x: expected dtype torch\.bfloat16, got torch\.float32",
        ),
        (
            (x.T.contiguous().T, y, arena, tables, tiles, site, LAYER),
            "x: expected rows of consecutive elements, got",
        ),
        (
            (x, y.T.contiguous().T, arena, tables, tiles, site, LAYER),
            "y: expected rows of consecutive elements, got",
        ),
        (
            (x, y, arena[:, ::2], tables, tiles, site, LAYER),
            "arena_elements: expected one contiguous arena, got",
        ),
    ):
        with pytest.raises(ValueError, match=expected):
            impl.kernels.sgmv(*wrong[:2], SgmvOperands(*wrong[2:]))
    assert torch.equal(y, before)


@needs_compiler
def test_native_kernels_refuse_tiles_and_tables_with_gaps() -> None:
    operands = ScatteredLora(SgmvCase(3, "uniform", 128, (128,), F32))
    tiles, tables = operands.tiles, operands.tables
    operands.tiles = Tiles(tiles.numbers.T.contiguous().T)
    with pytest.raises(ValueError, match="tiles: expected contiguous"):
        operands.apply(native_sgmv)
    operands.tiles = tiles
    operands.tables = replace(
        tables, ranks=tables.ranks.transpose(0, 1).contiguous().transpose(0, 1)
    )
    with pytest.raises(ValueError, match="ranks: expected"):
        operands.apply(native_sgmv)


@needs_compiler
def test_an_arena_in_the_place_of_one_that_was_checked_is_checked_too() -> None:
    operands = ScatteredLora(SgmvCase(3, "uniform", 128, (128,), F32))
    arena = operands.arena
    operands.arena = arena.clone()
    operands.apply(native_sgmv)
    # What was checked is gone, and as a rule the next tensor is made where it was.
    del operands.arena
    operands.arena = arena.view(torch.int32)
    with pytest.raises(ValueError, match=r"x: expected dtype torch\.int32, got torch\.float32"):
        operands.apply(native_sgmv)
