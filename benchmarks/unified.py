"""What is one pool worth, against a pool for the KV cache and another one for adapters?

    weft bench unified [--json benchmarks/results/unified-cpu.json]

The same arena, once shared and once divided into halves, under the same closed loop: 200 adapters of ranks 64, 32, 16
and 8, equally popular, with more requests in flight than the pages hold. Three loads, because no division suits all: in
the proportions of S-LoRA's S2 (7B model, adapters on attention), where KV cache needs most of the pages; adapters on
all linear layers with long answers, where both need about the same; and with short answers, where adapters need most.
Repeats of both are interleaved, after one round that is not counted, and ratios are taken within a round. Prints a
table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import sys
import threading
from dataclasses import dataclass
from typing import Any

from weft.benchmarks.main import main
from weft.benchmarks.pool_options import add_pool_options
from weft.benchmarks.pool_run import PoolEngine, PoolRun, build_pool_engine, mean_facts, measure_pool_costs, pool_config
from weft.benchmarks.pool_shape import ATTENTION, GROUPED, RANKS, PoolModel, PoolShape, make_pool_shape
from weft.benchmarks.report import SHOWN, chosen, spread
from weft.benchmarks.rounds import ratios, take_turns
from weft.benchmarks.split_pool import build_split_engine
from weft.benchmarks.workloads import SloraSettings, TimedRequest, slora_trace

ENGINES = ("unified", "split")


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


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both engines under all loads."""
    loads = {load.name: measure_load(options, load) for load in LOADS}
    return {
        "load": {
            "ranks": list(RANKS),
            **chosen(options, "adapters", "batch", "requests", "in_flight", "max_running", "repeats"),
        },
        "loads": loads,
        "table": [
            {
                "load": name,
                **{f"{engine}, tokens/s": found["output_tokens_per_s"][engine]["median"] for engine in ENGINES},
                **{f"ratio, {key}": found["ratio"][key] for key in SHOWN},
                **{f"{engine}, batch": found["facts"][engine]["requests_per_step"] for engine in ENGINES},
            }
            for name, found in loads.items()
        ],
    }


def measure_load(options: argparse.Namespace, load: Load) -> dict[str, Any]:
    """Both engines under one load."""
    shape = make_pool_shape(options.cache, options.files, load.model)
    num_pages = shared_pages(options, shape, load)
    engines = make_engines(options, shape, num_pages)

    def run(name: str, round_: int) -> PoolRun:
        return engines[name].run(make_trace(options, load, round_), seed=[4], in_flight=options.in_flight)

    try:
        runs = take_turns(ENGINES, options.repeats, run)
    finally:
        for engine in engines.values():
            engine.close()
    rates = {name: [run.output_tokens_per_s for run in each] for name, each in runs.items()}
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


def make_engines(options: argparse.Namespace, shape: PoolShape, num_pages: int) -> dict[str, PoolEngine]:
    """One that shares its pages and one that does not, with the same settings."""
    config = pool_config(
        shape,
        num_pages=num_pages,
        host_pages=3 * options.adapters * shape.mean_pages,
        max_running=options.max_running,
        prefix_cache=False,
    )
    costs, adapters, loaded = measure_pool_costs(shape), shape.adapters(options.adapters), threading.Event()
    split = build_split_engine(config, shape.geometry, costs, loaded.set)
    return {
        "unified": build_pool_engine(config, adapters, costs),
        "split": PoolEngine(split, loaded, adapters),
    }


def make_trace(options: argparse.Namespace, load: Load, index: int) -> list[TimedRequest]:
    """S-LoRA's trace with equally popular adapters."""
    settings = SloraSettings(
        num_adapters=options.adapters,
        rate=options.requests,
        input_range=load.lengths,
        output_range=load.lengths,
        seed=42 + index,
    )
    return slora_trace(settings)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add its options."""
    add_pool_options(parser, requests=120, repeats=4, max_running=32)
    add = parser.add_argument
    add("--adapters", type=int, default=200)
    add("--batch", type=int, default=8, help="mean requests, each with an adapter of its own, that all pages hold")
    add("--in-flight", type=int, default=24)


if __name__ == "__main__":
    sys.exit(main("unified", sys.argv[1:]))
