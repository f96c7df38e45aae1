"""Does throughput depend on how many adapters are registered?

    python -P -m weft.benchmarks.adapter_count [--json benchmarks/results/adapter-count-cpu.json]

S-LoRA's workload (popularity, prompt and output lengths) over 5, 100, 1,000 and 2,000 adapters of ranks 8 to 64, 16
requests running and as many waiting, device room for about 20 adapters beside the KV cache and host room for 200. Every
number of adapters has an engine of its own; their repeats are interleaved, after one round that is not counted, and
ratios are taken within a round. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from weft.benchmarks.pool_options import pool_parser
from weft.benchmarks.pool_run import PoolEngine, PoolRun, build_pool_engine, mean_facts, measure_pool_costs, pool_config
from weft.benchmarks.pool_shape import RANKS, PoolShape, make_pool_shape
from weft.benchmarks.report import provenance, spread, without_nan, write_result
from weft.benchmarks.workloads import SloraSettings, TimedRequest, slora_trace
from weft.memory.page_costs import PageCosts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    options = _parser().parse_args(arguments)
    if options.quick:
        options.counts, options.requests, options.repeats = [2, 8, 16], 20, 1
        options.lengths, options.files, options.room = (4, 24), 8, 4
        options.max_running, options.in_flight = 4, 8
    shape = make_pool_shape(options.cache, options.files)
    costs = measure_pool_costs(shape)
    engines = {count: make_engine(options, shape, costs, count) for count in options.counts}
    runs: dict[int, list[PoolRun]] = {count: [] for count in engines}
    try:
        for round_index in range(options.repeats + 1):
            for count in _rotated(options.counts, round_index):
                run = engines[count].run(make_load(options, count, round_index), seed=[0], in_flight=options.in_flight)
                name = f"round {round_index}" if round_index else "warm-up"
                print(f"{name} {count:5} adapters {run.output_tokens_per_s:8.1f} tok/s", flush=True)
                if round_index:
                    runs[count].append(run)
    finally:
        for engine in engines.values():
            engine.close()
    result = make_result(options, shape, runs)
    if options.json:
        write_result(options.json, result)
    print_result(result)
    return 0


def make_engine(options: argparse.Namespace, shape: PoolShape, costs: PageCosts, count: int) -> PoolEngine:
    """An engine with device room for `room` adapters of the mean size, beside the KV of the requests that run."""
    longest = 2 * options.lengths[1]
    kv_pages = options.max_running * shape.geometry.pages(longest // 2)
    config = pool_config(
        shape,
        num_pages=options.room * shape.mean_pages + kv_pages,
        host_pages=options.host_room * shape.mean_pages,
        max_running=options.max_running,
    )
    return build_pool_engine(config, shape.adapters(count), costs)


def make_load(options: argparse.Namespace, count: int, round_index: int) -> list[TimedRequest]:
    """S-LoRA's trace; its lengths are the same for every number of adapters."""
    settings = SloraSettings(
        num_adapters=count,
        alpha=options.alpha,
        rate=options.requests,
        cv=1,
        duration_s=1,
        input_range=options.lengths,
        output_range=options.lengths,
        seed=42 + round_index,
    )
    return slora_trace(settings)


def make_result(options: argparse.Namespace, shape: PoolShape, runs: dict[int, list[PoolRun]]) -> dict[str, Any]:
    """Throughput by number of adapters, ratios within rounds, and what explains them."""
    rates = {count: [run.output_tokens_per_s for run in each] for count, each in runs.items()}
    pairs = [(before, after) for before in rates for after in rates if before < after]
    falls = {
        f"{after} / {before}": spread([b / a for a, b in zip(rates[before], rates[after], strict=True)])
        for before, after in pairs
    }
    return {
        "benchmark": "adapter-count",
        **provenance(),
        "load": {
            "model": shape.kind.about,
            "ranks": list(RANKS),
            "alpha": options.alpha,
            "tokens": list(options.lengths),
            "requests": options.requests,
            "in_flight": options.in_flight,
            "max_running": options.max_running,
            "room": options.room,
            "host_room": options.host_room,
            "repeats": options.repeats,
            "pages": shape.mean_pages,
        },
        "output_tokens_per_s": {str(count): spread(values) for count, values in rates.items()},
        "ratios": falls,
        "facts": {str(count): mean_facts(each) for count, each in runs.items()},
        "decode_step_ms": {str(count): decode_steps(each, options.max_running) for count, each in runs.items()},
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


def print_result(result: dict[str, Any]) -> None:
    """A table for people, then one JSON line for machines."""
    table = Table(title="throughput by number of registered adapters, medians", title_justify="left")
    table.add_column("adapters")
    for column in ("tok/s", "in a step", "step ms", "idle", "loads from host", "from store", "load ms"):
        table.add_column(column, justify="right")
    for count, rate in result["output_tokens_per_s"].items():
        facts = result["facts"][count]
        table.add_row(
            f"{int(count):,}",
            f"{rate['median']:,.0f}",
            f"{facts['adapters_per_step']:.1f}",
            f"{facts['step_ms']:.2f}",
            f"{facts['share_of_time_idle']:.1%}",
            f"{facts.get('loads per request, host>device:ok', 0.0):.2f}",
            f"{facts.get('loads per request, stored>device:ok', 0.0):.2f}",
            f"{facts['load_ms']:.1f}",
        )
    console = Console()
    console.print(table)
    for name, ratio in result["ratios"].items():
        line = f"{name} adapters: {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})"
        console.print(line, highlight=False)
    print(json.dumps(without_nan(result)))


def _rotated(counts: Sequence[int], by: int) -> list[int]:
    """Another one goes first in each round."""
    start = by % len(counts)
    return [*counts[start:], *counts[:start]]


def _parser() -> argparse.ArgumentParser:
    parser = pool_parser("adapter_count", __doc__, requests=128, repeats=5, max_running=16)
    add = parser.add_argument
    add("--counts", type=int, nargs="+", default=[5, 100, 1000, 2000], help="registered adapters")
    add("--alpha", type=float, default=0.3, help="popularity; 1 uniform, smaller more skewed")
    add("--lengths", type=int, nargs=2, default=(8, 512), help="prompt and output tokens, upper end excluded")
    add("--in-flight", type=int, default=32)
    add("--room", type=int, default=20, help="adapters of the mean size that fit the device beside the KV cache")
    add("--host-room", type=int, default=200, help="adapters of the mean size that fit the host slab")
    return parser


if __name__ == "__main__":
    sys.exit(main())
