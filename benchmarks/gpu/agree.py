"""Compares the device with torch operators on a CPU, and with the demo's recorded answers.

Needs no package for tests, and a minute. On toy sizes Triton's kernels run in its interpreter.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from manylora import demo
from manylora.benchmarks.engine.kernels import KernelBench, Work, relative_error
from manylora.benchmarks.gpu.case_log import Cases
from manylora.benchmarks.gpu.kernels import Make, result
from manylora.benchmarks.gpu.setup import Setup
from manylora.benchmarks.report import Figures
from manylora.engine.llm import LLM
from manylora.engine.sampling_params import SamplingParams
from manylora.kernels.dispatch import torch_kernels, triton_kernels

AGREES = 2**-6
"""Largest relative error. Torch operators round the scores of attention to bfloat16; a wrong page is an error of 1."""
LAYERS = 2
"""Layers of the compared operations, so that they must find the right one."""
ROWS = 8
RANKS = (8, 16, 32, 64)
SPREAD = 2.0
"""Scale of queries, keys and values: attention looks at few tokens, as that of a model does."""


def cases(setup: Setup) -> Cases:
    """The demo, then each operation."""
    context = setup.sized(777, 40)
    query = setup.sized(200, 20)
    ranks = RANKS[: setup.sized(4, 2)]
    makes: dict[str, tuple[Any, ...]] = {
        "decode attention": (KernelBench.attention, ROWS, context),
        "prompt attention": (KernelBench.attention, 1, context, query),
        "LoRA": (KernelBench.lora, ranks, ROWS),
        "norm and SiLU": (KernelBench.small, ROWS),
        **{
            f"{about} sampling": (KernelBench.sampling, ROWS, about, setup.vocab_size)
            for about in ("greedy", "top-k and top-p")
        },
    }
    compared = {
        f"{name}, as torch operators": partial(_compare, setup, *make)
        for name, make in makes.items()
    }
    return {"the demo's answers": partial(_demo, setup), **compared}


def _demo(setup: Setup) -> Figures:
    """Wrong answers of base and adapters to all questions of the demo, which are asked at once."""
    asked = [
        (question["prompt_token_ids"], name, answer)
        for question in json.loads(demo.EXPECTED.read_text())["questions"]
        for name, answer in question["answers"].items()
    ]
    folders = [None if name == "base" else demo.ADAPTERS / name for _, name, _ in asked]
    memory = {"memory_gib": 1 / 64, "host_gib": 1 / 64}
    with LLM(
        demo.MODEL,
        device=setup.device.type,
        dtype="float32",
        cuda_graphs=not setup.is_eager,
        **memory,
    ) as llm:
        answers = llm.generate(
            [prompt for prompt, _, _ in asked],
            SamplingParams(max_tokens=64, temperature=0),
            folders,
        )
    wrong = [
        name
        for found, (_, name, answer) in zip(answers, asked, strict=True)
        if found.text != answer
    ]
    return {
        "measured": len(wrong),
        "goal": 0,
        "unit": f"wrong of {len(asked)} answers",
        "wrong": wrong,
    }


@torch.inference_mode()
def _compare(setup: Setup, make: Make, *arguments: object) -> Figures:
    """The largest relative error of an operation in Triton, beside torch operators on a CPU over the same data."""
    model = replace(setup.model, num_layers=LAYERS)
    pages = setup.sized(1024, 64)
    plain, ours = (
        KernelBench(model, device, pages, kernels=kernels, query_scale=SPREAD)
        for device, kernels in (
            (torch.device("cpu"), torch_kernels()),
            (setup.device, triton_kernels()),
        )
    )
    plain.arena.elements.normal_(std=SPREAD)
    ours.arena.elements.copy_(plain.arena.elements)

    def made(bench: KernelBench) -> list[Work]:
        torch.manual_seed(0)
        return make(bench, *arguments)

    errors = {
        expected.name: relative_error(result(found).cpu(), result(expected))
        for found, expected in zip(made(ours), made(plain), strict=True)
    }
    return {
        "measured": max(errors.values()),
        "goal": AGREES,
        "unit": "relative error",
        "errors": errors,
    }
