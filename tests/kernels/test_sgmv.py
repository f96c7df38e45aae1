from dataclasses import replace

import pytest
import torch

from cpu_kernels import ALL_KERNELS, CPU_KERNELS, needs_compiler
from kernel_numerics import assert_rows_close
from oracles import sgmv_reference
from scattered_lora import (
    BF16,
    F16,
    F32,
    HIDDEN,
    INTERPRETER_CASES,
    LAYER,
    NUM_TOKENS,
    POPULARITIES,
    ScatteredLora,
    SgmvCase,
)
from weft.kernels.dispatch import Kernels, native_kernels, torch_kernels
from weft.kernels.native import sgmv as sgmv_native
from weft.kernels.native.library import NATIVE_DTYPES
from weft.kernels.sgmv import GROUP_ROWS, UNIT_BYTES, SgmvSite, Tiles, row_pitch_units
from weft.memory import geometry

pytestmark = pytest.mark.usefixtures("poisoned_memory")
CPU_CASES = [
    *(
        SgmvCase(tokens, popularity, 896, (896, 128, 128), F32 if tokens % 2 else BF16)
        for tokens in NUM_TOKENS
        for popularity in POPULARITIES
    ),
    *(SgmvCase(17, "uniform", hidden, (512,), BF16, ranks=(0, 24, 8)) for hidden in HIDDEN),
    *(SgmvCase(17, "zipf", 512, (hidden, hidden), F32, ranks=(8, 1, 64)) for hidden in HIDDEN),
    SgmvCase(133, "skewed", 896, (896,), F16, tile_rows=64),
]


VERSIONS = [
    *(
        pytest.param(native_kernels(), case, id=f"native-{case}", marks=needs_compiler)
        for case in CPU_CASES
        if case.dtype in NATIVE_DTYPES
    ),
    *(pytest.param(torch_kernels(), case, id=f"torch-{case}") for case in CPU_CASES),
]


@pytest.mark.parametrize(("kernels", "case"), VERSIONS)
def test_cpu_versions_equal_dense_products(kernels: Kernels, case: SgmvCase) -> None:
    operands = ScatteredLora(case)
    assert_rows_close(operands.apply(kernels.sgmv), operands.expected(), 0.25 if case.dtype == F32 else 1)


@pytest.mark.parametrize("case", INTERPRETER_CASES, ids=str)
def test_reference_equals_dense_products(case: SgmvCase) -> None:
    operands = ScatteredLora(case)
    assert_rows_close(operands.apply(sgmv_reference.sgmv), operands.expected())


def test_cases_change_the_output() -> None:
    operands = ScatteredLora(SgmvCase(64, "uniform", 128, (128, 64), F32))
    changed = (operands.expected() != operands.y).any(-1)
    assert 30 < int(changed.sum()) < 64


@pytest.mark.parametrize("kernels", ALL_KERNELS)
def test_rows_of_the_base_and_untouched_modules_keep_every_bit(kernels: Kernels) -> None:
    operands = ScatteredLora(SgmvCase(64, "uniform", 128, (128, 64), F32))
    y = operands.apply(kernels.sgmv)
    column = 0
    for module, width in zip(operands.site.modules, operands.site.widths, strict=True):
        untouched = [(slot, module) not in operands.dense for slot in operands.row_slots]
        assert any(untouched)
        columns = slice(column, column + width)
        assert torch.equal(y[untouched][:, columns], operands.y[untouched][:, columns])
        column += width


@pytest.mark.parametrize("kernels", CPU_KERNELS)
def test_a_batch_of_the_base_alone_reads_nothing(kernels: Kernels) -> None:
    operands = ScatteredLora(SgmvCase(4, "distinct", 128, (128,), F32))
    operands.arena.fill_(float("nan"))
    operands.tiles.slot.fill_(-1)
    assert torch.equal(operands.apply(kernels.sgmv), operands.y)


@pytest.mark.parametrize("kernels", CPU_KERNELS)
def test_input_and_output_may_be_slices_of_wider_tensors(kernels: Kernels) -> None:
    operands = ScatteredLora(SgmvCase(7, "uniform", 100, (100, 24), F32))
    wide_x, wide_y = torch.full((7, 300), float("nan")), torch.full((7, 300), float("nan"))
    wide_x[:, 3:103] = operands.x
    wide_y[:, 10:134] = operands.y
    operands.x = wide_x[:, 3:103]
    kernels.sgmv(operands.x, wide_y[:, 10:134], operands.arena, operands.tables, operands.tiles, operands.site, LAYER)
    assert_rows_close(wide_y[:, 10:134], operands.expected())
    assert wide_y[:, :10].isnan().all()
    assert wide_y[:, 134:].isnan().all()


