"""Does throughput depend on how many adapters are registered?

    manylora bench adapters [--json benchmarks/results/adapter-count-cpu.json]

S-LoRA's workload (popularity, prompt and output lengths) over 5, 100, 1,000 and 2,000 adapters of ranks 8 to 64. 16
requests run and as many wait. The device has room for about 20 adapters beside the KV cache, the host for 200. There is
one engine for each number of adapters; they take turns, after one round that is not counted, and ratios are taken
within a round. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from manylora.benchmarks.pool.pool_run import (
    PoolRun,
    add_pool_options,
    mean_facts,
    pool_engine,
    run_in_turns,
)
from manylora.benchmarks.pool.pool_shape import RANKS, make_pool_shape
from manylora.benchmarks.report import AddOption, ratios, spread
from manylora.benchmarks.workloads import TimedRequest, slora_trace

LOADS = tuple(f"loads per request, {origin}>device:ok" for origin in ("host", "stored"))
SHOWN_FACTS = ("adapters_per_step", "step_ms", "share_of_time_in_steps", *LOADS, "load_ms")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all numbers of adapters in turns."""
    shape = make_pool_shape(options.cache, options.files)
    kv_pages = options.max_running * shape.geometry.pages(options.lengths[1])
    memory = shape.memory(
        options.room * shape.mean_pages + kv_pages, options.host_room * shape.mean_pages
    )
    engines = {
        count: pool_engine(shape, count, memory, options.max_running) for count in options.counts
    }

    def load(count: int, round_: int) -> list[TimedRequest]:
        lengths = options.lengths
        return slora_trace(
            count, options.requests, lengths, lengths, alpha=options.alpha, seed=42 + round_
        )

    runs, rates = run_in_turns(options, engines, load)
    facts = {str(count): mean_facts(each) for count, each in runs.items()}
    return {
        "load": {"model": shape.kind.about, "ranks": list(RANKS), "pages": shape.mean_pages},
        "output_tokens_per_s": {str(count): spread(values) for count, values in rates.items()},
        "ratios": {
            f"{after} / {before}": ratios(rates[after], rates[before])
            for before, after in itertools.combinations(sorted(rates), 2)
        },
        "facts": facts,
        "decode_step_ms": {
            str(count): decode_steps(each, options.max_running) for count, each in runs.items()
        },
        "table": [
            {"adapters": count, "tokens/s": statistics.median(values)}
            | {name: facts[str(count)].get(name, 0.0) for name in SHOWN_FACTS}
            for count, values in rates.items()
        ],
    }


def decode_steps(runs: Sequence[PoolRun], num_requests: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of full steps that decode only, by the number of adapters in them."""
    by_adapters: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        for step in run.steps:
            if step.prefill_tokens == 0 and step.requests == num_requests:
                by_adapters[step.adapters].append(1e3 * step.seconds)
    return {
        str(adapters): {"steps": len(values), "median": statistics.median(values)}
        for adapters, values in sorted(by_adapters.items())
    }


def add_options(add: AddOption) -> None:
    """Add its options."""
    add_pool_options(add, requests=128, repeats=5, max_running=16)
    add("--counts", type=int, nargs="+", default=[5, 100, 1000, 2000], help="registered adapters")
    add("--alpha", type=float, default=0.3, help="popularity; 1 uniform, smaller more skewed")
    add(
        "--lengths",
        type=int,
        nargs=2,
        default=(8, 512),
        help="prompt and output tokens, upper end excluded",
    )
    add("--in-flight", type=int, default=32)
    add(
        "--room",
        type=int,
        default=20,
        help="adapters of the mean size that fit the device beside the KV cache",
    )
    add(
        "--host-room",
        type=int,
        default=200,
        help="adapters of the mean size that fit the host slab",
    )
