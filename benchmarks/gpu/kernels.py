"""The operations of a step on the device, as CUDA graphs replay them, beside their floors; and their best constants.

Each call of an operation takes another layer's weights and pages. `plans.json` in the folder of the results gets the
constants of the launchers that were faster than those they take by themselves (`weft.kernels.triton.plans`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from operator import methodcaller
from typing import Any

import torch

from weft.adapters.base_shape import SITES
from weft.benchmarks.engine.kernels import MIXES, KernelBench, Work
from weft.benchmarks.gpu.case_log import Case, Figures
from weft.benchmarks.gpu.floors import GOAL_LORA, GOAL_MIXED, GOAL_SINGLE_S
from weft.benchmarks.gpu.machine import Setup, per_call_s
from weft.kernels.sampling import RowSampling
from weft.kernels.triton.plans import architecture, trying

MAX_TOKENS = 1 << 18
"""Keys and values of so many tokens are the most that decode attention is timed with: 32 GiB of the 8B shape."""
MANY_RANKS = 512
"""Adapters whose ranks add up to this have a goal (K1)."""
LEAST_GAIN = 0.98
"""Constants are taken if a call with them takes less than this share of the time of the best before."""
PROMPTS = ((512, 0), (2048, 0), (512, 16_384))
"""Tokens of a prompt, and how many of it were computed before."""
SAMPLINGS = {
    "greedy": RowSampling(temperature=0.0),
    "top-p": RowSampling(temperature=0.8, top_p=0.9, uniform=0.5),
    "top-k": RowSampling(temperature=0.8, top_k=40, uniform=0.5),
    "top-k and top-p": RowSampling(temperature=0.8, top_k=40, top_p=0.9, uniform=0.5),
}


@lru_cache(maxsize=1)
def bench_of(setup: Setup) -> KernelBench:
    """The operations' data, made when the first case wants it: 34 GiB for the 8B shape."""
    pages = setup.sized(MAX_TOKENS, 4096) // setup.model.geometry().page_tokens + 64
    return KernelBench(setup.model, setup.device, kv_pages=pages)


def cases(setup: Setup) -> list[Case]:
    """Attention, LoRA and sampling in the order of their share of a step, then the search for constants."""
    long = setup.sized(1024, 64)
    decodes = [(rows, long * times) for times in (1, 4, 16) for rows in (32, 1, 8, 64)]
    found = [
        Case(
            f"attention, {rows} rows, context {context:,}",
            partial(_operation, setup, methodcaller("attention", rows, context)),
        )
        for rows, context in decodes
        if rows * context <= MAX_TOKENS
    ]
    for rows, count, rank in [(32, n, r) for n in (32, 1, 8) for r in (16, 8, 64)] + [(1, 1, 16), (64, 1, 16)]:
        ranks = (rank,) * count
        about = f"{rows} rows, {count} of rank {rank}"
        found += [
            Case(f"LoRA {site.name}, {about}", partial(_lora, setup, ranks, rows, index))
            for index, site in enumerate(SITES)
        ]
    found += [
        Case(f"LoRA {site.name}, mixed ranks as one rank", partial(_mixed, setup, index))
        for index, site in enumerate(SITES)
    ]
    operations = {
        f"{about} sampling, 32 rows": methodcaller("sampling", 32, about, row, setup.vocab_size)
        for about, row in SAMPLINGS.items()
    } | {
        f"attention, prompt of {tokens} after {before:,}": methodcaller("attention", 1, tokens + before, tokens)
        for tokens, before in PROMPTS[: setup.sized(3, 1)]
    }
    found += [Case(name, partial(_operation, setup, make)) for name, make in operations.items()]
    found.append(Case("norms, SiLU and rope, 32 rows", partial(_small, setup)))
    return found + [Case(f"constants of {kernel}", partial(_sweep, setup, kernel)) for kernel in sweeps(setup)]


def sweeps(setup: Setup) -> dict[str, dict[str, Sequence[int]]]:
    """Constants to try by kernel, as launchers name them."""
    found: dict[str, dict[str, Sequence[int]]] = {
        "items": {"BLOCK_N": (32, 64, 128), "num_stages": (2, 3, 4, 5), "num_warps": (4, 8)},
        "chunks": {"BLOCK_N": (32, 64, 128), "num_stages": (2, 3, 4, 5), "num_warps": (4, 8)},
    }
    for width in sites_by_width(setup):
        blocks = {"BR": (16, 32, 64), "BK": (64, 128, 256)}
        found[f"shrink {width} 16"] = {"SPLIT_K": (1, 2, 4, 8, 16), "num_stages": (2, 3, 4), **blocks}
    return found


