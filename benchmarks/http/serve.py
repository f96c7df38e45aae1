"""Speed of Manylora's answers over HTTP. Starts a server, uploads adapters, sends a load and ends the server.

    manylora bench serve [--model M] [--adapter DIR ...] [--concurrency 32] [--json result.json]
    manylora bench serve --url http://127.0.0.1:8000/v1 --key KEY --models base,pirate   (a server that runs already)

Without --model it serves the 0.5B shape with random weights and 8 adapters of ranks 8 to 64. Closed loop by default
(--concurrency requests in flight); --rate makes it an open loop. Prints a table and, last, one JSON line. Exit status 1
if any request failed or was answered wrongly, 2 if the arguments make no sense.
"""

from __future__ import annotations

import contextlib
import sys
from argparse import ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from manylora.benchmarks.http.generator import Load, Target
from manylora.benchmarks.http.own_server import own_server
from manylora.benchmarks.metrics import summarise
from manylora.benchmarks.qwen_shape import make_checkpoints
from manylora.benchmarks.report import SETTINGS, Figures, Options
from manylora.benchmarks.workloads import PATTERNS, draw_adapters, poisson_arrivals
from manylora.errors import ConfigError

RATES = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s")
_SHOWN_ERRORS = 5


def measure(options: Namespace) -> Figures:
    """Send the load to the server that the options describe.

    Raises:
        ConfigError: The options contradict each other.
        ManyloraError: The server does not start.
    """
    with chosen_load(options) as load:
        warm_up(load, options.warmup)
        replies = load.run()
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


def warm_up(load: Load, count: int) -> None:
    """Send this number of requests with other prompts than the load's, at least one for each target; 0 sends none."""
    if count:
        count = max(count, len(load.targets))
        seed = load.seed + 1000
        replace(load, count=count, popularity=None, arrivals_s=None, seed=seed).run()


@contextlib.contextmanager
def chosen_load(options: Namespace) -> Iterator[Load]:
    """Have a server with models, and the load for it; the options' `models` are then the names that it has.

    Raises:
        ConfigError: The options contradict each other.
        ManyloraError: The server does not start.
    """
    models = [name for name in options.models.split(",") if name]
    if options.url is not None:
        if not models:
            raise ConfigError("--url needs --models: the names to ask for", param="models")
        if options.model or options.adapter or options.set:
            raise ConfigError(
                "--url takes a server as it is: leave out --model, --adapter and --set", param="url"
            )
        yield make_load(
            options,
            [Target(options.url, options.key, model, options.vocab_size) for model in models],
        )
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
        model, adapters = make_checkpoints()
    make_load(options, [Target("", "", "")])
    with own_server(str(model), adapters, options.set) as targets:
        options.models = ",".join(target.model for target in targets)
        yield make_load(options, targets)


def make_load(options: Namespace, targets: list[Target]) -> Load:
    """Make the load that the options describe.

    Raises:
        ConfigError: The options contradict each other.
    """
    rate = options.rate
    draw_adapters(options.popularity, 1, 0)  # refuses a pattern that there is not
    return Load(
        targets=targets,
        at_once=options.concurrency,
        prompt_tokens=_lengths(options, "input_tokens"),
        output_tokens=_lengths(options, "output_tokens"),
        popularity=options.popularity,
        count=options.requests,
        arrivals_s=poisson_arrivals(options.requests, rate, options.seed) if rate else None,
        seed=options.seed,
    )


def _lengths(options: Namespace, option: str) -> range:
    """Read lengths: `64` is 64, `8:512` is from 8 to 511."""
    text = getattr(options, option)
    low, _, high = text.partition(":")
    with contextlib.suppress(ValueError):
        lengths = range(int(low), int(high) if high else int(low) + 1)
        if lengths and lengths[0] >= 1:
            return lengths
    name = option.replace("_", "-")
    raise ConfigError(
        f"--{name} must be a number or low:high with 1 <= low < high, got {text!r}", param=name
    )


def _rate(text: str) -> float:
    if not (value := float(text)) > 0:
        raise ArgumentTypeError(f"must be above 0, got {text}")
    return value


SERVER: Options = {
    "model": (None, "folder or hub id of the base to serve"),
    "adapter": ([], "folder of an adapter to upload; may be repeated", Path),
    **SETTINGS,
    "url": (None, "base URL with /v1 of a server that runs already"),
    "key": ("", "its API key"),
    "models": ("", "names to ask for there, comma-separated; the first is the most popular"),
    "vocab_size": (512, "prompt ids are drawn below this there"),
    "requests": (64, ""),
    "concurrency": (32, "requests in flight (closed loop)"),
    "rate": (None, "requests per second (open loop)", _rate),
    "popularity": ("uniform", PATTERNS),
    "input_tokens": ("64", "prompt tokens: a number or low:high"),
    "output_tokens": ("64", "output tokens: a number or low:high"),
    "seed": (0, "", int),
}
"""Options that say which server is asked, and for what."""
OPTIONS: Options = {**SERVER, "warmup": (0, "requests sent before, not measured", int)}
