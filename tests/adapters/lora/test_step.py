"""Steps that read weights from their pages, with every implementation of the operation that runs here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from lora_arena import BASE, BATCHES, fill
from manylora.adapters.lora.layout import LoraLayout
from manylora.adapters.lora.step import PagedLora, fill_tiles, tile_capacity
from manylora.kernels.dispatch import Kernels, native_kernels, torch_kernels


@pytest.mark.parametrize("make_kernels", [native_kernels, torch_kernels], ids=["native", "torch"])
@pytest.mark.parametrize("row_slots", BATCHES.values(), ids=BATCHES.keys())
def test_a_step_equals_plain_products(
    row_slots: list[int], make_kernels: Callable[[], Kernels]
) -> None:
    lora_arena = fill()
    lora_arena.check(
        PagedLora(lora_arena.arena, lora_arena.tables, BASE, make_kernels()), row_slots
    )


def test_a_step_equals_plain_products_in_bf16() -> None:
    lora_arena = fill(torch.bfloat16)
    lora_arena.check(
        PagedLora(lora_arena.arena, lora_arena.tables, BASE), BATCHES["a prompt beside single rows"]
    )


def test_prompts_of_many_rows_equal_plain_products() -> None:
    lora_arena = fill()
    lora_arena.check(
        PagedLora(lora_arena.arena, lora_arena.tables, BASE), [-1, *[0] * 300, 1, *[2] * 260]
    )


def test_a_batch_of_the_base_only_has_no_lora_work() -> None:
    lora_arena = fill()
    paged = PagedLora(lora_arena.arena, lora_arena.tables, BASE)
    assert paged.prepare([-1, -1]) is None
    assert paged.prepare([]) is None
    lora_arena.tables.write(3, LoraLayout(0, ()), [], {}, {})
    assert paged.prepare([-1, 3]) is None


@pytest.mark.parametrize("make_kernels", [native_kernels, torch_kernels], ids=["native", "torch"])
def test_a_static_step_serves_other_rows_and_more_adapters_than_before(
    make_kernels: Callable[[], Kernels],
) -> None:
    lora_arena, num_rows = fill(), 20
    paged = PagedLora(lora_arena.arena, lora_arena.tables, BASE, make_kernels())
    tiles = np.empty((3, tile_capacity(num_rows, lora_arena.tables.slots, 16)), dtype=np.int32)
    step = paged.static_step(torch.from_numpy(tiles), 16)
    for row_slots in ([1] * 20, [-1] * 20, [-1] * 3 + [0] * 17, [-1, *range(8), *[8] * 11]):
        fill_tiles(tiles, row_slots, 16)
        lora_arena.check_step(step, row_slots)


def test_the_shrink_of_a_small_step_runs_beside_the_layer_and_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lora_arena, events = fill(), []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            events.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def current(stream: Stream) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    streams = [Stream("main")]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", current)

    def shrink(*_: object) -> object:
        events.append(f"shrink on {streams[-1].name}")
        return "delta"

    def linear(x: torch.Tensor) -> torch.Tensor:
        events.append(f"linear on {streams[-1].name}")
        return x

    kernels = replace(torch_kernels(), shrink=shrink)  # type: ignore[arg-type]
    paged = PagedLora(lora_arena.arena, lora_arena.tables, BASE, kernels)
    paged.side = Stream("side")  # type: ignore[assignment]
    tiles, x = torch.zeros((3, 1), dtype=torch.int32), torch.zeros(1, 4)
    assert list(paged.static_step(tiles, 16, is_small=True).project(0, 0, linear, x)) == [
        x,
        "delta",
    ]
    in_parallel = ["side waits for main", "shrink on side", "linear on main", "main waits for side"]
    assert events == in_parallel
    assert list(paged.static_step(tiles, 16).project(0, 0, linear, x)) == [x, "delta"]
    assert events == [*in_parallel, "linear on main", "shrink on main"]
