"""SGMV on the CPU in C++ (`native/sgmv.cpp`): weights are read where they lie in the pages."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from manylora.kernels.checks import expect_that
from manylora.kernels.native.library import native_function
from manylora.kernels.sgmv import SgmvOperands, check_operands
from manylora.lora_rows import GROUP_ROWS, MAX_RANK

TILE_ROWS, TILE_RANK = 16, 32
"""What a product on AMX's tiles takes of the results of the first product, which therefore have padding."""


def sgmv(x: Tensor, y: Tensor, operands: SgmvOperands) -> None:
    """Add the low-rank products of every tile's adapter to its rows.

    Semantics and arguments: `manylora.kernels.plain.sgmv.sgmv`. Deterministic, and a row's result does not depend on
    the other rows.

    Raises:
        ValueError: An operand does not fit.
    """
    arena_elements, tables, tiles, site, layer = operands
    # Cheaper to look up than what `check_operands` knows, for a step is cold code.
    key = (
        site,
        x.shape,
        x.stride(),
        x.dtype,
        y.shape,
        y.stride(),
        y.dtype,
        id(arena_elements),
        id(tables),
    )
    _, num_layers, num_modules, _, groups = tables.offsets.shape
    if key not in tiles.checked or not 0 <= layer < num_layers:
        check_operands(x, operands, y)
        expect_that(
            "offsets",
            groups * GROUP_ROWS <= MAX_RANK,
            f"ranks up to {MAX_RANK}",
            tables.offsets.shape,
        )
        tiles.checked[key] = arena_elements, tables
    num_slices = len(site.modules)
    bridge_width = num_slices * -(-groups * GROUP_ROWS // TILE_RANK) * TILE_RANK
    bridge = x.new_empty((len(x) + TILE_ROWS - 1) * bridge_width, dtype=torch.float32)
    num_tiles, first_tile = tiles.numbers.shape[1], tiles.numbers.data_ptr()
    native_function("sgmv", x.dtype, "i" * 21)(
        *(x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), arena_elements.data_ptr()),
        *(tables.offsets.data_ptr(), tables.ranks.data_ptr(), tables.scalings.data_ptr()),
        *(num_layers, num_modules, groups),
        *(first_tile, first_tile + 4 * num_tiles, first_tile + 8 * num_tiles, num_tiles),
        *(layer, site.modules[0], num_slices, site.in_features),
        *(ctypes.addressof(_widths(site.widths)), bridge.data_ptr()),
    )


@functools.cache
def _widths(widths: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(widths))(*widths)
