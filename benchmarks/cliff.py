"""What happens when more adapters are in use than fit the device?

    weft bench cliff [--json benchmarks/results/cliff-cpu.json]

Adapters of ranks 8 to 64, all equally popular, requests of 64 + 64 tokens. One engine has room for 20 adapters beside
the KV cache, the other holds all of them. Both get the same requests in an open loop at 60% of what the latter can do
when it is saturated, which is measured anew in every round; rounds interleave both engines and all numbers of adapters.
A copy is what it takes to bring an adapter from host memory to an engine that does nothing else. Prints a table and,
last, one JSON line.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from weft.benchmarks.metrics import distribution, percentile
from weft.benchmarks.pool_options import add_pool_options
from weft.benchmarks.pool_run import PoolEngine, PoolRun, build_pool_engine, mean_facts, measure_pool_costs, pool_config
from weft.benchmarks.pool_shape import RANKS, PoolShape, make_pool_shape
from weft.benchmarks.report import SHOWN, chosen, spread
from weft.benchmarks.rounds import ratios
from weft.benchmarks.workloads import SloraSettings, TimedRequest, slora_trace
from weft.memory.page_costs import PageCosts

MAX_RATIO = 2.0
"""Largest median TTFT with twice as many adapters as fit, in those of the engine that holds all, plus one copy."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both engines under the same open loops."""
    shape = make_pool_shape(options.cache, options.files)
    costs = measure_pool_costs(shape)
    rooms = {"small": options.room, "whole": None}
    engines = {name: make_engine(options, shape, costs, room) for name, room in rooms.items()}
    try:
        copy_ms = measure_copy(options, engines["small"])
        rounds = [measure_round(options, engines, index) for index in range(options.repeats + 1)]
    finally:
        for engine in engines.values():
            engine.close()
    return make_result(options, shape, rounds[1:], copy_ms)


def make_engine(options: argparse.Namespace, shape: PoolShape, costs: PageCosts, room: int | None) -> PoolEngine:
    """An engine with room for so many adapters of the mean size beside the KV of all that run; None pins them all."""
    most = max(options.actives)
    adapter_pages = most * max(shape.pages(rank) for rank in RANKS) if room is None else room * shape.mean_pages
    kv_pages = options.max_running * shape.geometry.pages(options.input_tokens + options.output_tokens)
    config = pool_config(
        shape,
        num_pages=adapter_pages + kv_pages,
        host_pages=2 * most * shape.mean_pages,
        max_running=options.max_running,
    )
    adapters = shape.adapters(most)
    engine = build_pool_engine(config, adapters, costs)
    for ref in adapters if room is None else ():
        engine.core.pin_adapter(ref, True)
    return engine


def make_load(options: argparse.Namespace, active: int, num_requests: int, seed: int) -> list[TimedRequest]:
    """Poisson arrivals, one a second on the average, of requests of one length for equally popular adapters."""
    settings = SloraSettings(
        num_adapters=active,
        rate=1,
        duration_s=num_requests,
        input_range=(options.input_tokens, options.input_tokens + 1),
        output_range=(options.output_tokens, options.output_tokens + 1),
        seed=seed,
    )
    return slora_trace(settings)


def measure_copy(options: argparse.Namespace, engine: PoolEngine) -> float:
    """Milliseconds from wanting an adapter to having it on an idle device, from host memory."""
    most = max(options.actives)
    each = [TimedRequest(0.0, index, 1, 1) for index in range(most)]
    engine.run(each, seed=[1], in_flight=1)
    return engine.run(each, seed=[1], in_flight=1).facts()["load_ms"]


def measure_round(options: argparse.Namespace, engines: dict[str, PoolEngine], index: int) -> dict[str, Any]:
    """Every number of adapters on both engines."""
    runs: dict[str, dict[int, PoolRun]] = {name: {} for name in engines}
    saturated = {}
    for active in options.actives:
        load = make_load(options, active, options.requests, 100 * index + active)
        in_flight = 2 * options.max_running
        full = engines["whole"].run(load, seed=[2], in_flight=min(in_flight, options.requests - 1))
        saturated[active] = full.output_tokens_per_s / options.output_tokens
        scale = 1 / (options.load * saturated[active])
        for name in sorted(engines, reverse=bool(index % 2)):
            runs[name][active] = engines[name].run(load, seed=[3], scale=scale)
        medians = "  ".join(f"{name} {1e3 * _median_ttft(runs[name][active]):8.1f} ms" for name in engines)
        label = f"round {index}" if index else "warm-up"
        print(f"{label} {active:4} adapters at {1 / scale:6.2f} requests/s, median TTFT: {medians}", flush=True)
    return {"runs": runs, "saturated": saturated}


def make_result(
    options: argparse.Namespace, shape: PoolShape, rounds: Sequence[dict[str, Any]], copy_ms: float
) -> dict[str, Any]:
    """Median TTFT on both engines, and their ratio within rounds."""
    by_active = {}
    for active in options.actives:
        runs = {name: [each["runs"][name][active] for each in rounds] for name in ("small", "whole")}
        ttft = {name: [1e3 * _median_ttft(run) for run in each] for name, each in runs.items()}
        by_active[str(active)] = {
            "saturated_requests_per_s": spread([each["saturated"][active] for each in rounds]),
            "median_ttft_ms": {name: spread(values) for name, values in ttft.items()},
            "ratio": ratios(ttft["small"], ttft["whole"]),
            "share_of_limit": ratios(ttft["small"], [MAX_RATIO * each + copy_ms for each in ttft["whole"]]),
            "ttft_ms": {
                name: distribution([record.ttft_s for run in each for record in run.records], 1e3)
                for name, each in runs.items()
            },
            "facts": {name: mean_facts(each) for name, each in runs.items()},
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


def _median_ttft(run: PoolRun) -> float:
    return percentile([record.ttft_s for record in run.records], 50)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add its options."""
    add_pool_options(parser, requests=150, repeats=4, max_running=16)
    add = parser.add_argument
    add("--actives", type=int, nargs="+", default=[10, 20, 40, 60], help="adapters in use")
    add("--room", type=int, default=20, help="adapters of the mean size that fit the device beside the KV cache")
    add("--load", type=float, default=0.6, help="share of the saturated rate")
    add("--input-tokens", type=int, default=64)
    add("--output-tokens", type=int, default=64)