def test_constants_are_those_of_the_page_format() -> None:
    assert GROUP_ROWS == geometry.GROUP_ROWS
    assert UNIT_BYTES == geometry.PITCH_BYTES
    for features in (1, 128, 129, 2049):
        assert row_pitch_units(features, 2) * UNIT_BYTES == geometry.row_pitch_bytes(features, 2)


@pytest.mark.parametrize("kernels", CPU_KERNELS)
def test_a_misfit_is_refused_with_expected_and_got(kernels: Kernels) -> None:
    operands = ScatteredLora(SgmvCase(3, "uniform", 128, (128,), F32))
    x, y, arena, tables, tiles = operands.x, operands.y, operands.arena, operands.tables, operands.tiles
    before = y.clone()
    with pytest.raises(ValueError, match=r"x: expected shape \[3, 128\], got \[3, 127\]"):
        kernels.sgmv(x[:, 1:], y, arena, tables, tiles, operands.site, LAYER)
    with pytest.raises(ValueError, match="layer: expected 0 to 1, got 2"):
        kernels.sgmv(x, y, arena, tables, tiles, operands.site, 2)
    site = SgmvSite(128, (2, 1), (64, 64))
    with pytest.raises(ValueError, match=r"site.modules: expected consecutive indices below 3, got \(2, 1\)"):
        kernels.sgmv(x, y, arena, tables, tiles, site, LAYER)
    with pytest.raises(ValueError, match=r"x: expected dtype torch\.bfloat16, got torch\.float32"):
        kernels.sgmv(x, y, arena.bfloat16(), tables, tiles, operands.site, LAYER)
    with pytest.raises(ValueError, match="x: expected rows of consecutive elements, got"):
        kernels.sgmv(x.T.contiguous().T, y, arena, tables, tiles, operands.site, LAYER)
    with pytest.raises(ValueError, match="y: expected rows of consecutive elements, got"):
        kernels.sgmv(x, y.T.contiguous().T, arena, tables, tiles, operands.site, LAYER)
    with pytest.raises(ValueError, match="arena_elements: expected one contiguous arena, got"):
        kernels.sgmv(x, y, arena[:, ::2], tables, tiles, operands.site, LAYER)
    assert torch.equal(y, before)


@needs_compiler
def test_native_kernels_refuse_other_dtypes() -> None:
    operands = ScatteredLora(SgmvCase(3, "uniform", 128, (128,), F16))
    with pytest.raises(ValueError, match=r"expected one of torch\.float32, torch\.bfloat16, got torch\.float16"):
        operands.apply(sgmv_native.sgmv)


@needs_compiler
def test_native_kernels_refuse_tiles_and_tables_with_gaps() -> None:
    operands = ScatteredLora(SgmvCase(3, "uniform", 128, (128,), F32))
    tiles, tables = operands.tiles, operands.tables
    columns = torch.stack((tiles.slot, tiles.start, tiles.length), 1)
    operands.tiles = Tiles(columns[:, 0], columns[:, 1], columns[:, 2])
    with pytest.raises(ValueError, match=r"tiles\.slot: expected"):
        operands.apply(sgmv_native.sgmv)
    operands.tiles = tiles
    operands.tables = replace(tables, ranks=tables.ranks.transpose(0, 1).contiguous().transpose(0, 1))
    with pytest.raises(ValueError, match="ranks: expected"):
        operands.apply(sgmv_native.sgmv)


@needs_compiler
def test_an_arena_in_the_place_of_one_that_was_checked_is_checked_too() -> None:
    operands = ScatteredLora(SgmvCase(3, "uniform", 128, (128,), F32))
    arena = operands.arena
    operands.arena = arena.clone()
    operands.apply(sgmv_native.sgmv)
    # What was checked is gone, and as a rule the next tensor is made where it was.
    del operands.arena
    operands.arena = arena.view(torch.int32)
    with pytest.raises(ValueError, match=r"x: expected dtype torch\.int32, got torch\.float32"):
        operands.apply(sgmv_native.sgmv)
