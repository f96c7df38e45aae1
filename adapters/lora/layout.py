"""Where each row group of an adapter lies inside the adapter's pages.

First-fit decreasing over row groups (8 rank rows of one layer, module and part), so the plan follows from the ranks,
the base's shape and the page size alone. Page images in the host cache depend on it: a change of the order raises
`LAYOUT_VERSION`. Knows nothing of weights, nor of which arena pages an adapter gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from manylora.adapters.base_shape import BaseShape
from manylora.lora_rows import GROUP_ROWS, PITCH_BYTES, row_pitch_bytes
from manylora.memory.geometry import PageGeometry

LAYOUT_VERSION = 1
ENTRY_BYTES = 4
"""An entry of the tables of slots is an int32 or a float32."""
PART_A = 0
"""Rows of `lora_a` [rank, in]."""
PART_B = 1
"""Rows of `lora_bt` [rank, out], the rank-major B."""


class RowGroup(NamedTuple):
    """Eight rank rows of one (layer, module, part), and where they lie."""

    layer: int
    module: int
    """Index into `BaseShape.modules`."""
    part: int
    """`PART_A` or `PART_B`."""
    group: int
    """Rank rows `8 * group` to `8 * group + 7`."""
    page: int
    """Index among the adapter's own pages."""
    offset_units: int
    """Start inside the page, in units of `PITCH_BYTES`."""


@dataclass(frozen=True, slots=True)
class LoraLayout:
    """The plan of one adapter."""

    version: int
    num_pages: int
    groups: tuple[RowGroup, ...]
    """Ordered by layer, module, part, group."""
    columns: npt.NDArray[np.int64] = field(init=False, repr=False, compare=False)
    """The groups' fields as arrays, int64 [6, groups]; made with the plan, in a loader thread, for the engine's."""

    def __post_init__(self) -> None:
        columns = np.array(self.groups, dtype=np.int64).reshape(-1, len(RowGroup._fields)).T
        object.__setattr__(self, "columns", np.ascontiguousarray(columns))


def plan_layout(
    ranks: Mapping[tuple[int, int], int], base: BaseShape, geometry: PageGeometry
) -> LoraLayout:
    """Place the row groups of an adapter in as few pages as first-fit decreasing needs.

    Args:
        ranks: True rank by (layer, module index), at least 1; modules that are not touched are absent.
        base: Shape of the base model.
        geometry: Size of a page, and of an element.

    Returns:
        The same plan for equal arguments, in every process.

    Raises:
        ValueError: A rank, layer or module is out of range, or a row group is larger than a page.
    """
    return _plan(tuple(sorted(ranks.items())), base, geometry)


def adapter_pages(
    ranks: Mapping[tuple[int, int], int], base: BaseShape, geometry: PageGeometry
) -> int:
    """Pages that an adapter with these ranks occupies; arguments as of `plan_layout`."""
    return plan_layout(ranks, base, geometry).num_pages


def slot_bytes(base: BaseShape, max_rank: int) -> int:
    """Bytes that the tables take per adapter slot: for each module two rows of offsets, a rank and a scaling."""
    return base.num_layers * len(base.modules) * (2 * max_rank // GROUP_ROWS + 2) * ENTRY_BYTES


@lru_cache(maxsize=32)
def _plan(
    ranks: tuple[tuple[tuple[int, int], int], ...], base: BaseShape, geometry: PageGeometry
) -> LoraLayout:
    by_size: dict[int, list[tuple[int, int, int, int]]] = {}
    for (layer, module), rank in ranks:
        if not (0 <= layer < base.num_layers and 0 <= module < len(base.modules) and rank >= 1):
            raise ValueError(f"no row groups for layer {layer}, module {module}, rank {rank}")
        shape = base.modules[module]
        for part, features in ((PART_A, shape.in_features), (PART_B, shape.out_features)):
            units = _group_units(features, geometry)
            groups = by_size.setdefault(units, [])
            groups.extend((layer, module, part, group) for group in range(-(-rank // GROUP_ROWS)))

    free_units: list[int] = []
    placed: list[RowGroup] = []
    page_units = geometry.page_bytes // PITCH_BYTES
    for units in sorted(by_size, reverse=True):
        page = 0
        for key in by_size[units]:
            # Within one size a page that had no room will have none later, so the first fit only moves on.
            while page < len(free_units) and free_units[page] < units:
                page += 1
            if page == len(free_units):
                free_units.append(page_units)
            placed.append(RowGroup(*key, page, page_units - free_units[page]))
            free_units[page] -= units
    return LoraLayout(LAYOUT_VERSION, len(free_units), tuple(sorted(placed)))


def _group_units(features: int, geometry: PageGeometry) -> int:
    group_bytes = GROUP_ROWS * row_pitch_bytes(features, geometry.dtype_bytes)
    if group_bytes > geometry.page_bytes:
        raise ValueError(
            f"a row group of {group_bytes} bytes does not fit a page of {geometry.page_bytes}"
        )
    return group_bytes // PITCH_BYTES
