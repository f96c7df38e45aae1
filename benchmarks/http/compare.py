"""Manylora beside another OpenAI-compatible server under the same load, in turns on the same machine.

    manylora bench compare --peer http://127.0.0.1:8001/v1 --peer-models base,l0,l1 [--peer-name vLLM] [serve options]

Manylora is started as `manylora bench serve` does, or taken as it runs (--url). Each round sends the same requests to
one server and then to the other, the order changing from round to round, after one round that is not counted; ratios
are taken within a round. Prints a table and, last, one JSON line. Exit status 1 if any request failed, 2 if the
arguments make no sense.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from manylora.benchmarks.http.generator import Load, Target
from manylora.benchmarks.http.serve import SERVER, chosen_load
from manylora.benchmarks.metrics import summarise
from manylora.benchmarks.report import (
    Figures,
    Options,
    make_row,
    ratios,
    spreads,
    take_turns,
)
from manylora.errors import ConfigError, ManyloraError

COMPARED = {
    "output tokens/s": "output_tokens_per_s",
    "TTFT p50 ms": "ttft_ms.p50",
    "TPOT p50 ms": "tpot_ms.p50",
}
"""Figures of a run."""


def measure(options: Namespace) -> Figures:
    """Send the load to both in turns.

    Raises:
        ConfigError: The options contradict each other.
        ManyloraError: A request of the round that is not counted failed.
    """
    with chosen_load(options) as ours:
        loads = {"Manylora": ours, options.peer_name: for_peer(options, ours)}

        def run(name: str, round_: int) -> Figures:
            # Other prompts in each round: a repeated one measures prefix caches.
            replies = replace(loads[name], seed=options.seed + round_).run()
            failed = next((reply.error for reply in replies if reply.error), None)
            if not round_ and failed:
                raise ManyloraError(f"{name} does not answer as asked: {failed}")
            return summarise(replies)

        return make_result(take_turns(loads, options.repeats, run))


def for_peer(options: Namespace, ours: Load) -> Load:
    """Make the load of the peer from that of Manylora.

    Raises:
        ConfigError: Its models are not as many as Manylora's, or both have one name.
    """
    theirs = [name for name in options.peer_models.split(",") if name]
    if len(ours.targets) != len(theirs):
        names = ", ".join(target.model for target in ours.targets)
        raise ConfigError(
            f"--peer-models names {len(theirs)} models, Manylora has {len(ours.targets)} ({names}): name as many, in "
            "the same order",
            param="peer_models",
        )
    if options.peer_name == "Manylora":
        raise ConfigError("--peer-name must not be Manylora", param="peer_name")
    peer = Target(options.peer, options.peer_key, "", ours.targets[0].vocab_size)
    return replace(ours, targets=[replace(peer, model=name) for name in theirs])


def make_result(runs: dict[str, list[Figures]]) -> Figures:
    """Spreads of each, and ratios of Manylora over the peer within rounds."""
    figures = spreads(
        {name: [make_row(run, COMPARED) for run in each] for name, each in runs.items()}
    )
    ours, theirs = figures.values()
    errors = {name: sum(run["errors"] for run in each) for name, each in runs.items()}
    return {
        "figures": figures,
        "ratios": {
            figure: ratios(ours[figure]["repeats"], theirs[figure]["repeats"]) for figure in ours
        },
        "errors": errors,
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


OPTIONS: Options = {
    "peer": (..., "base URL with /v1 of the other server"),
    "peer_models": (..., "its names for the same models, comma-separated, the base first"),
    "peer_key": ("", "its API key"),
    "peer_name": ("peer", "what to call it"),
    "peer_about": ("", "its version and how it was started, for the result"),
    "repeats": (3, "rounds that count"),
    **SERVER,
}
