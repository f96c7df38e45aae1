"""The operations of a step on the device, as CUDA graphs replay them, beside their floors; and their best constants.

Each call of an operation takes another layer's weights and pages. `plans.json` in the folder of the results gets the
constants of the launchers that were faster than those they take by themselves (`manylora.kernels.triton.plans`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from functools import partial

import torch

from manylora.benchmarks.engine.kernels import (
    SAMPLINGS,
    KernelBench,
    Work,
    call_s,
    relative_error,
)
from manylora.benchmarks.gpu.case_log import Cases
from manylora.benchmarks.gpu.floors import GOAL_LORA, GOAL_MIXED, GOAL_SINGLE_S
from manylora.benchmarks.gpu.setup import MAX_TOKENS, Setup
from manylora.benchmarks.report import Figures
from manylora.errors import EngineError
from manylora.kernels.triton import plans

MANY_RANKS = 512
"""Adapters whose ranks add up to this have a goal (K1)."""
LEAST_GAIN = 0.98
"""Constants are taken if a call with them takes less than this share of the time of the best before."""
CLOSE = 2**-7
"""Largest relative error of results with other constants."""
PROMPTS = ((512, 0), (2048, 0), (512, 16_384))
"""Tokens of a prompt, and how many of it were computed before."""
Make = Callable[..., list[Work]]
"""A method of `KernelBench` that makes an operation, or several that belong together."""


def cases(setup: Setup) -> Cases:
    """Attention, sampling and small operations, LoRA, then the search for constants."""
    long = setup.sized(1024, 64)
    found = dict[str, Callable[[], Figures]]()

    def add(name: str, make: Make, *arguments: object) -> None:
        found[name] = partial(_operation, setup, make, *arguments)

    for context, rows in itertools.product((long, 4 * long, 16 * long), (32, 1, 8, 64)):
        if rows * context <= MAX_TOKENS:
            name = f"attention, {rows} rows, context {context:,}"
            add(name, KernelBench.attention, rows, context)
    for tokens, before in PROMPTS[: setup.sized(3, 1)]:
        name = f"attention, prompt of {tokens} after {before:,}"
        add(name, KernelBench.attention, 1, tokens + before, tokens)
    for about in SAMPLINGS:
        add(f"{about} sampling, 32 rows", KernelBench.sampling, 32, about, setup.vocab_size)
    add("norm and SiLU, 32 rows", KernelBench.small, 32)
    for count, rank in itertools.product((32, 1, 8), (16, 8, 64)):
        found[f"LoRA, 32 rows, {count} of rank {rank}"] = partial(_lora, setup, (rank,) * count)
    found["LoRA, mixed ranks as one rank"] = partial(_mixed, setup)
    for name, make, arguments in (
        ("decode attention", KernelBench.attention, (32, long)),
        ("prompt attention", KernelBench.attention, (1, 2 * long, 2 * long)),
        ("LoRA", KernelBench.lora, ((16,) * 32, 32)),
    ):
        found[f"constants of {name}"] = partial(_sweep, setup, make, *arguments)
    return found


def _operation(setup: Setup, make: Make, *arguments: object) -> Figures:
    return timed(setup, make(setup.bench, *arguments))


def timed(setup: Setup, works: Sequence[Work]) -> Figures:
    """Microseconds of operations beside their floors, all together and each."""
    parts: list[Figures] = [
        {
            "name": work.name,
            "measured": 1e6 * call_s(work.run, setup.device),
            "floor": 1e6 * setup.machine.floor_s(work),
        }
        for work in works
    ]
    sums = {key: sum(part[key] for part in parts) for key in ("measured", "floor")}
    return {**sums, "unit": "us", "parts": parts}


def _lora(setup: Setup, ranks: tuple[int, ...]) -> Figures:
    """LoRA of 32 rows at the four sites of a layer. Each must give the same bits twice (K3) and reach its goal (K1)."""
    works = setup.bench.lora(ranks, 32)
    found = timed(setup, works)
    is_ok = all(torch.equal(result(work), result(work)) for work in works)
    if setup.has_goals and (len(ranks) == 1 or sum(ranks) >= MANY_RANKS):
        goals = [
            1e6 * GOAL_SINGLE_S if len(ranks) == 1 else GOAL_LORA * part["floor"]
            for part in found["parts"]
        ]
        is_ok &= all(
            part["measured"] <= goal for part, goal in zip(found["parts"], goals, strict=True)
        )
        found["goal"] = sum(goals)
    return {**found, "ok": is_ok}


def _mixed(setup: Setup) -> Figures:
    """K2: mixed ranks beside one rank with equally many bytes."""
    even, mixed = (
        timed(setup, setup.bench.lora(ranks, 32)) for ranks in ((24,) * 10, (8, 16, 32, 64) * 2)
    )
    goal = {"goal": GOAL_MIXED * even["measured"]} if setup.has_goals else {}
    return {**mixed, "even": even["measured"], **goal}


@torch.inference_mode()
def result(work: Work) -> torch.Tensor:
    """The result of an operation, one tensor behind the other, or what it adds to zeros."""
    if work.out is None:
        found = work.run(0)
        return torch.cat(
            [
                torch.as_tensor(part).flatten()
                for part in (found if isinstance(found, tuple) else [found])
            ]
        )
    work.out.zero_()
    work.run(0)
    return work.out.clone()


def _sweep(setup: Setup, make: Make, *arguments: object) -> Figures:
    """Choose the constants of an operation's kernels one after the other: those that its launchers ask `plan` for.

    `tried` has the microseconds with each choice, or why it cannot be taken.
    """
    works = make(setup.bench, *arguments)
    plans.asked.clear()
    expected = [result(work) for work in works]

    def seconds() -> float:
        for work, want in zip(works, expected, strict=True):
            if not relative_error(result(work), want) <= CLOSE:
                raise EngineError("the result differs")
        return sum(call_s(work.run, setup.device) for work in works)

    before_s = seconds()
    chosen = dict[str, dict[str, int]]()
    tried = dict[str, float | str]()
    for kernel, first in list(plans.asked.items()):
        best = first
        best_s = before_s
        for name, value in first.items():
            powers = [max(1, value // 4), max(1, value // 2), 2 * value, 4 * value]
            for other in range(1, 6) if name == "num_stages" else powers:
                choice = {**best, name: other}
                try:
                    with plans.trying(kernel, **choice):
                        found_s = seconds()
                except Exception as error:  # noqa: BLE001 - too much shared memory, for one
                    tried[f"{kernel} {choice}"] = f"{type(error).__name__}: {error}"[:200]
                    continue
                tried[f"{kernel} {choice}"] = 1e6 * found_s
                if found_s < LEAST_GAIN * best_s:
                    best = choice
                    best_s = found_s
        if best != first:
            chosen[kernel] = best
    path = setup.out / "plans.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept.setdefault(plans.architecture(), {}).update(chosen)
    path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    note = f"{len(plans.asked)} kernels, better: {chosen}"
    return {
        "measured": 1e6 * before_s,
        "unit": "us",
        "note": note,
        "chosen": chosen,
        "tried": tried,
    }
