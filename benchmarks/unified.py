"""What is one pool worth, against a pool for the KV cache and another one for adapters?

    python -P -m weft.benchmarks.unified [--json benchmarks/results/unified-cpu.json]

The same arena, once shared and once divided into halves, under the same closed loop: 200 adapters of ranks 64, 32, 16
and 8, equally popular, with more requests in flight than the pages hold. Three loads, because no division suits all: in
the proportions of S-LoRA's S2 (7B model, adapters on attention), where KV cache needs most of the pages; adapters on
all linear layers with long answers, where both need about the same; and with short answers, where adapters need most.
Repeats of both are interleaved, after one round that is not counted, and ratios are taken within a round. Prints a
table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from weft.benchmarks.pool_options import pool_parser
from weft.benchmarks.pool_run import (
    PoolEngine,
    PoolRun,
    build_pool_engine,
    mean_facts,
    measure_pool_costs,
    pool_config,
)
from weft.benchmarks.pool_shape import (
    ATTENTION,
    GROUPED,
    RANKS,
    PoolModel,
    PoolShape,
    make_pool_shape,
)
from weft.benchmarks.report import provenance, spread, without_nan, write_result
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    options = _parser().parse_args(arguments)
    loads = list(LOADS)
    if options.quick:
        loads = [Load(LOADS[0].name, ATTENTION, (4, 48))]
        options.requests, options.repeats, options.files, options.adapters = 16, 1, 8, 8
        options.batch, options.in_flight, options.max_running = 8, 10, 8
    result = {
        "benchmark": "unified",
        **provenance(),
        "load": {
            "ranks": list(RANKS),
            "adapters": options.adapters,
            "batch": options.batch,
            "requests": options.requests,
            "in_flight": options.in_flight,
            "max_running": options.max_running,
            "repeats": options.repeats,
        },
        "loads": {load.name: measure(options, load) for load in loads},
    }
    if options.json:
        write_result(options.json, result)
    print_result(result)
    return 0


def measure(options: argparse.Namespace, load: Load) -> dict[str, Any]:
    """Both engines under one load."""
    shape = make_pool_shape(options.cache, options.files, load.model)
    num_pages = shared_pages(options, shape, load)
    engines = make_engines(options, shape, num_pages)
    runs: dict[str, list[PoolRun]] = {name: [] for name in ENGINES}
    try:
        for index in range(options.repeats + 1):
            trace = make_trace(options, load, index)
            for name in ENGINES if index % 2 else reversed(ENGINES):
                run = engines[name].run(trace, seed=[4], in_flight=options.in_flight)
                label = f"round {index}" if index else "warm-up"
                print(f"{label} {load.name}, {name}: {run.output_tokens_per_s:8.1f} tok/s", flush=True)
                if index:
                    runs[name].append(run)
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
        "ratio": spread([one / two for one, two in zip(rates["unified"], rates["split"], strict=True)]),
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
        alpha=1.0,
        rate=options.requests,
        cv=1,
        duration_s=1,
        input_range=load.lengths,
        output_range=load.lengths,
        seed=42 + index,
    )
    return slora_trace(settings)


def print_result(result: dict[str, Any]) -> None:
    """A table for people, then one JSON line for machines."""
    table = Table(title="output tokens per second, medians", title_justify="left")
    table.add_column("load")
    for column in ("one pool", "halves", "ratio", "from", "to", "batch", "batch of halves"):
        table.add_column(column, justify="right")
    for name, found in result["loads"].items():
        rates, facts = found["output_tokens_per_s"], found["facts"]
        table.add_row(
            name,
            *(f"{rates[engine]['median']:,.0f}" for engine in ENGINES),
            *(f"{found['ratio'][key]:.2f}" for key in ("median", "min", "max")),
            *(f"{facts[engine]['requests_per_step']:.1f}" for engine in ENGINES),
        )
    Console().print(table)
    print(json.dumps(without_nan(result)))


def _parser() -> argparse.ArgumentParser:
    parser = pool_parser("unified", __doc__, requests=120, repeats=4, max_running=32)
    add = parser.add_argument
    add("--adapters", type=int, default=200)
    add("--batch", type=int, default=8, help="mean requests, each with an adapter of its own, that all pages hold")
    add("--in-flight", type=int, default=24)
    return parser


if __name__ == "__main__":
    sys.exit(main())
