"""Speed of Manylora's answers over HTTP. Starts a server, uploads adapters, sends a load and ends the server.

    manylora bench serve [--model M] [--adapter DIR ...] [--concurrency 32] [--json result.json]
    manylora bench serve --url http://127.0.0.1:8000/v1 --key KEY --models base,pirate   (a server that runs already)

Without --model it serves the 0.5B shape with random weights and 8 adapters of ranks 8 to 64. Closed loop by default
(--concurrency requests in flight); --rate makes it an open loop. Prints a table and, last, one JSON line. Exit status 1
if any request failed or was answered wrongly, 2 if the arguments make no sense.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from manylora.benchmarks.http.generator import Load, Target
from manylora.benchmarks.http.own_server import own_server, server_names
from manylora.benchmarks.metrics import summarise
from manylora.benchmarks.qwen_shape import VOCAB_SIZE, make_checkpoints
from manylora.benchmarks.report import DEFAULT_CACHE, AddOption, add_positive, add_settings_option
from manylora.benchmarks.workloads import PATTERNS, TimedRequest, draw_adapters, poisson_arrivals
from manylora.errors import ConfigError

RATES = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s")
_SHOWN_ERRORS = 5


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Send the load to the server that the options describe.

    Raises:
        ConfigError: The options contradict each other.
        ManyloraError: The server does not start.
    """
    with chosen_targets(options) as targets:
        load = make_load(options, len(targets))
        replies = uvloop.run(load.send(targets, options.seed, options.warmup))
    errors = Counter(reply.error for reply in replies if reply.error).most_common()
    summary = summarise(replies)
    print(", ".join(f"{name} {summary[name]:,.4g}" for name in RATES), file=sys.stderr)
    return {
        "adapters": dict(Counter(reply.model for reply in replies).most_common()),
        "errors": dict(errors),
        "summary": summary,
        "table": [
            {"": name, **summary[name]} for name in ("ttft_ms", "tpot_ms", "itl_ms", "latency_ms")
        ],
        "failures": [f"{count} x {error}" for error, count in errors[:_SHOWN_ERRORS]],
    }


@contextlib.contextmanager
def chosen_targets(options: argparse.Namespace) -> Iterator[list[Target]]:
    """Have a server with models; the options' `models` are then the names that it has.

    Raises:
        ConfigError: The options contradict each other.
        ManyloraError: The server does not start.
    """
    if options.url is not None:
        models = [name for name in options.models.split(",") if name]
        if not models:
            raise ConfigError("--url needs --models: the names to ask for", param="models")
        if options.model or options.adapter or options.set:
            raise ConfigError(
                "--url takes a server as it is: leave out --model, --adapter and --set", param="url"
            )
        yield [Target(options.url, options.key, model) for model in models]
        return
    if options.models or options.key:
        raise ConfigError(
            "--models and --key are for a server that runs already: give its --url", param="models"
        )
    model = options.model
    adapters = options.adapter
    if model is None:
        if adapters:
            raise ConfigError("--adapter needs --model: the base of the adapters", param="model")
        model, adapters = make_checkpoints(options.cache)
        options.vocab_size = VOCAB_SIZE
    make_load(options, len(server_names(adapters)))  # refuses before a server starts
    with own_server(str(model), adapters, options.set) as targets:
        options.models = ",".join(target.model for target in targets)
        yield targets


def make_load(options: argparse.Namespace, num_models: int) -> Load:
    """Draw the load that the options describe.

    Raises:
        ConfigError: The options contradict each other.
    """
    inputs = _range(options.input_tokens, "input-tokens")
    outputs = _range(options.output_tokens, "output-tokens")
    count = options.requests
    rate = options.rate
    seed = options.seed
    adapters = draw_adapters(options.popularity, num_models, seed)
    arrivals = poisson_arrivals(count, rate, seed) if rate else [0.0] * count
    draw = random.Random(seed)
    plan = [
        TimedRequest(arrival_s, adapter, draw.choice(inputs), draw.choice(outputs))
        for arrival_s, adapter in zip(arrivals, adapters, strict=False)
    ]
    return Load(plan, options.vocab_size, None if rate else options.concurrency)


def _range(text: str, option: str) -> range:
    """Read lengths: `64` is 64, `8:512` is from 8 to 511."""
    low, _, high = text.partition(":")
    with contextlib.suppress(ValueError):
        lengths = range(int(low), int(high) if high else int(low) + 1)
        if lengths and lengths[0] >= 1:
            return lengths
    raise ConfigError(
        f"--{option} must be a number or low:high with 1 <= low < high, got {text!r}", param=option
    )


def _rate(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def add_server_options(add: AddOption, requests: int = 64, concurrency: int = 32) -> None:
    """Add what says which server is asked, and for what, with these defaults."""
    add("--model", default=None, help="folder or hub id of the base to serve")
    add(
        "--adapter",
        type=Path,
        action="append",
        default=[],
        help="folder of an adapter to upload; may be repeated",
    )
    add_settings_option(add)
    add("--cache", type=Path, default=DEFAULT_CACHE, help="folder of the generated checkpoints")
    add("--url", default=None, help="base URL with /v1 of a server that runs already")
    add("--key", default="", help="its API key")
    add(
        "--models",
        default="",
        help="names to ask for there, comma-separated; the first is the most popular",
    )
    add_positive(
        add, requests=(requests, ""), concurrency=(concurrency, "requests in flight (closed loop)")
    )
    add("--rate", type=_rate, default=None, help="requests per second (open loop)")
    add("--popularity", default="uniform", help=PATTERNS)
    add("--input-tokens", default="64", help="prompt tokens: a number or low:high")
    add("--output-tokens", default="64", help="output tokens: a number or low:high")
    add_positive(add, vocab_size=(512, "prompt ids are drawn below this"))
    add("--seed", type=int, default=0)


def add_options(add: AddOption) -> None:
    """Add its options."""
    add_server_options(add)
    add("--warmup", type=int, default=0, help="requests sent before, not measured")
