"""The load that `weft bench serve` and `compare` put on an OpenAI-compatible server, and what they measure of it."""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from weft.benchmarks.arguments import positive
from weft.benchmarks.http.generator import LoadSettings, PlannedRequest, Reply, run_load
from weft.benchmarks.http.http_stream import EventClient
from weft.benchmarks.http.own_server import Served
from weft.benchmarks.metrics import Objective, summarise
from weft.benchmarks.workloads import PATTERNS, assign_adapters, gamma_arrivals
from weft.errors import ConfigError

RATES = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "goodput_requests_per_s", "within_objective")
_SHOWN_ERRORS = 5


async def measure(options: argparse.Namespace, served: Served) -> dict[str, Any]:
    """Carry out the load that the options describe.

    Raises:
        ConfigError: The options contradict each other.
    """
    plan = make_plan(options)
    settings = make_settings(options)
    objective = Objective(ttft_s=options.slo_ttft_ms / 1e3, tpot_s=options.slo_tpot_ms / 1e3)
    with contextlib.closing(EventClient(served.url, served.key)) as client:
        if options.warmup:
            await run_load(client, _warm_up(plan, options.warmup), settings)
        records = await run_load(client, plan, settings)
    errors = Counter(record.error for record in records if record.error).most_common()
    summary = summarise(records, objective)
    print(", ".join(f"{name} {summary[name]:,.4g}" for name in RATES), file=sys.stderr)
    return {
        "adapters": dict(Counter(request.model for request in plan).most_common()),
        "errors": dict(errors),
        "summary": summary,
        "table": [{"": name, **summary[name]} for name in ("ttft_ms", "tpot_ms", "itl_ms", "latency_ms")],
        "failures": [f"{count} x {error}" for error, count in errors[:_SHOWN_ERRORS]],
    }


async def send(served: Served, plan: Sequence[PlannedRequest], settings: LoadSettings) -> list[Reply]:
    """Send all requests of a plan."""
    with contextlib.closing(EventClient(served.url, served.key)) as client:
        return await run_load(client, plan, settings)


def make_plan(options: argparse.Namespace) -> list[PlannedRequest]:
    """Which requests are sent, in order of arrival."""
    models = [name for name in options.models.split(",") if name]
    if not models:
        raise ConfigError("--models names no model", param="models")
    adapters = assign_adapters(options.popularity, options.requests, len(models), options.seed)
    lengths = _lengths(options)
    arrivals = gamma_arrivals(options.requests, options.rate, options.cv, options.seed) if options.rate else None
    return [
        PlannedRequest(models[adapter], *lengths[i], arrival_s=arrivals[i] if arrivals else 0.0)
        for i, adapter in enumerate(adapters)
    ]


def make_settings(options: argparse.Namespace) -> LoadSettings:
    """How the requests are sent."""
    return LoadSettings(
        vocab_size=options.vocab_size,
        ignore_eos=options.ignore_eos,
        concurrency=None if options.rate else options.concurrency,
        timeout_s=options.timeout_s,
        seed=options.seed,
    )


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add what says which requests are sent, and how."""
    add = parser.add_argument
    add("--requests", type=positive, default=64)
    add("--concurrency", type=positive, default=32, help="requests in flight (closed loop)")
    add("--rate", type=_rate, default=None, help="requests per second (open loop)")
    add("--cv", type=float, default=1.0, help="variation of the gaps in an open loop; 1 Poisson, 0 even")
    add("--popularity", default="uniform", help=", ".join(PATTERNS))
    add("--input-tokens", default="64", help="prompt tokens: a number or low:high")
    add("--output-tokens", default="64", help="output tokens: a number or low:high")
    add("--vocab-size", type=positive, default=512, help="prompt ids are drawn below this")
    add("--no-ignore-eos", dest="ignore_eos", action="store_false", help="for servers without ignore_eos")
    add("--timeout-s", type=float, default=600.0)
    add("--seed", type=int, default=0)


def _rate(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def _lengths(options: argparse.Namespace) -> list[tuple[int, int]]:
    inputs = _range(options.input_tokens, "input-tokens")
    outputs = _range(options.output_tokens, "output-tokens")
    draw = random.Random(options.seed)
    return [(draw.randrange(*inputs), draw.randrange(*outputs)) for _ in range(options.requests)]


def _range(text: str, option: str) -> tuple[int, int]:
    """`64` is [64, 65), `8:512` is [8, 512)."""
    low, _, high = text.partition(":")
    try:
        bounds = int(low), int(high) if high else int(low) + 1
    except ValueError:
        bounds = 0, 0
    if not 1 <= bounds[0] < bounds[1]:
        raise ConfigError(f"--{option} must be a number or low:high with 1 <= low < high, got {text!r}", param=option)
    return bounds


def _warm_up(plan: Sequence[PlannedRequest], count: int) -> list[PlannedRequest]:
    """Each model once, then from the start of the plan, all due at once."""
    each = list({request.model: request for request in plan}.values())
    chosen = [*each, *plan][: max(count, len(each))]
    return [PlannedRequest(request.model, request.prompt_tokens, request.output_tokens) for request in chosen]
