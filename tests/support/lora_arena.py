"""Adapters packed into scattered pages of a poisoned arena, and the comparison of steps with plain products."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from adapters_factory import Q_AND_V, RandomLora, packed, random_lora, tiny_base
from manylora.adapters.base_shape import SITES
from manylora.adapters.lora.step import AdapterTables, LoraStep, PagedLora
from manylora.memory.arena import Arena
from numerics import assert_close
from residency_parts import tiny_geometry

MAX_RANK, NUM_PAGES = 64, 400
BASE = tiny_base()

BATCHES = {
    "one row": [2],
    "one adapter": [0] * 5,
    "base and one row each": [-1, -1, *range(8)],
    "few rows": [-1, 0, 0, 1, 2, 2, 2, 3, 4, 5, 6, 7],
    "a prompt beside single rows": [-1, 0, 1, *[2] * 70, 3, 5],
    "prompts only": [*[0] * 40, *[1] * 33, *[5] * 50, *[6] * 17],
    "gaps between slots": [1, 4, 4, 7],
}
"""Adapter slots of the rows, for the adapters of `fill`."""


class LoraArena:
    """An arena of random pages, all NaN but those of the adapters put into it."""

    def __init__(self, dtype: torch.dtype) -> None:
        geometry = tiny_geometry(BASE, dtype)
        self.arena = Arena(geometry, NUM_PAGES, torch.device("cpu"), dtype)
        self.arena.poison(range(1, NUM_PAGES))
        self.tables = AdapterTables(12, BASE, MAX_RANK, geometry, self.arena.device)
        self.loras: dict[int, RandomLora] = {}
        self._free = list(range(1, NUM_PAGES))
        random.Random(0).shuffle(self._free)

    def put(self, slot: int, lora: RandomLora) -> None:
        """Pack an adapter into pages of its own, as a load would."""
        with tempfile.TemporaryDirectory() as folder:
            lora.save(Path(folder))
            checkpoint, layout, images = packed(
                Path(folder), BASE, self.arena.geometry, self.arena.dtype, MAX_RANK
            )
        pages = [self._free.pop(0) for _ in range(layout.num_pages)]
        self.arena.bytes[pages] = images
        self.tables.write(slot, layout, pages, checkpoint.ranks, checkpoint.scalings)
        self.loras[slot] = lora

    def check(self, lora: PagedLora, row_slots: Sequence[int]) -> None:
        """Compare a step with plain products at all sites; rows of the base must not change in a single bit."""
        self.check_step(lora.prepare(row_slots), row_slots)

    def check_step(self, step: LoraStep | None, row_slots: Sequence[int]) -> None:
        """The same for a step that was prepared; slots without an adapter are like the base."""
        for (layer, site), (x, y) in self._inputs(len(row_slots)).items():
            output = y.clone()
            if step is not None:
                output, delta = step.project(layer, site, _always(y), x)
                assert delta is None
            expected = y.clone()
            for slot in sorted(set(row_slots) & set(self.loras)):
                rows = [row for row, row_slot in enumerate(row_slots) if row_slot == slot]
                expected[rows] = (
                    y[rows].double() + self.loras[slot].delta(layer, site, x[rows])
                ).to(y.dtype)
            assert_close(output, expected)
            base_rows = [
                row for row, row_slot in enumerate(row_slots) if row_slot not in self.loras
            ]
            assert torch.equal(output[base_rows], y[base_rows])

    def _inputs(self, num_rows: int) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        inputs = {}
        for layer in range(BASE.num_layers):
            for site, shape in enumerate(SITES):
                x = torch.randn(
                    num_rows, BASE.modules[shape.modules[0]].in_features, generator=generator
                )
                y = torch.randn(num_rows, sum(BASE.site_widths(site)), generator=generator)
                inputs[layer, site] = (x.to(self.arena.dtype), y.to(self.arena.dtype))
        return inputs


def _always(y: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda _: y.clone()


def mixed_loras() -> list[RandomLora]:
    """Ranks 1 to 64, all modules and few, patterns, one layer only."""
    return [
        random_lora(BASE, 8, seed=1),
        random_lora(BASE, 16, seed=2, modules=Q_AND_V),
        random_lora(BASE, 64, seed=3),
        random_lora(BASE, 1, seed=4, alpha=3.0),
        random_lora(BASE, 4, seed=5, layers=(1,)),
        random_lora(BASE, 24, seed=6, modules=(3, 6), alpha=8.0, use_rslora=True),
        random_lora(
            BASE,
            8,
            seed=7,
            rank_pattern={"q_proj": 32, "up_proj": 2},
            alpha_pattern={"v_proj": 5.0},
        ),
        random_lora(BASE, 8, seed=8, modules=(4, 5)),
    ]


def fill(
    dtype: torch.dtype = torch.float32, loras: Sequence[RandomLora] | None = None
) -> LoraArena:
    lora_arena = LoraArena(dtype)
    for slot, lora in enumerate(mixed_loras() if loras is None else loras):
        lora_arena.put(slot, lora)
    return lora_arena