def sites_by_width(setup: Setup) -> dict[int, int]:
    """A site for each number of input features."""
    base = setup.model.base()
    return {base.modules[site.modules[0]].in_features: index for index, site in reversed(list(enumerate(SITES)))}


def _operation(setup: Setup, make: Callable[[KernelBench], Work], _: Mapping[str, Figures]) -> Figures:
    return timed(setup, make(bench_of(setup)))


def _small(setup: Setup, _: Mapping[str, Figures]) -> Figures:
    parts = {work.name: timed(setup, work) for work in bench_of(setup).small(32)}
    return {key: sum(part[key] for part in parts.values()) for key in ("measured", "floor")} | {
        "unit": "us",
        "parts": parts,
    }


def _lora(setup: Setup, ranks: tuple[int, ...], rows: int, site: int, _: Mapping[str, Figures]) -> Figures:
    work = bench_of(setup).lora(ranks, rows)[site]
    found = dict(timed(setup, work))
    if len(ranks) == 1:
        found["goal"] = 1e6 * GOAL_SINGLE_S
    elif sum(ranks) >= MANY_RANKS:
        found["goal"] = GOAL_LORA * found["floor"]
    return found | {"ok": repeats(work)}


def _mixed(setup: Setup, site: int, _: Mapping[str, Figures]) -> Figures:
    """K2: mixed ranks beside one rank with equally many bytes."""
    even, mixed = (
        timed(setup, bench_of(setup).lora(MIXES[mix], 32)[site]) for mix in ("10 of rank 24", "8 of ranks 8 to 64")
    )
    return {**mixed, "even": even["measured"], "goal": GOAL_MIXED * even["measured"]}


def timed(setup: Setup, work: Work) -> dict[str, Any]:
    """Microseconds of a call beside its floor, and what both say of bandwidth."""
    seconds, floor_s = per_call_s(work.run, setup.device), setup.machine.floor_s(work)
    gigabytes_per_s = work.num_bytes / seconds / 1e9
    return {"measured": seconds * 1e6, "floor": floor_s * 1e6, "unit": "us", "gigabytes_per_s": gigabytes_per_s}


def repeats(work: Work) -> bool:
    """Whether a call gives the same bits twice (K3)."""
    if work.out is None:
        raise ValueError(f"work: expected one with a result to look at, got {work.name}")
    results = []
    with torch.inference_mode():
        for _ in range(2):
            work.out.zero_()
            work.run(0)
            results.append(work.out.clone())
    return torch.equal(*results)


def _sweep(setup: Setup, kernel: str, _: Mapping[str, Figures]) -> Figures:
    """Vary one constant after the other, and keep the best value of each; those that do not run are kept as errors."""
    work = work_of(kernel, setup, bench_of(setup))
    before = best_s = per_call_s(work.run, setup.device)
    best, tried = dict[str, int](), dict[str, Any]()
    for name, values in sweeps(setup)[kernel].items():
        for value in values:
            constants = {**best, name: value}
            about = ", ".join(f"{key}={each}" for key, each in constants.items())
            with trying(kernel, **constants) as trial:
                try:
                    seconds = per_call_s(work.run, setup.device)
                except Exception as error:  # noqa: BLE001 - too much shared memory, for one
                    tried[about] = f"{type(error).__name__}: {error}"[:200]
                    continue
            if not trial.was_asked:
                return {"absent": f"no launcher asks for the plan of {kernel}"}
            tried[about] = seconds * 1e6
            if seconds < LEAST_GAIN * best_s:
                best, best_s = constants, seconds
    if best:
        keep_plan(setup, kernel, best)
    return {
        "measured": best_s * 1e6,
        "floor": setup.machine.floor_s(work) * 1e6,
        "unit": "us",
        "before": before * 1e6,
        "best": best,
        "tried": tried,
    }


def work_of(kernel: str, setup: Setup, bench: KernelBench) -> Work:
    """The work that a kernel's constants are chosen by."""
    if kernel == "items":
        return bench.attention(32, setup.sized(1024, 64))
    if kernel == "chunks":
        tokens = setup.sized(2048, 64)
        return bench.attention(1, tokens, tokens)
    return bench.lora((16,) * 32, 32)[sites_by_width(setup)[int(kernel.split()[1])]]


def keep_plan(setup: Setup, kernel: str, constants: Mapping[str, int]) -> None:
    """Add the best constants of a kernel to `plans.json` in the folder of the results."""
    path = setup.out / "plans.json"
    plans = json.loads(path.read_text()) if path.exists() else {}
    plans.setdefault(architecture(), {})[kernel] = dict(constants)
    path.write_text(json.dumps(plans, indent=1, sort_keys=True) + "\n")
