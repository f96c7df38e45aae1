"""Adapters of mixed ranks scattered over the pages of a poisoned arena, and the cases that cover SGMV."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from manylora.kernels.sgmv import SgmvOperands, SgmvSite, SgmvTables, Tiles
from manylora.lora_rows import GROUP_ROWS, PITCH_BYTES, row_pitch_bytes

MIXED_RANKS = (0, 1, 4, 8, 16, 24, 64, 128, 256)
NUM_LAYERS = 2
LAYER = 1


@dataclass(frozen=True)
class SgmvCase:
    """One call: how many rows, how they are shared out, and the site's sizes."""

    num_tokens: int
    popularity: str
    in_features: int
    widths: tuple[int, ...]
    dtype: torch.dtype
    ranks: tuple[int, ...] = MIXED_RANKS
    tile_rows: int = 16

    def __str__(self) -> str:
        widths = "+".join(map(str, self.widths))
        return f"{self.num_tokens}-{self.popularity}-{self.in_features}x{widths}-{str(self.dtype)[6:]}-{self.tile_rows}"


class ScatteredLora:
    """The operands of one call.

    Every (adapter, module) has its own rank, so slices of a site differ. Row groups lie at random places of a few
    random pages; all else in the arena, padding of rows included, is NaN, except page 0, which is zero.
    """

    def __init__(self, case: SgmvCase, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.case = case
        self.generator = torch.Generator().manual_seed(seed)
        self.random = random.Random(seed)
        num_modules = len(case.widths) + 2
        self.site = SgmvSite(case.in_features, tuple(range(1, 1 + len(case.widths))), case.widths)
        element_size = case.dtype.itemsize
        self.unit = PITCH_BYTES // element_size
        slots = len(case.ranks)
        groups = -(-max(case.ranks) // GROUP_ROWS)
        largest = max(case.in_features, *case.widths)
        page_units = 2 * GROUP_ROWS * row_pitch_bytes(largest, element_size) // PITCH_BYTES
        self.offsets = torch.full(
            (slots, NUM_LAYERS, num_modules, 2, groups), -1, dtype=torch.int32
        )
        self.ranks = torch.zeros((slots, NUM_LAYERS, num_modules), dtype=torch.int32)
        self.scalings = torch.full((slots, NUM_LAYERS, num_modules), float("nan"))
        self.dense: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        images: list[tuple[tuple[int, int, int, int], torch.Tensor]] = []
        for slot in range(slots):
            for index, module in enumerate(self.site.modules):
                rank = case.ranks[(slot + index * 4) % slots]
                if rank:
                    images += self._adapter(slot, module, rank, case.widths[index])
        self.arena = self._scatter(images, page_units).to(device)
        self.tables = SgmvTables(
            self.offsets.to(device), self.ranks.to(device), self.scalings.to(device)
        )
        self.row_slots = sorted(_row_slots(case, self.random))
        self.tiles = make_tiles(self.row_slots, case.tile_rows, slots, device)
        self.x = self._randn(case.num_tokens, case.in_features).to(case.dtype).to(device)
        self.y = self._randn(case.num_tokens, sum(case.widths)).to(case.dtype).to(device)

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def _adapter(
        self, slot: int, module: int, rank: int, width: int
    ) -> list[tuple[tuple[int, int, int, int], torch.Tensor]]:
        padded = -(-rank // GROUP_ROWS) * GROUP_ROWS
        lora_a = (self._randn(rank, self.case.in_features) * self.case.in_features**-0.5).to(
            self.case.dtype
        )
        lora_bt = (self._randn(rank, width) * rank**-0.5).to(self.case.dtype)
        self.ranks[slot, LAYER, module] = padded
        self.scalings[slot, LAYER, module] = 0.5 + slot
        self.dense[slot, module] = (lora_a, lora_bt)
        images = []
        for part, weights in enumerate((lora_a, lora_bt)):
            pitch = (
                row_pitch_bytes(weights.shape[1], self.case.dtype.itemsize)
                // PITCH_BYTES
                * self.unit
            )
            rows = torch.full((padded, pitch), float("nan"), dtype=self.case.dtype)
            rows[:, : weights.shape[1]] = 0
            rows[:rank, : weights.shape[1]] = weights
            images += [
                ((slot, module, part, g), rows[g * 8 : g * 8 + 8].reshape(-1))
                for g in range(padded // 8)
            ]
        return images

    def _scatter(
        self, images: list[tuple[tuple[int, int, int, int], torch.Tensor]], page_units: int
    ) -> torch.Tensor:
        self.random.shuffle(images)
        places: list[tuple[int, int]] = []
        page, used = -1, page_units
        for _, image in images:
            units = len(image) // self.unit
            if used + units > page_units:
                page, used = page + 1, 0
            places.append((page, used))
            used += units
        pages = self.random.sample(range(1, page + 7), page + 1)
        arena = torch.full((page + 7, page_units * self.unit), float("nan"), dtype=self.case.dtype)
        arena[0] = 0
        for ((slot, module, part, group), image), (page, first) in zip(images, places, strict=True):
            arena[pages[page], first * self.unit : first * self.unit + len(image)] = image
            self.offsets[slot, LAYER, module, part, group] = pages[page] * page_units + first
        return arena

    def copy_into(self, tables: SgmvTables, tiles: Tiles, arena: torch.Tensor) -> None:
        """Replace what another call's tensors hold, as eviction and loading do, without moving them."""
        arena[: len(self.arena)] = self.arena
        for name in ("offsets", "ranks", "scalings"):
            getattr(tables, name).copy_(getattr(self.tables, name))
        tiles.numbers.copy_(self.tiles.numbers)

    def apply(self, sgmv: Callable[..., None]) -> torch.Tensor:
        """What an implementation makes of y, which stays."""
        y = self.y.clone()
        sgmv(self.x, y, self.operands())
        return y

    def operands(self) -> SgmvOperands:
        """All but x and y."""
        return SgmvOperands(self.arena, self.tables, self.tiles, self.site, LAYER)

    def expected(self) -> torch.Tensor:
        """The result by dense float64 products, independent of pages, tables and tiles."""
        result = self.y.double().cpu().clone()
        column = 0
        for module, width in zip(self.site.modules, self.site.widths, strict=True):
            for slot in sorted(set(self.row_slots) - {-1}):
                if (slot, module) in self.dense:
                    rows = torch.tensor([s == slot for s in self.row_slots])
                    lora_a, lora_bt = (weights.double() for weights in self.dense[slot, module])
                    delta = self.x.double().cpu()[rows] @ lora_a.T @ lora_bt
                    result[rows, column : column + width] += (
                        delta * self.scalings[slot, LAYER, module].item()
                    )
            column += width
        return result.to(self.case.dtype)


def make_tiles(
    row_slots: list[int], rows: int, num_slots: int, device: torch.device | str
) -> Tiles:
    """Cut sorted rows into tiles, padded to the capacity that depends on shapes only."""
    tiles = []
    for slot in sorted(set(row_slots) - {-1}):
        first, count = row_slots.index(slot), row_slots.count(slot)
        tiles += [(slot, first + i, min(rows, count - i)) for i in range(0, count, rows)]
    capacity = -(-len(row_slots) // rows) + min(len(row_slots), num_slots)
    tiles += [(-1, 0, 0)] * (capacity - len(tiles))
    return Tiles(torch.tensor(tiles, dtype=torch.int32).T.contiguous().to(device), rows)


def _row_slots(case: SgmvCase, rng: random.Random) -> list[int]:
    slots, count = len(case.ranks), case.num_tokens
    order = rng.sample(range(-1, slots), slots + 1)
    if case.popularity == "identical":
        return [slots - 1] * count
    if case.popularity == "distinct":
        return [order[i % len(order)] for i in range(count)]
    if case.popularity == "skewed":
        return [order[0], *[slots - 1] * (count - 1)]
    if case.popularity == "uniform":
        return [rng.randrange(-1, slots) for _ in range(count)]
    weights = [1.5**-i for i in range(len(order))]
    return rng.choices(order, weights, k=count)
