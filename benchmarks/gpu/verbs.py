"""Ask a GPU one thing after another, within the time that there is.

    scripts/gpu VERB --out DIR [--jobs N] [--seconds S]

    check      do the tests pass on it, and are the demo's answers those that are recorded?
    sanitize   do kernels read or write outside of their tensors, or race? (compute-sanitizer)
    kernels    how near is each operation to its floor, and which launch constants are best?
    yardstick  how does attention compare with FlashInfer's, on the same pages?
    step       how long is a step of the 8B shape, eager and captured, with up to 32 adapters?
    profile    where does its time go? (torch's profiler, Nsight Compute)
    memory     what do page copies and scattered pages cost?
    serve      do steps stall while adapters of mixed rank come and go?

Each case prints a line and goes to DIR/VERB.json at once. A verb stops before the case that would not end within
--seconds, with exit status 3; run again, it goes on where it stopped. A case that fails is kept with its error and not
run again without --again; then, and where a goal is missed, the exit status is 1. --device cpu --tiny runs toy sizes on
a CPU, to try the verbs out.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from weft.benchmarks.gpu import commands, kernels, memory, serve, step, yardstick
from weft.benchmarks.gpu.case_log import Case, CaseLog
from weft.benchmarks.gpu.machine import Setup, describe_device, release
from weft.benchmarks.report import AddOption, positive, provenance
from weft.errors import ConfigError

VERBS: dict[str, Callable[[Setup], Sequence[Case]]] = {
    "check": commands.check_cases,
    "sanitize": commands.sanitize_cases,
    "kernels": kernels.cases,
    "yardstick": yardstick.cases,
    "step": step.cases,
    "profile": step.profile_cases,
    "memory": memory.cases,
    "serve": serve.cases,
}
TIMED = ("kernels", "yardstick", "step", "memory")
"""Verbs that compare with what the device can do at best."""


def run(options: argparse.Namespace) -> int:
    """Run a verb; returns the exit status.

    Raises:
        ConfigError: There is no CUDA device, or the folder has a file that is not this verb's.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"torch {torch.__version__} sees no CUDA device. Run it where there is one, or try the verbs out on a CPU "
            "with --device cpu --tiny.",
            param="device",
        )
    if options.device == "cpu" and not options.tiny:
        raise ConfigError("--device cpu needs --tiny: the full sizes take hours on a CPU", param="device")
    options.out.mkdir(parents=True, exist_ok=True)
    setup = Setup(
        device=torch.device(options.device),
        out=options.out.resolve(),
        is_tiny=options.tiny,
        jobs=options.jobs,
        seconds=options.seconds,
    )
    about = {"verb": options.verb, **provenance(), "gpu": describe_device(setup.device)}
    about["commit"] = options.commit or about["commit"]
    if options.verb in TIMED:
        about["gigabytes_per_s"] = setup.machine.bytes_per_s / 1e9
        about["teraflops"] = setup.machine.flops_per_s / 1e12
    path, is_well = setup.out / f"{options.verb}.json", partial(release, setup.device)
    log = CaseLog(path, about, again=options.again, is_well=is_well)
    cases = [case for case in VERBS[options.verb](setup) if re.search(options.only, case.name)]
    return log.run(cases, options.seconds)


def add_options(add: AddOption) -> None:
    """Add its options."""
    add("verb", choices=list(VERBS))
    add("--out", type=Path, required=True, help="folder of the results, which are kept and added to")
    add("--seconds", type=float, default=540.0, help="stop before a case that would not end in so many seconds")
    add("--jobs", type=positive, default=1, help="processes for tests")
    add("--only", default="", help="a pattern: run only cases whose names have it")
    add("--again", action="store_true", help="run cases once more that failed or were absent")
    add("--commit", default="", help="the commit, where this is not a checkout")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="toy sizes, to try the verbs out")
