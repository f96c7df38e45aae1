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

import argparse
import re
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import get_args

import torch

from manylora.benchmarks.gpu import agree, commands, first, kernels, memory, serve, step
from manylora.benchmarks.gpu.case_log import CaseLog, Cases
from manylora.benchmarks.gpu.setup import Setup, describe_device, release
from manylora.benchmarks.report import AddOption, add_positive, provenance
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
    "serve": serve.cases,
}
FIRST = "first"
"""The verb that runs pieces of the others."""
PROGRAMS = ("check", "sanitize")
"""Verbs that compute nothing in this process: its memory on the device is theirs."""


def run(options: argparse.Namespace) -> int:
    """Run a verb; returns the exit status.

    Raises:
        ConfigError: There is no CUDA device, or the verb needs one.
    """
    if options.cpu and options.verb != "kernels":
        raise ConfigError(
            "--cpu is for kernels alone. The other verbs take a GPU, or toy sizes with --tiny."
        )
    if not (options.tiny or options.cpu or torch.cuda.is_available()):
        raise ConfigError(
            f"torch {torch.__version__} sees no CUDA device. Run it where there is one, or try the verbs out on a CPU "
            "with --tiny."
        )
    options.out.mkdir(parents=True, exist_ok=True)
    if options.verb == FIRST:
        return run_first(options)
    setup = Setup(
        device=torch.device("cpu" if options.tiny or options.cpu else "cuda"),
        out=options.out.resolve(),
        is_tiny=options.tiny,
        is_eager=options.eager,
        kv_dtype=options.kv_dtype,
        jobs=options.jobs,
        seconds=options.seconds,
    )
    about = {"verb": options.verb, **provenance(), **describe_device(setup.device)}
    about["commit"] = options.commit or about["commit"]
    if options.verb not in PROGRAMS:
        about["machine"] = asdict(setup.machine)
    ways = {"eager": options.eager, "cpu": options.cpu, "int8": options.kv_dtype == "int8"}
    name = "-".join([options.verb, *(way for way, is_taken in ways.items() if is_taken)])
    log = CaseLog(setup.out / f"{name}.json", about)
    cases = {
        name: case
        for name, case in VERBS[options.verb](setup).items()
        if re.search(options.only, name)
    }
    with setup.stack:
        return log.run(cases, options.seconds, partial(release, setup.device))


def run_first(options: argparse.Namespace) -> int:
    """Run pieces of the verbs, each in a process of its own; returns the exit status."""
    device = torch.device("cpu" if options.tiny else "cuda")
    setup = Setup(device=device, out=options.out.resolve(), is_tiny=options.tiny)
    handed_on = [
        "--jobs",
        str(options.jobs),
        *(["--commit", options.commit] if options.commit else []),
    ]
    return first.FirstLook(
        out=setup.out,
        options=[*handed_on, *(["--tiny"] if options.tiny else [])],
        cases={verb: list(make(setup)) for verb, make in VERBS.items()},
        expected_s=lambda piece: setup.sized(piece.seconds, first.TINY_S),
        seconds=options.seconds,
        pieces=first.PIECES,
    ).run()


def add_options(add: AddOption) -> None:
    """Add its options."""
    add("verb", choices=[FIRST, *VERBS])
    out = environment().get("OUT")
    add(
        "--out",
        type=Path,
        default=out,
        required=not out,
        help="folder of the results, which are kept; else $OUT",
    )
    add(
        "--seconds",
        type=float,
        default=540.0,
        help="stop before a case that would not end within these seconds",
    )
    add_positive(add, jobs=(1, "processes for tests"))
    add("--only", default="", help="a pattern: run only cases whose names have it")
    add("--eager", action="store_true", help="launch each kernel of a decode step: no CUDA graphs")
    add(
        "--kv-dtype",
        choices=get_args(KvDtype),
        default="auto",
        help="of the keys and values of operations",
    )
    add(
        "--cpu",
        action="store_true",
        help="with kernels: time them on this CPU, in the shape of Qwen2.5-0.5B",
    )
    add("--commit", default="", help="the commit, where this is not a checkout")
    add("--tiny", action="store_true", help="toy sizes on a CPU, to try the verbs out")
