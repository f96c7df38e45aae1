"""Copies of pages from pinned memory, alone and beside decode attention (M1); what scattered pages cost attention."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from weft.benchmarks.engine.kernels import KernelBench
from weft.benchmarks.gpu.case_log import Case, Figures
from weft.benchmarks.gpu.floors import GOAL_COPY, GOAL_SWAPS
from weft.benchmarks.gpu.kernels import timed
from weft.benchmarks.gpu.machine import Setup, Timer, release, timed_s
from weft.benchmarks.model_shapes import MODELS, ModelShape

GIB = 1 << 30
PAGE_KIB = (256, 768, 2048)
SPANS_GIB = (0, 8, 32, 64, 100)
"""Over so much memory the pages of a batch are scattered; 0 means that they lie side by side."""
COPY_ROUNDS = 6
PASSES = 8
"""Passes of decode attention through all layers that are timed at once."""
RESERVED_BYTES = 8 * GIB
"""Device memory that the arena leaves free."""


def cases(setup: Setup) -> list[Case]:
    """Copies by size of page, then attention by how far its pages are scattered, for one and for four layer groups."""
    found = [
        Case(f"copies of {kib} KiB{' beside decode' if is_busy else ''}", partial(_copies, setup, kib << 10, is_busy))
        for kib in PAGE_KIB
        for is_busy in (False, True)
    ]
    benches = Arenas(setup)
    for model in (setup.model,) if setup.is_tiny else (MODELS[0], MODELS[2]):
        for span in SPANS_GIB:
            about = f"scattered over {span} GiB" if span else "side by side"
            name = f"attention, {model.name}, {model.geometry().num_groups} groups, pages {about}"
            found.append(Case(name, partial(_scattered, setup, benches, model, span)))
    return found


class Arenas:
    """The largest arena that the device has room for, of one model at a time.

    Args:
        setup: Says which device.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._bench: KernelBench | None = None

    def of(self, model: ModelShape) -> KernelBench:
        """The operations of a model over such an arena."""
        if self._bench is None or self._bench.model != model:
            self._bench, device = None, self._setup.device
            release(device)
            free = torch.cuda.mem_get_info()[0] - RESERVED_BYTES if device.type == "cuda" else 1 << 26
            self._bench = KernelBench(model, device, kv_pages=free // model.geometry().page_bytes - 2)
        return self._bench


def _scattered(
    setup: Setup, arenas: Arenas, model: ModelShape, span_gib: int, before: Mapping[str, Figures]
) -> Figures:
    bench = arenas.of(model)
    rows, context = 32, setup.sized(1024, 32)
    count = rows * bench.geometry.blocks(context)
    # The toy's arena has 64 MiB, which stand for as many GiB.
    spread_pages = span_gib * setup.sized(GIB, 1 << 20) // bench.geometry.page_bytes
    pages = scattered_pages(count, spread_pages, bench.arena.num_pages)
    if pages is None:
        return {"absent": f"the arena has {bench.arena.bytes.nbytes / GIB:.0f} GiB"}
    found = timed(setup, bench.attention(rows, context, pages=pages))
    dense = next((each for name, each in before.items() if model.name in name and "side by side" in name), {})
    return {**found, "over_dense": found["measured"] / dense.get("measured", found["measured"])}


def scattered_pages(count: int, span: int, num_pages: int) -> list[int] | None:
    """So many different pages, spread evenly over the first `span` of an arena in random order; None if it is smaller.

    Where `span` is less than `count`, they lie side by side.
    """
    if max(span, count) >= num_pages:
        return None
    if span <= count:
        return list(range(1, count + 1))
    pages = [1 + index * span // count for index in range(count)]
    random.Random(0).shuffle(pages)
    return pages


def _copies(setup: Setup, page_bytes: int, is_busy: bool, _: Mapping[str, Figures]) -> Figures:
    """Milliseconds for 512 MiB in pages, with one large copy as the floor."""
    device = setup.device
    count = setup.sized(512 << 20, 4 << 20) // page_bytes
    host = torch.empty((count, page_bytes), dtype=torch.uint8, pin_memory=device.type == "cuda").random_()
    target = torch.empty((count, page_bytes), dtype=torch.uint8, device=device)
    order = random.Random(0).sample(range(count), count)

    def copy_pages() -> None:
        for page in order:
            target[page].copy_(host[page], non_blocking=True)

    floor_s = statistics.median(copy_s(device, lambda: target.copy_(host, non_blocking=True)) for _ in range(5))
    seconds, found = [copy_s(device, copy_pages) for _ in range(COPY_ROUNDS)][1:], dict[str, Any]()
    if is_busy:
        context = setup.sized(1024, 32)
        bench = KernelBench(setup.model, device, kv_pages=32 * setup.model.geometry().blocks(context) + 8)
        decode = Timer(bench.attention(32, context).run, device, bench.num_layers)
        alone, beside = decode.seconds(PASSES), list[float]()
        with ThreadPoolExecutor(1) as copier:  # as in the engine, where a thread of its own copies
            rounds = [copier.submit(copy_s, device, copy_pages) for _ in range(COPY_ROUNDS)]
            while not rounds[-1].done() or not beside:
                beside += decode.seconds(PASSES)
        seconds, ratio = [each.result() for each in rounds], statistics.median(beside) / statistics.median(alone)
        found = {"decode_ratio": ratio, "ok": ratio <= GOAL_SWAPS}
    median_s = statistics.median(seconds)
    found |= {"measured": median_s * 1e3, "floor": floor_s * 1e3, "goal": floor_s * 1e3 / GOAL_COPY, "unit": "ms"}
    return {**found, "gigabytes_per_s": host.nbytes / median_s / 1e9}


def copy_s(device: torch.device, copies: Callable[[], object]) -> float:
    """How long copies take on a stream of their own; on a CPU, on the host."""
    if device.type != "cuda":
        return timed_s(copies)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        start.record()
        copies()
        end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
