"""How fast does Weft answer over HTTP? Starts a server, uploads adapters, sends a load and ends the server.

    weft bench serve [--model M] [--adapter DIR ...] [--concurrency 32] [--json result.json]
    weft bench serve --url http://127.0.0.1:8000/v1 --key KEY --models base,pirate   (a server that runs already)

Without --model it serves the 0.5B shape with random weights and 8 adapters of ranks 8 to 64. Closed loop by default
(--concurrency requests in flight); --rate makes it an open loop. Prints a table and, last, one JSON line. Exit status 1
if any request failed or was answered wrongly, 2 if the arguments make no sense.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from weft.benchmarks.http import load
from weft.benchmarks.http.own_server import READY_WITHIN_S, Served, own_server, server_names
from weft.benchmarks.qwen_shape import VOCAB_SIZE, make_checkpoints
from weft.benchmarks.report import DEFAULT_CACHE
from weft.errors import ConfigError


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The load, sent to the server that the options describe."""
    with target(options) as served:
        return uvloop.run(load.measure(options, served))


@contextlib.contextmanager
def target(options: argparse.Namespace) -> Iterator[Served]:
    """Have a server; the options' `models` are then the names that it has.

    Raises:
        ConfigError: The options contradict each other.
        WeftError: The server does not start.
    """
    if options.url is not None:
        if not options.models:
            raise ConfigError("--url needs --models: the names to ask for", param="models")
        if options.model or options.adapter or options.set:
            raise ConfigError("--url takes a server as it is: leave out --model, --adapter and --set", param="url")
        yield Served(options.url, options.key, [name for name in options.models.split(",") if name])
        return
    if options.models or options.key:
        raise ConfigError("--models and --key are for a server that runs already: give its --url", param="models")
    model, adapters = options.model, options.adapter
    if model is None:
        if adapters:
            raise ConfigError("--adapter needs --model: the base of the adapters", param="model")
        model, adapters = make_checkpoints(options.cache)
        options.vocab_size = VOCAB_SIZE
    names = server_names(adapters)
    load.make_plan(argparse.Namespace(**{**vars(options), "models": ",".join(names)}))  # refuses before a server starts
    with own_server(str(model), adapters, options.set, options.ready_within_s) as served:
        options.models = ",".join(served.models)
        yield served


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add what says which server is asked."""
    add = parser.add_argument
    add("--model", default=None, help="folder or hub id of the base to serve")
    add("--adapter", type=Path, action="append", default=[], help="folder of an adapter to upload; may be repeated")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="setting of the server; may be repeated")
    add("--ready-within-s", type=float, default=READY_WITHIN_S, help="how long the server may take to start")
    add("--cache", type=Path, default=DEFAULT_CACHE, help="folder of the generated checkpoints")
    add("--url", default=None, help="base URL with /v1 of a server that runs already")
    add("--key", default="", help="its API key")
    add("--models", default="", help="names to ask for there, comma-separated; the first is the most popular")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add its options."""
    add_server_options(parser)
    load.add_load_options(parser)
    add = parser.add_argument
    add("--slo-ttft-ms", type=float, default=math.inf)
    add("--slo-tpot-ms", type=float, default=math.inf)
    add("--warmup", type=int, default=0, help="requests sent before, not measured")
