"""How fast are the same requests answered by three generations of batching?

    manylora bench batching [--requests 150] [--json benchmarks/results/batching-cpu.json]

    static      waits until a batch is full, and answers when its longest request has ended
    windowed    the same, but waits for a time at most (often called dynamic batching)
    continuous  a request joins the next step and is answered when it has ended (Manylora)

One engine in this process computes all three; for the older two, requests are held back. Real static batching was
slower: it computed padding for requests that had ended. The requests of S-LoRA's generator arrive in an open loop, at
shares of the rate that continuous batching reaches when it is saturated. The three take turns, after one round that is
not counted. Latency counts from when a request was due. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass, field
from typing import Any

from manylora.benchmarks.metrics import percentile
from manylora.benchmarks.pool.pool_run import PoolEngine, add_pool_options, pool_engine
from manylora.benchmarks.pool.pool_shape import RANKS, make_pool_shape
from manylora.benchmarks.report import AddOption, spread, take_turns
from manylora.benchmarks.workloads import TimedRequest, slora_trace

MODES = ("static", "windowed", "continuous")


@dataclass(slots=True)
class Batches:
    """Admits requests in batches that run together to their end."""

    size: int
    window_s: float | None
    """Longest wait of the oldest request for a full batch; None has no limit."""
    sizes: list[int] = field(default_factory=list)
    """Sizes of the batches so far."""

    def admit(self, due: int, in_flight: int, waited_s: float, is_last: bool) -> int:
        """How many of the requests that are due to hand to the engine now; see `Admit` of pool_run."""
        is_over = self.window_s is not None and waited_s >= self.window_s
        if in_flight or not due or not (due >= self.size or is_over or is_last):
            return 0
        self.sizes.append(min(due, self.size))
        return self.sizes[-1]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all modes at all rates, in turns."""
    shape = make_pool_shape(options.cache, options.files)
    room = options.adapters * max(shape.pages(rank) for rank in RANKS)
    kv_pages = options.max_running * shape.geometry.pages(2 * options.lengths[1])
    memory = shape.memory(room + kv_pages, 2 * room)
    with pool_engine(shape, options.adapters, memory, options.max_running) as engine:
        full = engine.run(make_load(options, 0), in_flight=2 * options.max_running)
        rate = full.output_tokens_per_s / (
            sum(r.completion_tokens for r in full.records) / len(full.records)
        )
        runs = take_turns(
            itertools.product(MODES, options.loads),
            options.repeats,
            lambda arm, round_: run_mode(options, engine, arm[0], arm[1] * rate, round_),
        )
    arms: dict[str, dict[str, Any]] = {mode: {} for mode in MODES}
    for (mode, load), each in runs.items():
        arms[mode][f"{load:g}"] = {name: spread([run[name] for run in each]) for name in each[0]}
    table = [
        {"mode": mode, "load": load, **{name: value["median"] for name, value in found.items()}}
        for mode, by_load in arms.items()
        for load, found in by_load.items()
    ]
    return {
        "model": shape.kind.about,
        "saturated_requests_per_s": rate,
        "modes": arms,
        "table": table,
        "goals": [],
    }


def make_load(options: argparse.Namespace, round_: int) -> list[TimedRequest]:
    """S-LoRA's requests, one a second on average."""
    lengths, seed = options.lengths, 42 + round_
    return slora_trace(
        options.adapters, options.requests, lengths, lengths, alpha=options.alpha, seed=seed
    )


def run_mode(
    options: argparse.Namespace, engine: PoolEngine, mode: str, rate: float, round_: int
) -> dict[str, float]:
    """Run one mode at one rate."""
    batches = Batches(options.max_running, None if mode == "static" else options.window_ms / 1e3)
    admit = None if mode == "continuous" else batches.admit
    run = engine.run(make_load(options, round_), scale=1 / rate, admit=admit)
    records = iter(run.records)
    for size in batches.sizes:
        batch = list(itertools.islice(records, size))
        end_s = max(record.done_s for record in batch)
        for record in batch:
            record.done_s = end_s  # all are answered together
    latency_ms = [1e3 * record.latency_s for record in run.records]
    rates = {
        "requests/s": rate,
        "output tokens/s": sum(each.completion_tokens for each in run.records) / run.seconds,
    }
    times = {
        "mean latency, ms": sum(latency_ms) / len(latency_ms),
        "p95 latency, ms": percentile(latency_ms, 95),
    }
    return rates | times


def add_options(add: AddOption) -> None:
    """Add its options."""
    add_pool_options(add, requests=150, repeats=2, max_running=16)
    add(
        "--loads",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 0.75, 1.0],
        help="shares of the saturated rate",
    )
    add(
        "--window-ms",
        type=float,
        default=100.0,
        help="longest wait for a full batch in windowed batching",
    )
    add("--adapters", type=int, default=8, help="all on the device")
    add(
        "--lengths",
        type=int,
        nargs=2,
        default=(8, 128),
        help="prompt and output tokens, from and below",
    )
    add(
        "--alpha",
        type=float,
        default=1.0,
        help="popularity of adapters; 1 uniform, smaller more skewed",
    )
