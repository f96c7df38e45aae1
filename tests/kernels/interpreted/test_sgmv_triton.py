import importlib.util
from pathlib import Path

import pytest
import torch

from kernel_numerics import assert_rows_close
from scattered_lora import BF16, F32, INTERPRETER_CASES, LAYER, ScatteredLora, SgmvCase, make_tiles
from weft.kernels.triton import sgmv as sgmv_triton

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("case", INTERPRETER_CASES, ids=str)
def test_kernels_equal_dense_products(case: SgmvCase) -> None:
    operands = ScatteredLora(case)
    assert_rows_close(operands.apply(sgmv_triton.sgmv), operands.expected())


def test_a_bfloat16_case_fails_without_the_cast(tmp_path: Path) -> None:
    operands = ScatteredLora(SgmvCase(7, "identical", 128, (128,), BF16, ranks=(16,)))
    assert_rows_close(operands.apply(sgmv_triton.sgmv), operands.expected())

    source = Path(sgmv_triton.__file__).read_text()
    assert source.count("if INTERPRET:") == 2
    changed = tmp_path / "without_casts.py"
    changed.write_text(source.replace("if INTERPRET:", "if INTERPRET and False:"))
    spec = importlib.util.spec_from_file_location("without_casts", changed)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(AssertionError, match=r"relative error|not finite"):
        assert_rows_close(operands.apply(module.sgmv), operands.expected())


def test_rows_of_the_base_and_untouched_modules_keep_every_bit() -> None:
    operands = ScatteredLora(SgmvCase(64, "uniform", 128, (128, 64), F32, ranks=(0, 8, 16, 0)))
    y = operands.apply(sgmv_triton.sgmv)
    column = 0
    for module, width in zip(operands.site.modules, operands.site.widths, strict=True):
        untouched = [(slot, module) not in operands.dense for slot in operands.row_slots]
        assert 0 < sum(untouched) < 64
        assert torch.equal(y[untouched][:, column : column + width], operands.y[untouched][:, column : column + width])
        column += width


def test_padding_tiles_read_and_write_nothing() -> None:
    operands = ScatteredLora(SgmvCase(16, "uniform", 128, (128,), F32, ranks=(8,)))
    operands.arena.fill_(float("nan"))
    operands.tiles.slot.fill_(-1)
    assert torch.equal(operands.apply(sgmv_triton.sgmv), operands.y)


def test_results_repeat_bit_by_bit() -> None:
    operands = ScatteredLora(SgmvCase(33, "zipf", 512, (128,), F32, ranks=(8, 16, 64)))
    assert torch.equal(operands.apply(sgmv_triton.sgmv), operands.apply(sgmv_triton.sgmv))


def test_a_row_does_not_depend_on_the_other_adapters_of_the_batch() -> None:
    operands = ScatteredLora(SgmvCase(32, "identical", 256, (128, 64), F32, ranks=(24, 64, 16)))
    alone = operands.apply(sgmv_triton.sgmv)[16:]
    row_slots = [-1] * 3 + [0] * 5 + [1] * 8 + [2] * 16
    operands.tiles = make_tiles(row_slots, 16, 3, "cpu")
    assert torch.equal(operands.apply(sgmv_triton.sgmv)[16:], alone)


def test_a_different_mix_works_with_the_same_grid_and_tables() -> None:
    case = SgmvCase(16, "uniform", 128, (128,), F32, ranks=(8, 16, 64))
    worlds = [ScatteredLora(case, seed=seed) for seed in range(3)]
    room = ScatteredLora(case, seed=3)
    arena = room.arena.new_zeros(max(len(world.arena) for world in worlds), room.arena.shape[1])
    for world in worlds:
        world.copy_into(room.tables, room.tiles, arena)
        y = world.y.clone()
        sgmv_triton.sgmv(world.x, y, arena, room.tables, room.tiles, world.site, LAYER)
        assert_rows_close(y, world.expected())
