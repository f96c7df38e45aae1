"""What happens when more adapters are in use than fit the device?

    manylora bench cliff [--json benchmarks/results/cliff-cpu.json]

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

from manylora.benchmarks.metrics import percentile
from manylora.benchmarks.pool.pool_run import (
    PoolEngine,
    PoolRun,
    add_pool_options,
    mean_facts,
    pool_engine,
)
from manylora.benchmarks.pool.pool_shape import RANKS, make_pool_shape
from manylora.benchmarks.report import SHOWN, AddOption, ratios, spread, take_turns
from manylora.benchmarks.workloads import TimedRequest, slora_trace

MAX_RATIO = 2.0
"""Limit of the median TTFT with twice as many adapters as fit: this many times the median of the engine that holds all,
plus one copy."""
ENGINES = ("small", "whole")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run both engines under the same open loops."""
    shape = make_pool_shape(options.cache, options.files)
    most = max(options.actives)
    kv_pages = options.max_running * shape.geometry.pages(
        options.input_tokens + options.output_tokens
    )
    rooms = {
        "small": options.room * shape.mean_pages,
        "whole": most * max(shape.pages(rank) for rank in RANKS),
    }
    with contextlib.ExitStack() as stack:
        engines = {}
        for name, room in rooms.items():
            memory = shape.memory(room + kv_pages, 2 * most * shape.mean_pages)
            engines[name] = stack.enter_context(
                pool_engine(shape, most, memory, options.max_running)
            )
        for ref in shape.adapters(most):
            engines["whole"].core.residency.pin(ref, True)
        each = [TimedRequest(0.0, index, 1, 1) for index in range(most)]
        for _ in range(2):  # from their files, then from host memory
            copy_ms = engines["small"].run(each, in_flight=1).facts()["load_ms"]
        runs = take_turns(
            options.actives,
            options.repeats,
            lambda active, i: measure_both(options, engines, active, i),
        )
    by_active = {
        str(active): compare_rounds(options, rounds, copy_ms) for active, rounds in runs.items()
    }
    return {
        "load": {"model": shape.kind.about, "ranks": list(RANKS)},
        "copy_ms": copy_ms,
        "adapters": by_active,
        "table": [
            {
                "adapters in use": active,
                "all fit, ms": found["median_ttft_ms"]["whole"]["median"],
                "ms": found["median_ttft_ms"]["small"]["median"],
                **{f"ratio, {key}": found["ratio"][key] for key in SHOWN},
                "loads a request": sum(
                    n for name, n in found["facts"]["small"].items() if name.startswith("loads")
                ),
                "a copy, ms": copy_ms,
            }
            for active, found in by_active.items()
        ],
    }


def measure_both(
    options: argparse.Namespace, engines: dict[str, PoolEngine], active: int, round_: int
) -> dict[str, PoolRun]:
    """Measure what the engine that holds all can do, then run both engines at a share of that rate."""
    inputs, outputs = (
        (tokens, tokens + 1) for tokens in (options.input_tokens, options.output_tokens)
    )
    load = slora_trace(active, options.requests, inputs, outputs, seed=100 * round_ + active)
    full = engines["whole"].run(load, in_flight=min(2 * options.max_running, options.requests - 1))
    scale = options.output_tokens / (options.load * full.output_tokens_per_s)
    both = {
        name: engines[name].run(load, scale=scale)
        for name in sorted(engines, reverse=bool(round_ % 2))
    }
    return {"full": full, **both}


def compare_rounds(
    options: argparse.Namespace, rounds: list[dict[str, PoolRun]], copy_ms: float
) -> dict[str, Any]:
    """Median TTFT on both engines, and their ratio within rounds."""
    small, whole = (
        [1e3 * percentile([record.ttft_s for record in each[name].records], 50) for each in rounds]
        for name in ENGINES
    )
    return {
        "saturated_requests_per_s": spread(
            [run["full"].output_tokens_per_s / options.output_tokens for run in rounds]
        ),
        "median_ttft_ms": {"small": spread(small), "whole": spread(whole)},
        "ratio": ratios(small, whole),
        "share_of_limit": ratios(small, [MAX_RATIO * each + copy_ms for each in whole]),
        "facts": {name: mean_facts([each[name] for each in rounds]) for name in ENGINES},
    }


def add_options(add: AddOption) -> None:
    """Add its options."""
    add_pool_options(add, requests=150, repeats=4, max_running=16)
    add("--actives", type=int, nargs="+", default=[10, 20, 40, 60], help="adapters in use")
    add(
        "--room",
        type=int,
        default=20,
        help="adapters of the mean size that fit the device beside the KV cache",
    )
    add("--load", type=float, default=0.6, help="share of the saturated rate")
    add("--input-tokens", type=int, default=64)
    add("--output-tokens", type=int, default=64)
