"""How much faster is one pool than a pool for the KV cache and another one for adapters?

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
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.benchmarks.pool.pool_run import PoolRun, add_pool_options, mean_facts, measure_pool_costs, pool_engine
from weft.benchmarks.pool.pool_shape import ATTENTION, GROUPED, RANKS, PoolModel, PoolShape, make_pool_shape
from weft.benchmarks.pool.split_pool import build_split_engine
from weft.benchmarks.report import SHOWN, chosen, spread
from weft.benchmarks.rounds import ratios, take_turns
from weft.benchmarks.workloads import slora_trace
from weft.engine.build import EngineParts, build_engine

ENGINES: dict[str, Callable[..., EngineParts]] = {"unified": build_engine, "split": build_split_engine}


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
    memory = shape.memory(num_pages, 3 * options.adapters * shape.mean_pages, prefix_cache=False)
    costs = measure_pool_costs(shape)
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(pool_engine(shape, costs, options.adapters, memory, options.max_running, build))
            for name, build in ENGINES.items()
        }

        def run(name: str, round_: int) -> PoolRun:
            trace = slora_trace(
                num_adapters=options.adapters,
                rate=options.requests,
                input_range=load.lengths,
                output_range=load.lengths,
                seed=42 + round_,
            )
            return engines[name].run(trace, seed=[4], in_flight=options.in_flight)

        runs = take_turns(ENGINES, options.repeats, run)
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add its options."""
    add_pool_options(parser, requests=120, repeats=4, max_running=32)
    add = parser.add_argument
    add("--adapters", type=int, default=200)
    add("--batch", type=int, default=8, help="mean requests, each with an adapter of its own, that all pages hold")
    add("--in-flight", type=int, default=24)
