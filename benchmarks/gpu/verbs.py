"""Ask a GPU one thing after another, within the time that there is.

    scripts/gpu VERB --out DIR [--jobs N] [--seconds S] [--eager]

    first      the most that a quarter of an hour can tell: pieces of the others, by their worth
    agree      are results those of torch operators, and answers those of the demo? (no packages for tests)
    check      do the tests pass on it, the demo's recorded answers among them?
    sanitize   do kernels read or write outside of their tensors, or race? (compute-sanitizer)
    kernels    how near is each operation to its floor, and which launch constants are best?
    step       how long is a step of the 8B shape with up to 64 adapters?
    profile    where does its time go? (a trace of torch's profiler)
    memory     what do page copies and scattered pages cost?
    serve      do steps stall while adapters of mixed rank come and go?

Each case prints a line and is in DIR/VERB.json at once. A verb stops before the case that would not end within
--seconds, with exit status 3; run again, it goes on where it stopped. A case that fails is kept with its error and does
not stop the others; then, and where a goal is missed, the exit status is 1. With --eager, decode steps are not replayed
as CUDA graphs, and the file is DIR/VERB-eager.json. --tiny runs toy sizes on a CPU, to try the verbs out. With --cpu,
`kernels` times the operations of a CPU in the shape of Qwen2.5-0.5B, into DIR/kernels-cpu.json, without goals.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import get_args

import torch

from manylora.benchmarks.gpu import agree, commands, first, kernels, memory, step
from manylora.benchmarks.gpu.case_log import Cases, run_cases
from manylora.benchmarks.gpu.setup import Setup, describe_device, release
from manylora.benchmarks.report import Options, make_parser, provenance
from manylora.config import KvDtype, environment
from manylora.errors import ConfigError

VERBS: dict[str, Callable[[Setup], Cases]] = {
    "agree": agree.cases,
    "check": commands.check_cases,
    "sanitize": commands.sanitize_cases,
    "kernels": kernels.cases,
    "step": step.cases,
    "profile": step.trace_cases,
    "memory": memory.cases,
    "serve": step.swap_cases,
}
FIRST = "first"
"""The verb that runs pieces of the others."""
PROGRAMS = ("check", "sanitize")
"""Verbs that compute nothing in this process: its memory on the device is theirs."""
OPTIONS: Options = {
    "seconds": (540.0, "stop before a case that would not end within these seconds"),
    "jobs": (1, "processes for tests"),
    "only": ("", "a pattern: run only cases whose names have it"),
    "eager": (False, "launch each kernel of a decode step: no CUDA graphs"),
    "kv_dtype": ("auto", "of the keys and values of operations", get_args(KvDtype)),
    "cpu": (False, "with kernels: time them on this CPU, in the shape of Qwen2.5-0.5B"),
    "commit": ("", "the commit, where this is not a checkout"),
    "tiny": (False, "toy sizes on a CPU, to try the verbs out"),
}


def run(arguments: Sequence[str]) -> int:
    """Run a verb; returns the exit status.

    Raises:
        ConfigError: There is no CUDA device, or the verb needs one.
    """
    out = (environment().get("OUT", ...), "folder of the results, which are kept; else $OUT", Path)
    parser = make_parser("manylora bench gpu", __doc__, {"out": out, **OPTIONS})
    parser.add_argument("verb", choices=[FIRST, *VERBS])
    options = parser.parse_args(arguments)
    if options.cpu and options.verb != "kernels":
        raise ConfigError(
            "--cpu is for kernels alone. The other verbs take a GPU, or toy sizes with --tiny."
        )
    is_cpu = options.tiny or options.cpu
    if not is_cpu and not torch.cuda.is_available():
        raise ConfigError(
            f"torch {torch.__version__} sees no CUDA device. Run it where there is one, or try the verbs out on a CPU "
            "with --tiny."
        )
    options.out.mkdir(parents=True, exist_ok=True)
    setup = Setup(
        device=torch.device("cpu" if is_cpu else "cuda"),
        out=options.out.resolve(),
        is_tiny=options.tiny,
        is_eager=options.eager,
        kv_dtype=options.kv_dtype,
        jobs=options.jobs,
        seconds=options.seconds,
    )
    return (run_first if options.verb == FIRST else run_verb)(setup, options)


def run_verb(setup: Setup, options: Namespace) -> int:
    """Run the cases of a verb; returns the exit status."""
    verb = options.verb
    about = {"verb": verb, **provenance(), **describe_device(setup.device)}
    about["commit"] = options.commit or about["commit"]
    if verb not in PROGRAMS:
        about["machine"] = asdict(setup.machine)
    ways = {"eager": options.eager, "cpu": options.cpu, "int8": options.kv_dtype == "int8"}
    name = "-".join([verb, *(way for way, is_taken in ways.items() if is_taken)])
    path = setup.out / f"{name}.json"
    cases = VERBS[verb](setup).items()
    chosen = {name: case for name, case in cases if re.search(options.only, name)}
    with setup.stack:
        return run_cases(path, about, chosen, options.seconds, partial(release, setup.device))


def run_first(setup: Setup, options: Namespace) -> int:
    """Run pieces of the verbs, each in a process of its own; returns the exit status."""
    handed_on = ["--jobs", str(options.jobs), "--commit", options.commit]
    return first.FirstLook(
        out=setup.out,
        options=[*handed_on, *(["--tiny"] if options.tiny else [])],
        cases={verb: list(make(setup)) for verb, make in VERBS.items()},
        seconds=options.seconds,
        pieces=[
            replace(piece, seconds=setup.sized(piece.seconds, first.TINY_S))
            for piece in first.PIECES
        ],
    ).run()
