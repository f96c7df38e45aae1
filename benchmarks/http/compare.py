"""Manylora beside another OpenAI-compatible server under the same load, in turns on the same machine.

    manylora bench compare --peer http://127.0.0.1:8001/v1 --peer-models base,l0,l1 [--peer-name vLLM] [serve options]

Manylora is started as `manylora bench serve` does, or taken as it runs (--url). Each round sends the same requests to
one server and then to the other, the order changing from round to round, after one round that is not counted; ratios
are taken within a round. Prints a table and, last, one JSON line. Exit status 1 if any request failed, 2 if the
arguments make no sense.
"""

from __future__ import annotations

import argparse
from typing import Any

import uvloop

from manylora.benchmarks.http.generator import Target
from manylora.benchmarks.http.serve import add_server_options, chosen_targets, make_load
from manylora.benchmarks.metrics import summarise
from manylora.benchmarks.report import AddOption, add_positive, ratios, spreads, take_turns
from manylora.errors import ConfigError, ManyloraError


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Send the load to both in turns.

    Raises:
        ConfigError: The options contradict each other.
        ManyloraError: A request of the round that is not counted failed.
    """
    with chosen_targets(options) as targets:
        contenders = make_contenders(options, targets)
        load = make_load(options, len(targets))

        def run(name: str, round_: int) -> dict[str, Any]:
            # Other prompts in each round: a repeated one measures prefix caches.
            replies = uvloop.run(load.send(contenders[name], options.seed + round_))
            failed = next((reply.error for reply in replies if reply.error), None)
            if not round_ and failed:
                raise ManyloraError(f"{name} does not answer as asked: {failed}")
            return summarise(replies)

        return make_result(take_turns(contenders, options.repeats, run))


def make_contenders(options: argparse.Namespace, ours: list[Target]) -> dict[str, list[Target]]:
    """Name the targets of Manylora and of its peer.

    Raises:
        ConfigError: Their models are not equally many, or both have one name.
    """
    theirs = [
        Target(options.peer, options.peer_key, name)
        for name in options.peer_models.split(",")
        if name
    ]
    if len(ours) != len(theirs):
        names = ", ".join(target.model for target in ours)
        raise ConfigError(
            f"--peer-models names {len(theirs)} models, Manylora has {len(ours)} ({names}): name as many, in the same "
            "order",
            param="peer_models",
        )
    if options.peer_name == "Manylora":
        raise ConfigError("--peer-name must not be Manylora", param="peer_name")
    return {"Manylora": ours, options.peer_name: theirs}


def make_result(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Spreads of each, and ratios of Manylora over the peer within rounds."""
    figures = spreads({name: [_compared(run) for run in each] for name, each in runs.items()})
    ours, theirs = figures.values()
    errors = {name: sum(run["errors"] for run in each) for name, each in runs.items()}
    return {
        "figures": figures,
        "ratios": {
            figure: ratios(ours[figure]["repeats"], theirs[figure]["repeats"]) for figure in ours
        },
        "errors": {name: {"errors": count} for name, count in errors.items()},
        "table": [
            {"": figure, **{name: each[figure]["median"] for name, each in figures.items()}}
            for figure in ours
        ],
        "failures": [
            f"{name}: {count} requests failed or were answered wrongly"
            for name, count in errors.items()
            if count
        ],
    }


def _compared(summary: dict[str, Any]) -> dict[str, float]:
    """Pick what is compared from a summary of a run."""
    return {
        "output tokens/s": summary["output_tokens_per_s"],
        "TTFT p50 ms": summary["ttft_ms"]["p50"],
        "TPOT p50 ms": summary["tpot_ms"]["p50"],
    }


def add_options(add: AddOption) -> None:
    """Add its options."""
    add("--peer", required=True, help="base URL with /v1 of the other server")
    add(
        "--peer-models",
        required=True,
        help="its names for the same models, comma-separated, the base first",
    )
    add("--peer-key", default="", help="its API key")
    add("--peer-name", default="peer", help="what to call it")
    add("--peer-about", default="", help="its version and how it was started, for the result")
    add_positive(add, repeats=(3, "rounds that count"))
    add_server_options(add)
