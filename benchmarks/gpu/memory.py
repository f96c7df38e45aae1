"""The cost of copies of pages from pinned memory beside one large copy (M1), and of scattered pages for attention."""

from __future__ import annotations

import random
import statistics
from functools import partial

import torch

from manylora.benchmarks.engine.kernels import KernelBench, call_s, timings_in_turns
from manylora.benchmarks.gpu.case_log import Cases
from manylora.benchmarks.gpu.floors import GOAL_COPY
from manylora.benchmarks.gpu.setup import Setup, release
from manylora.benchmarks.model_shapes import MODELS, ModelShape
from manylora.benchmarks.report import Figures

PAGE_KIB = (256, 768, 2048)
SPANS_GIB = (8, 32, 64, 100)
"""Over so much memory the pages of a batch are scattered."""
COPY_ROUNDS = 5
RESERVED_BYTES = 8 << 30
"""Device memory that the arena leaves free."""


def cases(setup: Setup) -> Cases:
    """Copies by size of page, then attention over scattered pages, for one and for four layer groups."""
    models = (setup.model,) if setup.is_tiny else (MODELS[0], MODELS[2])
    return {
        **{f"copies of {kib} KiB": partial(_copies, setup, kib << 10) for kib in PAGE_KIB},
        **{
            f"attention over scattered pages, {model.name}": partial(_scattered, setup, model)
            for model in models
        },
    }


def _copies(setup: Setup, page_bytes: int) -> Figures:
    """Milliseconds for 512 MiB in pages, in random order as the engine copies them; one large copy is the floor."""
    count = setup.sized(512 << 20, 4 << 20) // page_bytes
    host = torch.empty(
        (count, page_bytes), dtype=torch.uint8, pin_memory=setup.device.type == "cuda"
    ).random_()
    target = torch.empty((count, page_bytes), dtype=torch.uint8, device=setup.device)
    order = random.Random(0).sample(range(count), count)

    def copy_pages(_: int) -> None:
        for page in order:
            target[page].copy_(host[page], non_blocking=True)
        target[0, 0].item()  # waits for the copies

    seconds = timings_in_turns([lambda _: target.copy_(host), copy_pages], COPY_ROUNDS)
    floor_ms, pages_ms = (1e3 * statistics.median(each) for each in seconds)
    return {"measured": pages_ms, "floor": floor_ms, "goal": floor_ms / GOAL_COPY, "unit": "ms"}


def _scattered(setup: Setup, model: ModelShape) -> Figures:
    """Decode attention over pages in the largest arena that there is room for; pages side by side are the floor."""
    release(setup.device)
    free = torch.cuda.mem_get_info()[0] - RESERVED_BYTES if setup.device.type == "cuda" else 1 << 26
    bench = KernelBench(model, setup.device, free // model.geometry().page_bytes - 1)
    rows = 32
    context = setup.sized(1024, 32)
    count = rows * bench.geometry.blocks(context)
    us_by_gib = {}
    for gib in (0, *SPANS_GIB):
        # The toy's arena has 64 MiB, which stand for as many GiB.
        span = max(count, gib * setup.sized(1 << 30, 1 << 20) // bench.geometry.page_bytes)
        if span < bench.arena.num_pages:
            (work,) = bench.attention(rows, context, pages=scattered_pages(count, span))
            us_by_gib[gib] = 1e6 * call_s(work.run, setup.device)
    return {
        "measured": max(us_by_gib.values()),
        "floor": us_by_gib[0],
        "unit": "us",
        "us_by_gib": us_by_gib,
    }


def scattered_pages(count: int, span: int) -> list[int]:
    """Choose different pages, spread evenly over the first `span` of an arena, in random order but if that is all."""
    pages = [1 + index * span // count for index in range(count)]
    if span > count:
        random.Random(0).shuffle(pages)
    return pages
