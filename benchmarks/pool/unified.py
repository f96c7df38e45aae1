"""How much faster is one pool than a pool for the KV cache and another one for adapters?

    manylora bench unified [--json benchmarks/results/unified-cpu.json]

The same arena, once shared and once divided into halves, under the same closed loop: 200 adapters of ranks 64, 32, 16
and 8, equally popular, with more requests in flight than the pages hold. Three loads, because no division suits all: in
the proportions of S-LoRA's S2 (7B model, adapters on attention), where KV cache needs most of the pages; adapters on
all linear layers with long answers, where both need about the same; and with short answers, where adapters need most.
Repeats of both are interleaved, after one round that is not counted, and ratios are taken within a round. Prints a
table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from manylora.adapters.residency.residency import Residency
from manylora.benchmarks.pool.pool_run import (
    add_pool_options,
    mean_facts,
    pool_engine,
    run_in_turns,
)
from manylora.benchmarks.pool.pool_shape import (
    ATTENTION,
    GROUPED,
    RANKS,
    PoolModel,
    PoolShape,
    make_pool_shape,
)
from manylora.benchmarks.report import SHOWN, AddOption, ratios, spread
from manylora.benchmarks.workloads import TimedRequest, slora_trace
from manylora.config import Config
from manylora.engine import build
from manylora.memory.eviction import Evictor, eviction_policy
from manylora.memory.pool import PagePool


@dataclass(frozen=True, slots=True)
class Load:
    """A model with its adapters, and lengths of requests."""

    name: str
    model: PoolModel
    lengths: tuple[int, int]
    """Prompt and output tokens, upper end excluded."""


LOADS = (
    Load("S2: KV cache needs more", ATTENTION, (8, 512)),
    Load("all linear, long: both the same", GROUPED, (8, 512)),
    Load("all linear, short: adapters need more", GROUPED, (8, 64)),
)


def build_split_engine(config: Config, *, notify: Callable[[], None]) -> build.EngineParts:
    """Build the product's engine, but with one half of its pages for the KV cache and the other for adapters.

    Both halves lie in one arena, each with a pool and an evictor of its own; neither gives pages to the other. There is
    no prefix cache.
    """

    def kv_half(num_pages: int, *_: object, **__: object) -> PagePool:
        return PagePool(1 + (num_pages - 1) // 2)  # page 0 is never handed out

    class HalfResidency(Residency):
        """Adapters with pages of their own, which leave none for running requests to grow into."""

        def __init__(self, *parts: Any, **options: Any) -> None:  # noqa: ANN401 - whatever the residency takes
            loader, copier, kv_pool, images, tables, _, costs = parts
            first_page = 1 + kv_pool.capacity
            pool = PagePool(first_page + kv_pool.capacity, first_page=first_page)
            evictor = Evictor(pool, eviction_policy(config.memory.eviction))
            super().__init__(loader, copier, pool, images, tables, evictor, costs, **options)

        reserve_pages = property(lambda _: 0, lambda *_: None)

    with patch.object(build, "PagePool", kv_half), patch.object(build, "Residency", HalfResidency):
        return build.build_engine(config, notify=notify)


ENGINES: dict[str, Callable[..., build.EngineParts]] = {
    "unified": build.build_engine,
    "split": build_split_engine,
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run both engines under all loads."""
    loads = {load.name: measure_load(options, load) for load in LOADS}
    return {
        "load": {"ranks": list(RANKS)},
        "loads": loads,
        "table": [
            {
                "load": name,
                **{
                    f"{engine}, tokens/s": found["output_tokens_per_s"][engine]["median"]
                    for engine in ENGINES
                },
                **{f"ratio, {key}": found["ratio"][key] for key in SHOWN},
                **{
                    f"{engine}, batch": found["facts"][engine]["requests_per_step"]
                    for engine in ENGINES
                },
            }
            for name, found in loads.items()
        ],
    }


def measure_load(options: argparse.Namespace, load: Load) -> dict[str, Any]:
    """Run both engines under one load."""
    shape = make_pool_shape(options.cache, options.files, load.model)
    num_pages = shared_pages(options, shape, load)
    memory = shape.memory(num_pages, 3 * options.adapters * shape.mean_pages, prefix_cache=False)
    engines = {
        name: pool_engine(shape, options.adapters, memory, options.max_running, build=builder)
        for name, builder in ENGINES.items()
    }

    def trace(_name: str, round_: int) -> list[TimedRequest]:
        return slora_trace(
            options.adapters, options.requests, load.lengths, load.lengths, seed=42 + round_
        )

    runs, rates = run_in_turns(options, engines, trace)
    return {
        "model": load.model.about,
        "tokens": list(load.lengths),
        "pages": num_pages,
        "pages_of_an_adapter": shape.mean_pages,
        "output_tokens_per_s": {name: spread(values) for name, values in rates.items()},
        "ratio": ratios(rates["unified"], rates["split"]),
        "facts": {name: mean_facts(each) for name, each in runs.items()},
    }


def shared_pages(options: argparse.Namespace, shape: PoolShape, load: Load) -> int:
    """Pages for `batch` requests of mean length halfway through their answers, and as many adapters; an even number."""
    mean_tokens = sum(load.lengths) / 2
    kv_pages = 1.5 * mean_tokens / shape.geometry.page_tokens + 0.5
    batch: int = options.batch
    return 2 * round(batch * (kv_pages + shape.mean_pages) / 2)


def add_options(add: AddOption) -> None:
    """Add its options."""
    add_pool_options(add, requests=120, repeats=4, max_running=32)
    add("--adapters", type=int, default=200)
    add(
        "--batch",
        type=int,
        default=8,
        help="mean requests, each with an adapter of its own, that all pages hold",
    )
    add("--in-flight", type=int, default=24)
