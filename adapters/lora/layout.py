"""Place of each row group of an adapter inside the adapter's pages.

Row groups (8 rank rows of one layer, module and part) are placed first-fit decreasing, so the plan follows from the
ranks, the base's shape and the page size alone. Knows neither weights nor the arena pages of an adapter.
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

ENTRY_BYTES = 4
"""Bytes of an entry in the tables of slots, an int32 or a float32."""
PART_A = 0
"""Part with the rows of `lora_a` [rank, in]."""
PART_B = 1
"""Part with the rows of `lora_bt` [rank, out], the rank-major B."""


class RowRun(NamedTuple):
    """Row groups of one (layer, module, part) that follow each other in a page."""

    layer: int
    module: int
    """Index into `BaseShape.modules`."""
    part: int
    """`PART_A` or `PART_B`."""
    first_group: int
    """Index of its first group, which has the rank rows from `8 * first_group` on."""
    num_groups: int
    page: int
    """Index among the adapter's own pages."""
    offset_units: int
    """Start inside the page, in units of `PITCH_BYTES`."""
    group_units: int
    """Size of each group, in the same units."""


@dataclass(frozen=True, slots=True)
class LoraLayout:
    """The plan of one adapter."""

    num_pages: int
    runs: tuple[RowRun, ...]
    """Runs, ordered by layer, module, part, group."""
    groups: npt.NDArray[np.int64] = field(init=False, repr=False, compare=False)
    """Layer, module, part, index, page and offset of each group, int64 [6, groups]. Loader threads make them with the
    plan, to spare the engine's thread."""

    def __post_init__(self) -> None:
        runs = np.array(self.runs, dtype=np.int64).reshape(-1, len(RowRun._fields)).T
        counts = runs[4]
        groups = np.repeat(runs[[0, 1, 2, 3, 5, 6]], counts, axis=1)
        place = np.arange(groups.shape[1]) - np.repeat(counts.cumsum() - counts, counts)
        groups[3] += place
        groups[5] += place * np.repeat(runs[7], counts)
        object.__setattr__(self, "groups", groups)


def plan_layout(
    ranks: Mapping[tuple[int, int], int], base: BaseShape, geometry: PageGeometry
) -> LoraLayout:
    """Place the row groups of an adapter in as few pages as first-fit decreasing needs.

    Args:
        ranks: True rank by (layer, module index), at least 1. Modules without an adapter are absent.
        base: Shape of the base model.
        geometry: Size of a page, and of an element.

    Returns:
        The plan. Equal arguments give equal plans in every process.

    Raises:
        ValueError: A rank, layer or module is out of range, or a row group is larger than a page.
    """
    return _plan(tuple(sorted(ranks.items())), base, geometry)


def adapter_pages(
    ranks: Mapping[tuple[int, int], int], base: BaseShape, geometry: PageGeometry
) -> int:
    """Pages that an adapter with these ranks takes. The arguments are those of `plan_layout`."""
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
            matrices = by_size.setdefault(_group_units(features, geometry), [])
            matrices.append((layer, module, part, -(-rank // GROUP_ROWS)))

    free_units: list[int] = []
    runs: list[RowRun] = []
    page_units = geometry.page_bytes // PITCH_BYTES
    for units in sorted(by_size, reverse=True):
        page = 0
        for layer, module, part, num_groups in by_size[units]:
            group = 0
            while group < num_groups:
                # A page without room for a group has none for later groups of that size, so the search never goes back.
                while page < len(free_units) and free_units[page] < units:
                    page += 1
                if page == len(free_units):
                    free_units.append(page_units)
                count = min(num_groups - group, free_units[page] // units)
                offset = page_units - free_units[page]
                runs.append(RowRun(layer, module, part, group, count, page, offset, units))
                free_units[page] -= count * units
                group += count
    return LoraLayout(len(free_units), tuple(sorted(runs)))


def _group_units(features: int, geometry: PageGeometry) -> int:
    group_bytes = GROUP_ROWS * row_pitch_bytes(features, geometry.dtype_bytes)
    if group_bytes > geometry.page_bytes:
        raise ValueError(
            f"a row group of {group_bytes} bytes does not fit a page of {geometry.page_bytes}"
        )
    return group_bytes // PITCH_BYTES
