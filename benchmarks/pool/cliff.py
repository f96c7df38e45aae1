"""What happens when more adapters are in use than fit the device?

    weft bench cliff [--json benchmarks/results/cliff-cpu.json]

Adapters of ranks 8 to 64, all equally popular, requests of 64 + 64 tokens. One engine has room for 20 adapters beside
the KV cache, the other holds all of them. Both get the same requests in an open loop at 60% of what the latter can do
when it is saturated, which is measured in every round; rounds interleave both engines and all numbers of adapters.
A copy is what it takes to bring an adapter from host memory to an engine that does nothing else. Prints a table and,
last, one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from weft.benchmarks.metrics import percentile
from weft.benchmarks.pool.pool_run import (
    PoolEngine,
    PoolRun,
    add_pool_options,
    mean_facts,
    measure_pool_costs,
    pool_engine,
)
from weft.benchmarks.pool.pool_shape import RANKS, PoolShape, make_pool_shape
from weft.benchmarks.report import SHOWN, chosen, spread
from weft.benchmarks.rounds import ratios, take_turns
from weft.benchmarks.workloads import TimedRequest, slora_trace

MAX_RATIO = 2.0
"""Largest median TTFT with twice as many adapters as fit, in those of the engine that holds all, plus one copy."""
ENGINES = ("small", "whole")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both engines under the same open loops."""
    shape = make_pool_shape(options.cache, options.files)
    costs = measure_pool_costs(shape)
    most = max(options.actives)
    kv_pages = options.max_running * shape.geometry.pages(options.input_tokens + options.output_tokens)
    rooms = (options.room * shape.mean_pages, most * max(shape.pages(rank) for rank in RANKS))
    memories = [shape.memory(room + kv_pages, 2 * most * shape.mean_pages) for room in rooms]
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(pool_engine(shape, costs, most, memory, options.max_running))
            for name, memory in zip(ENGINES, memories, strict=True)
        }
        for ref in shape.adapters(most):
            engines["whole"].core.pin_adapter(ref, True)
        each = [TimedRequest(0.0, index, 1, 1) for index in range(most)]
        for _ in range(2):  # from their files, then from host memory
            copy_ms = engines["small"].run(each, seed=[1], in_flight=1).facts()["load_ms"]
        runs = take_turns(options.actives, options.repeats, lambda active, i: measure_both(options, engines, active, i))
    return make_result(options, shape, runs, copy_ms)


def measure_both(
    options: argparse.Namespace, engines: dict[str, PoolEngine], active: int, round_: int
) -> dict[str, PoolRun]:
    """What the whole engine can do with so many equally popular adapters, then both of them at a share of that."""
    load = slora_trace(
        num_adapters=active,
        rate=1,
        duration_s=options.requests,
        input_range=(options.input_tokens, options.input_tokens + 1),
        output_range=(options.output_tokens, options.output_tokens + 1),
        seed=100 * round_ + active,
    )
    in_flight = min(2 * options.max_running, options.requests - 1)
    full = engines["whole"].run(load, seed=[2], in_flight=in_flight)
    scale = options.output_tokens / (options.load * full.output_tokens_per_s)
    both = {name: engines[name].run(load, seed=[3], scale=scale) for name in sorted(engines, reverse=bool(round_ % 2))}
    return {"full": full, **both}


def make_result(
    options: argparse.Namespace, shape: PoolShape, runs: dict[int, list[dict[str, PoolRun]]], copy_ms: float
) -> dict[str, Any]:
    """Median TTFT on both engines, and their ratio within rounds."""
    by_active = {}
    for active, rounds in runs.items():
        ttft = {
            name: [1e3 * percentile([record.ttft_s for record in each[name].records], 50) for each in rounds]
            for name in ENGINES
        }
        saturated = [each["full"].output_tokens_per_s / options.output_tokens for each in rounds]
        by_active[str(active)] = {
            "saturated_requests_per_s": spread(saturated),
            "median_ttft_ms": {name: spread(values) for name, values in ttft.items()},
            "ratio": ratios(ttft["small"], ttft["whole"]),
            "share_of_limit": ratios(ttft["small"], [MAX_RATIO * each + copy_ms for each in ttft["whole"]]),
            "facts": {name: mean_facts([each[name] for each in rounds]) for name in ENGINES},
        }
    return {
        "load": {
            "model": shape.kind.about,
            "ranks": list(RANKS),
            "tokens": [options.input_tokens, options.output_tokens],
            **chosen(options, "load", "room", "requests", "max_running", "repeats"),
        },
        "copy_ms": copy_ms,
        "adapters": by_active,
        "table": [
            {
                "adapters in use": active,
                "all fit, ms": found["median_ttft_ms"]["whole"]["median"],
                "ms": found["median_ttft_ms"]["small"]["median"],
                **{f"ratio, {key}": found["ratio"][key] for key in SHOWN},
                "loads a request": sum(n for name, n in found["facts"]["small"].items() if name.startswith("loads")),
                "a copy, ms": copy_ms,
            }
            for active, found in by_active.items()
        ],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add its options."""
    add_pool_options(parser, requests=150, repeats=4, max_running=16)
    add = parser.add_argument
    add("--actives", type=int, nargs="+", default=[10, 20, 40, 60], help="adapters in use")
    add("--room", type=int, default=20, help="adapters of the mean size that fit the device beside the KV cache")
    add("--load", type=float, default=0.6, help="share of the saturated rate")
    add("--input-tokens", type=int, default=64)
    add("--output-tokens", type=int, default=64)
