"""SGMV in C++, as it is compiled for this CPU and for lesser ones: sizes that fit no vector, and results bit by bit."""

from collections.abc import Sequence

import pytest
import torch

from cpu_kernels import num_threads
from kernel_numerics import assert_rows_close
from scattered_lora import BF16, F32, LAYER, ScatteredLora, SgmvCase, make_tiles
from weft.kernels.native.sgmv import sgmv
from weft.kernels.sgmv import Tiles, row_pitch_units

pytestmark = pytest.mark.usefixtures("poisoned_memory", "native_build")
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
RANKS = (0, 8, 16, 24, 64, 128, 256)
SIZES = [
    (2049, (100,)),
    (100, (24, 2049)),
    (24, (100, 24, 40)),
    (1, (1, 2, 3)),
    (15, (17, 16, 15)),
    (1025, (129, 63, 65)),
    (3000, (128, 127, 257)),
]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == F32 else torch.int16)


def tiles_of(tiles: Sequence[tuple[int, int, int]], rows: int = 64) -> Tiles:
    """From (slot, start, length) of each."""
    slot, start, length = torch.tensor(tiles, dtype=torch.int32).T.contiguous()
    return Tiles(slot, start, length, rows)


@DTYPES
@pytest.mark.parametrize(("in_features", "widths"), SIZES, ids=str)
def test_sizes_that_fit_no_vector_are_right(in_features: int, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    operands = ScatteredLora(SgmvCase(40, "uniform", in_features, widths, dtype, RANKS))
    assert len(set(operands.row_slots)) > 5
    assert_rows_close(operands.apply(sgmv), operands.expected(), 0.25 if dtype == F32 else 1)


@DTYPES
def test_tiles_of_any_length_are_right(dtype: torch.dtype) -> None:
    operands = ScatteredLora(SgmvCase(64 * 65 // 2, "uniform", 100, (24, 130), dtype, (8, 16, 24, 64) * 16))
    operands.row_slots = [length - 1 for length in range(1, 65) for _ in range(length)]
    operands.tiles = make_tiles(operands.row_slots, 64, 64, "cpu")
    assert operands.tiles.length[:64].tolist() == list(range(1, 65))
    assert_rows_close(operands.apply(sgmv), operands.expected(), 0.25 if dtype == F32 else 1)


@DTYPES
@pytest.mark.parametrize("seed", range(3))
def test_every_rank_in_every_slice_is_right_in_a_batch_of_all(seed: int, dtype: torch.dtype) -> None:
    case = SgmvCase(150, "distinct", 896, (896, 128, 100), dtype, RANKS, 64)
    operands = ScatteredLora(case, seed=seed)
    assert set(operands.row_slots) == set(range(-1, len(RANKS)))
    assert_rows_close(operands.apply(sgmv), operands.expected(), 0.25 if dtype == F32 else 1)


@DTYPES
def test_rows_of_no_tile_keep_every_bit_and_are_not_read(dtype: torch.dtype) -> None:
    operands = ScatteredLora(SgmvCase(40, "identical", 100, (100, 24), dtype, (24, 16)))
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(-(2**15), 2**15, operands.y.shape, generator=generator).to(bits(operands.y).dtype)
    outside = [row for row in range(40) if not (3 <= row < 10 or 20 <= row < 37)]
    bits(operands.y)[outside] = noise[outside]
    assert operands.y[outside].isnan().any()
    operands.x[outside] = float("nan")
    operands.tiles = tiles_of([(0, 3, 7), (-1, 0, 0), (1, 20, 17), (-1, 0, 0)])
    y = operands.apply(sgmv)
    assert torch.equal(bits(y)[outside], noise[outside])
    assert torch.isfinite(y[[*range(3, 10), *range(20, 37)]]).all()


@DTYPES
def test_nothing_but_an_adapter_s_own_weights_is_read(dtype: torch.dtype) -> None:
    operands = ScatteredLora(SgmvCase(30, "identical", 100, (130, 24), dtype, (24, 64, 8)))
    operands.tiles = tiles_of([(1, 0, 30)])
    clean = operands.apply(sgmv)
    assert torch.isfinite(clean).all()
    # What is outside an adapter's rows is NaN already; now the other adapters are, too.
    units = operands.arena.view(-1, operands.unit)
    for slot in (0, 2):
        for part, sizes in enumerate(((100, 100), (130, 24))):
            for module, size in zip(operands.site.modules, sizes, strict=True):
                group_units = 8 * row_pitch_units(size, dtype.itemsize)
                for offset in operands.offsets[slot, LAYER, module, part].tolist():
                    units[offset : offset + group_units if offset >= 0 else offset] = float("nan")
    operands.scalings[[0, 2]] = float("nan")
    assert torch.equal(operands.apply(sgmv), clean)


@DTYPES
@pytest.mark.parametrize("in_features", [100, 2049])
def test_a_row_is_bitwise_the_same_alone_and_in_any_place(in_features: int, dtype: torch.dtype) -> None:
    operands = ScatteredLora(SgmvCase(64, "uniform", in_features, (100, 24, 130), dtype, RANKS))
    together = operands.apply(sgmv)
    assert not torch.equal(together, operands.y)

    operands.tiles = make_tiles(operands.row_slots, 64, len(RANKS), "cpu")
    assert torch.equal(operands.apply(sgmv), together)

    singles = [(slot, row, 1) for row, slot in enumerate(operands.row_slots)]
    operands.tiles = tiles_of(singles[::-1])
    assert torch.equal(operands.apply(sgmv), together)

    x, y = operands.x, operands.y
    for row, slot in enumerate(operands.row_slots):
        # Last of a tile of strangers, the length of which changes.
        others = row % 7
        operands.x = torch.cat((x[:others].flip(0), x[row : row + 1]))
        operands.y = torch.cat((y[:others], y[row : row + 1]))
        operands.tiles = tiles_of([(slot, 0, others + 1)])
        assert torch.equal(operands.apply(sgmv)[-1], together[row])


@DTYPES
def test_results_are_bitwise_the_same_in_every_run_and_with_more_threads(dtype: torch.dtype) -> None:
    operands = ScatteredLora(SgmvCase(133, "zipf", 896, (896, 128, 100), dtype, RANKS, 64))
    with num_threads(1):
        first = operands.apply(sgmv)
        assert torch.equal(operands.apply(sgmv), first)
    with num_threads(2):
        assert all(torch.equal(operands.apply(sgmv), first) for _ in range(5))


def test_a_step_of_no_rows_is_no_error() -> None:
    operands = ScatteredLora(SgmvCase(1, "identical", 100, (24,), F32, (8,)))
    operands.x, operands.y, operands.tiles = operands.x[:0], operands.y[:0], tiles_of([(-1, 0, 0)])
    assert operands.apply(sgmv).shape == (0, 24)
