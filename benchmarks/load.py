"""How fast does a server answer? A load generator for any OpenAI-compatible URL.

    python -P -m weft.benchmarks.load --url http://127.0.0.1:8000/v1 --key KEY --models base,pirate,french

Closed loop by default (--concurrency requests in flight); --rate makes it an open loop. Prints a table and, last, one
JSON line. Exit status 1 if any request failed or was answered wrongly, 2 if the arguments make no sense.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from weft.benchmarks.arguments import positive
from weft.benchmarks.generator import LoadSettings, PlannedRequest, run_load
from weft.benchmarks.http_stream import EventClient
from weft.benchmarks.metrics import Objective, RequestRecord, summarise
from weft.benchmarks.report import exit_status, provenance, shown_options, without_key, without_nan, write_result
from weft.benchmarks.workloads import (
    PATTERNS,
    SloraSettings,
    assign_adapters,
    gamma_arrivals,
    punica_lengths,
    slora_trace,
)
from weft.errors import ConfigError

_SHOWN_ERRORS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    return exit_status("load", lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Carry out and show; returns the exit status.

    Raises:
        ConfigError: The options contradict each other.
        WeftError: The result cannot be written.
    """
    result = asyncio.run(measure(options))
    if options.json:
        write_result(options.json, result)
    print_result(result)
    return 1 if result["summary"]["errors"] else 0


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Carry out the load that the options describe.

    Raises:
        ConfigError: The options contradict each other.
    """
    plan = make_plan(options)
    settings = make_settings(options)
    objective = Objective(ttft_s=options.slo_ttft_ms / 1e3, tpot_s=options.slo_tpot_ms / 1e3)
    headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
    async with EventClient(options.url, headers) as client:
        if options.warmup:
            await run_load(client, _warm_up(plan, options.warmup), settings)
        records = await run_load(client, plan, settings)
    return {
        "benchmark": "load",
        **without_key(provenance(), options.key),
        "options": shown_options(options),
        "adapters": dict(Counter(request.model for request in plan).most_common()),
        "errors": _count_errors(records),
        "summary": summarise(records, objective),
    }


def make_plan(options: argparse.Namespace) -> list[PlannedRequest]:
    """Which requests are sent, in order of arrival."""
    models = [name for name in options.models.split(",") if name]
    if not models:
        raise ConfigError("--models names no model", param="models")
    if options.workload == "slora":
        return _slora_plan(options, models)
    adapters = assign_adapters(options.popularity, options.requests, len(models), options.seed)
    if options.workload == "punica":
        lengths = punica_lengths(options.requests, options.max_tokens)
    else:
        lengths = _fixed_lengths(options)
    arrivals = gamma_arrivals(options.requests, options.rate, options.cv, options.seed) if options.rate else None
    return [
        PlannedRequest(models[adapter], *lengths[i], arrival_s=arrivals[i] if arrivals else 0.0)
        for i, adapter in enumerate(adapters)
    ]


def make_settings(options: argparse.Namespace) -> LoadSettings:
    """How the requests are sent."""
    is_open = bool(options.rate) or options.workload == "slora"
    return LoadSettings(
        api=options.api,
        prompt="words" if options.api == "chat" else options.prompt,
        vocab_size=options.vocab_size,
        ignore_eos=options.ignore_eos,
        concurrency=None if is_open else options.concurrency,
        timeout_s=options.timeout_s,
        seed=options.seed,
    )


def print_result(result: dict[str, Any]) -> None:
    """A table for people, then one JSON line for machines."""
    console = Console()
    summary = result["summary"]
    table = Table(title=f"{summary['requests']} requests, {summary['errors']} errors", title_justify="left")
    for column in ("", "mean", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="left" if not column else "right")
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "latency_ms"):
        table.add_row(name.replace("_", " "), *(_figure(value) for value in summary[name].values()))
    console.print(table)
    rates = (
        f"output {_figure(summary['output_tokens_per_s'])} tok/s, "
        f"total {_figure(summary['total_tokens_per_s'])} tok/s, "
        f"{_figure(summary['requests_per_s'])} req/s, "
        f"goodput {_figure(summary['goodput_requests_per_s'])} req/s "
        f"({summary['within_objective']:.0%} within the objective)"
    )
    console.print(rates, soft_wrap=True, highlight=False)
    for error, count in list(result["errors"].items())[:_SHOWN_ERRORS]:
        console.print(f"{count} x {error}", style="red", soft_wrap=True, markup=False)
    print(json.dumps(without_nan(result)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -P -m weft.benchmarks.load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", required=True, help="base URL with /v1")
    add("--key", default="", help="API key")
    add("--models", required=True, help="comma-separated names; the first is the most popular")
    add_load_options(parser)
    add_single_run_options(parser)
    return parser


def add_single_run_options(parser: argparse.ArgumentParser) -> None:
    """Add what says what is done beside the load, and made of it."""
    add = parser.add_argument
    add("--slo-ttft-ms", type=float, default=math.inf)
    add("--slo-tpot-ms", type=float, default=math.inf)
    add("--warmup", type=int, default=0, help="requests sent before, not measured")


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add what says which requests are sent, and how."""
    add = parser.add_argument
    add("--api", choices=("completions", "chat"), default="completions")
    add("--requests", type=positive, default=64)
    add("--concurrency", type=positive, default=32, help="requests in flight (closed loop)")
    add("--rate", type=_rate, default=None, help="requests per second (open loop)")
    add("--cv", type=float, default=1.0, help="variation of the gaps in an open loop; 1 Poisson, 0 even")
    add("--workload", choices=("fixed", "punica", "slora"), default="fixed")
    add("--popularity", default="uniform", help=", ".join(PATTERNS))
    add("--input-tokens", default="64", help="prompt tokens: a number or low:high")
    add("--output-tokens", default="64", help="output tokens: a number or low:high")
    add("--max-tokens", type=positive, default=2048, help="longest prompt plus output of the punica workload")
    add("--alpha", type=float, default=1.0, help="popularity of the slora workload; 1 uniform, smaller more skewed")
    add("--duration", type=float, default=60.0, help="seconds of the slora workload")
    add("--prompt", choices=("ids", "words"), default="ids", help="prompt as token ids or as text")
    add("--vocab-size", type=positive, default=512, help="prompt ids are drawn below this")
    add("--no-ignore-eos", dest="ignore_eos", action="store_false", help="for servers without ignore_eos")
    add("--timeout-s", type=float, default=600.0)
    add("--seed", type=int, default=0)
    add("--json", type=Path, default=None, help="write the result here")


def _rate(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def _slora_plan(options: argparse.Namespace, models: list[str]) -> list[PlannedRequest]:
    if not options.rate:
        raise ConfigError("--workload slora needs --rate", param="rate")
    settings = SloraSettings(
        num_adapters=len(models),
        alpha=options.alpha,
        rate=options.rate,
        cv=options.cv,
        duration_s=options.duration,
        input_range=_range(options.input_tokens, "input-tokens"),
        output_range=_range(options.output_tokens, "output-tokens"),
        seed=options.seed,
    )
    trace = slora_trace(settings)
    if not trace:
        raise ConfigError("--rate times --duration gives no request", param="duration")
    return [
        PlannedRequest(models[item.adapter], item.prompt_tokens, item.output_tokens, item.arrival_s) for item in trace
    ]


def _fixed_lengths(options: argparse.Namespace) -> list[tuple[int, int]]:
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


def _count_errors(records: Sequence[RequestRecord]) -> dict[str, int]:
    return dict(Counter(record.error for record in records if record.error).most_common())


def _figure(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:,.1f}"


if __name__ == "__main__":
    sys.exit(main())
