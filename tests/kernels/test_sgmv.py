from collections.abc import Callable

import pytest
import torch

from kernel_numerics import assert_rows_close
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
from weft.kernels import sgmv_cpu, sgmv_reference
from weft.kernels.sgmv import GROUP_ROWS, UNIT_BYTES, SgmvSite, row_pitch_units
from weft.memory import geometry

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


def call(sgmv: Callable[..., None], operands: ScatteredLora, y: torch.Tensor) -> None:
    sgmv(operands.x, y, operands.arena, operands.tables, operands.tiles, operands.site, LAYER)


@pytest.mark.parametrize("case", CPU_CASES, ids=str)
def test_cpu_version_equals_dense_products(case: SgmvCase) -> None:
    operands = ScatteredLora(case)
    y = operands.y.clone()
    call(sgmv_cpu.sgmv, operands, y)
    assert_rows_close(y, operands.expected())


@pytest.mark.parametrize("case", INTERPRETER_CASES, ids=str)
def test_reference_equals_dense_products(case: SgmvCase) -> None:
    operands = ScatteredLora(case)
    y = operands.y.clone()
    call(sgmv_reference.sgmv, operands, y)
    assert_rows_close(y, operands.expected())


def test_cases_change_the_output() -> None:
    operands = ScatteredLora(SgmvCase(64, "uniform", 128, (128, 64), F32))
    changed = (operands.expected() != operands.y).any(-1)
    assert 30 < int(changed.sum()) < 64


@pytest.mark.parametrize("sgmv", [sgmv_cpu.sgmv, sgmv_reference.sgmv], ids=["cpu", "reference"])
def test_rows_of_the_base_and_untouched_modules_keep_every_bit(sgmv: Callable[..., None]) -> None:
    operands = ScatteredLora(SgmvCase(64, "uniform", 128, (128, 64), F32))
    y = operands.y.clone()
    call(sgmv, operands, y)
    column = 0
    for module, width in zip(operands.site.modules, operands.site.widths, strict=True):
        untouched = [(slot, module) not in operands.dense for slot in operands.row_slots]
        assert any(untouched)
        columns = slice(column, column + width)
        assert torch.equal(y[untouched][:, columns], operands.y[untouched][:, columns])
        column += width


def test_a_batch_of_the_base_alone_reads_nothing() -> None:
    operands = ScatteredLora(SgmvCase(4, "distinct", 128, (128,), F32))
    operands.arena.fill_(float("nan"))
    operands.tiles.slot.fill_(-1)
    y = operands.y.clone()
    call(sgmv_cpu.sgmv, operands, y)
    assert torch.equal(y, operands.y)


def test_output_may_be_a_slice_of_a_wider_tensor() -> None:
    operands = ScatteredLora(SgmvCase(7, "uniform", 128, (128, 64), F32))
    wide = torch.zeros(7, 300)
    wide[:, 10:202] = operands.y
    call(sgmv_cpu.sgmv, operands, wide[:, 10:202])
    assert_rows_close(wide[:, 10:202], operands.expected())
    assert not wide[:, 202:].any()
    assert not wide[:, :10].any()


def test_constants_are_those_of_the_page_format() -> None:
    assert GROUP_ROWS == geometry.GROUP_ROWS
    assert UNIT_BYTES == geometry.PITCH_BYTES
    for features in (1, 128, 129, 2049):
        assert row_pitch_units(features, 2) * UNIT_BYTES == geometry.row_pitch_bytes(features, 2)


def test_a_misfit_is_refused_with_expected_and_got() -> None:
    operands = ScatteredLora(SgmvCase(3, "uniform", 128, (128,), F32))
    with pytest.raises(ValueError, match=r"x: expected shape \[3, 128\], got \[3, 127\]"):
        sgmv_cpu.sgmv(
            operands.x[:, 1:], operands.y, operands.arena, operands.tables, operands.tiles, operands.site, LAYER
        )
    with pytest.raises(ValueError, match="layer: expected 0 to 1, got 2"):
        sgmv_cpu.sgmv(operands.x, operands.y, operands.arena, operands.tables, operands.tiles, operands.site, 2)
    site = SgmvSite(128, (2, 1), (64, 64))
    with pytest.raises(ValueError, match=r"site.modules: expected consecutive indices below 3, got \(2, 1\)"):
        sgmv_cpu.sgmv(operands.x, operands.y, operands.arena, operands.tables, operands.tiles, site, LAYER)
    arena = operands.arena.bfloat16()
    with pytest.raises(ValueError, match=r"x: expected dtype torch\.bfloat16, got torch\.float32"):
        sgmv_cpu.sgmv(operands.x, operands.y, arena, operands.tables, operands.tiles, operands.site, LAYER)
