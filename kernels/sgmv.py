"""Operands of SGMV: many LoRA adapters of any rank applied to one batch, with weights read from pages.

The rows of a batch are sorted by adapter slot, so a tile is a run of consecutive rows of one adapter. The kernels know
neither who owns the pages nor what an adapter is called. Punica (arXiv:2310.18547) named the operation; S-LoRA
(arXiv:2311.03285) put KV cache and adapters into one pool.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from manylora.kernels.checks import expect, expect_that

MAX_SLICES = 3
"""Slices a site may have."""


@dataclass(frozen=True, slots=True)
class SgmvTables:
    """Where the weights of the resident adapters lie. All addresses stay the same while adapters come and go."""

    offsets: Tensor
    """[slots, layers, modules, 2 (A, B^T), max_rank / 8], int32: start of each row group in units of 256 bytes."""
    ranks: Tensor
    """[slots, layers, modules], int32: rank rounded up to a multiple of 8; 0 is a module the adapter does not touch."""
    scalings: Tensor
    """[slots, layers, modules], float32."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Runs of consecutive rows of one adapter, at most `rows` long."""

    numbers: Tensor
    """[3, capacity], int32: adapter slot of each tile (-1 is padding), first row, and number of rows (1 to `rows`)."""
    rows: int = 16
    """The most rows of a tile: 16 suits decode, 64 or 128 long prefill chunks."""
    checked: dict[Hashable, object] = field(default_factory=dict, repr=False, compare=False)
    """Kinds of operands that a kernel has found sound for these tiles, with what is known by its address in them."""


@dataclass(frozen=True, slots=True)
class SgmvSite:
    """A base linear layer whose output slices belong to modules that share its input."""

    in_features: int
    modules: tuple[int, ...]
    """Consecutive indices into the tables, in slice order."""
    widths: tuple[int, ...]
    """Output features of each slice."""


class SgmvOperands(NamedTuple):
    """What the adapters of a step compute at one site with."""

    arena_elements: Tensor
    """The arena, [num_pages, page_elements], dtype of the activations."""
    tables: SgmvTables
    tiles: Tiles
    site: SgmvSite
    layer: int
    """Decoder layer."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraDelta:
    """What the adapters of a step add to the output of one site, up to the product with B.

    The operation that reads the output adds it, so the output itself is not written again. Its tiles cover all rows.
    """

    planes: Tensor
    """[parts, T, slices * max_rank], float32: `x @ A.T` in parts that add up; past an adapter's rank undefined."""
    operands: SgmvOperands


def check_operands(x: Tensor, operands: SgmvOperands, y: Tensor | None = None) -> None:
    """Check what a call to `sgmv` was given, or with no y, what `shrink` was.

    Operands like those of an earlier layer were checked there, and a step is cold code: each check costs.

    Raises:
        ValueError: A shape, dtype or device does not fit; the message names expected and got.
    """
    arena_elements, tables, tiles, site, layer = operands
    slots, layers, modules = tables.ranks.shape
    device = x.device
    expect_that("layer", 0 <= layer < layers, f"0 to {layers - 1}", layer)
    output = None if y is None else (y.shape, y.stride(), y.dtype, y.device)
    key = (site, x.shape, x.stride(), x.dtype, device, output, id(arena_elements), id(tables))
    if key in tiles.checked:
        return
    expect("x", x, (x.shape[0], site.in_features), arena_elements.dtype, device)
    expect("arena_elements", arena_elements, (None, None), None, device)
    expect("offsets", tables.offsets, (slots, layers, modules, 2, None), torch.int32, device)
    expect("ranks", tables.ranks, (slots, layers, modules), torch.int32, device)
    expect("scalings", tables.scalings, (slots, layers, modules), torch.float32, device)
    expect("tiles", tiles.numbers, (3, None), torch.int32, device)
    expect_that(
        "tiles", tiles.numbers.is_contiguous(), "contiguous elements", tiles.numbers.stride()
    )
    expect_that("x", x.stride(1) == 1, "rows of consecutive elements", x.stride())
    expect_that(
        "arena_elements",
        arena_elements.is_contiguous(),
        "one contiguous arena",
        arena_elements.stride(),
    )
    for name in ("offsets", "ranks", "scalings"):
        tensor = getattr(tables, name)
        expect_that(name, tensor.is_contiguous(), "contiguous elements", tensor.stride())
    first, last = site.modules[0], site.modules[-1]
    expect_that(
        "site.modules",
        site.modules == tuple(range(first, last + 1)) and first >= 0 and last < modules,
        f"consecutive indices below {modules}",
        site.modules,
    )
    expect_that(
        "site.widths", len(site.widths) == len(site.modules), "one width per module", site.widths
    )
    expect_that(
        "site.widths", len(site.widths) <= MAX_SLICES, f"at most {MAX_SLICES} slices", site.widths
    )
    if y is not None:
        expect("y", y, (x.shape[0], sum(site.widths)), arena_elements.dtype, device)
        expect_that("y", y.stride(1) == 1, "rows of consecutive elements", y.stride())
    tiles.checked[key] = arena_elements, tables
