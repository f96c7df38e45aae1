"""Manylora beside transformers and PEFT, on the same machine in the same process.

    manylora bench offline [--repeats 3] [--json benchmarks/results/offline-cpu.json]

32 requests of 64 + 64 tokens at once on the 0.5B shape in bfloat16, greedy: the base, 8 mixed adapters (ranks 8, 16,
32, 64, twice), and one request alone. Repeats of all contenders are interleaved, so that a slow minute of the machine
hits all of them; medians are compared. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from manylora import LLM, SamplingParams
from manylora.benchmarks.qwen_shape import MODEL_ABOUT, VOCAB_SIZE, make_checkpoints
from manylora.benchmarks.report import DEFAULT_CACHE, AddOption, take_turns
from manylora.config import usable_cores

PEERS = {"base": "transformers", "mixed": "transformers + PEFT", "single": "transformers"}
"""The peer that Manylora is compared with, by load."""
Prompts = list[list[int]]
Generate = Callable[[Prompts, Sequence[int] | None], list[list[int]]]
"""Token ids of each answer, from prompts and the adapter index of each (None is the base)."""
Case = tuple[Prompts, list[int] | None]
"""One load that contenders are timed on: prompts, and the adapter of each."""
Timed = tuple[float, list[list[int]]]
"""Seconds that a contender took for one load, and its answers."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all contenders on all loads, in turns."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    if options.threads:
        torch.set_num_threads(options.threads)
    base, adapters = make_checkpoints(options.cache)
    cases = make_cases(options.requests, options.input_tokens, len(adapters))
    plain = _load(base)
    contenders: dict[str, Generate] = {
        "manylora": _manylora(options, base, adapters),
        "transformers": lambda prompts, _: _generate(plain, prompts, options.output_tokens),
        "transformers + PEFT": _peft(options, base, adapters),
    }
    turns = [(case, name) for case in cases for name in ("manylora", PEERS[case])]

    def run(turn: tuple[str, str], _round: int) -> Timed:
        case, name = turn
        start_s = time.perf_counter()
        answers = contenders[name](*cases[case])
        return time.perf_counter() - start_s, answers

    return make_result(options, take_turns(turns, options.repeats, run))


def make_cases(num_requests: int, input_tokens: int, num_adapters: int) -> dict[str, Case]:
    """The three loads; prompts are random token ids of one length, which needs no padding."""
    draw = random.Random(0)
    prompts = [
        [draw.randrange(2, VOCAB_SIZE) for _ in range(input_tokens)] for _ in range(num_requests)
    ]
    mixed = [index % num_adapters for index in range(num_requests)]
    return {"base": (prompts, None), "mixed": (prompts, mixed), "single": (prompts[:1], None)}


def make_result(
    options: argparse.Namespace, timed: dict[tuple[str, str], list[Timed]]
) -> dict[str, Any]:
    """Medians, ratios and how far the outputs of the last repeat agree, from the repeats by case and contender."""
    rates: dict[str, dict[str, float]] = {name: {} for _, name in timed}
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in rates}
    for (case, name), repeats in timed.items():
        tokens = options.output_tokens * (1 if case == "single" else options.requests)
        seconds[name][case] = [taken_s for taken_s, _ in repeats]
        rates[name][case] = tokens / statistics.median(seconds[name][case])
    return {
        "threads": torch.get_num_threads(),
        "load": {"model": MODEL_ABOUT},
        "output_tokens_per_s": rates,
        "seconds": seconds,
        "ratios": {
            **{
                f"{case}: manylora / {peer}": rates["manylora"][case] / rates[peer][case]
                for case, peer in PEERS.items()
            },
            "manylora: mixed / base": rates["manylora"]["mixed"] / rates["manylora"]["base"],
        },
        "first_tokens_equal": {
            case: _agreement(timed[case, "manylora"][-1][1], timed[case, PEERS[case]][-1][1])
            for case in ("base", "mixed")
        },
        "table": [
            {"tokens/s": name, **{case: each.get(case, "-") for case in PEERS}}
            for name, each in rates.items()
        ],
    }


def add_options(add: AddOption) -> None:
    """Add its options."""
    add("--repeats", type=int, default=3)
    add("--requests", type=int, default=32)
    add("--input-tokens", type=int, default=64)
    add("--output-tokens", type=int, default=64)
    add("--threads", type=int, default=usable_cores())
    add("--memory-gib", type=float, default=1.0, help="Manylora's arena")
    add("--cache", type=Path, default=DEFAULT_CACHE, help="folder of the generated checkpoints")


def _manylora(options: argparse.Namespace, base: Path, folders: Sequence[Path]) -> Generate:
    llm = LLM(str(base), dtype="bfloat16", memory_gib=options.memory_gib, threads=options.threads)
    refs = [llm.load_adapter(folder) for folder in folders]
    params = SamplingParams(max_tokens=options.output_tokens, temperature=0, ignore_eos=True)

    def generate(prompts: Prompts, adapters: Sequence[int] | None) -> list[list[int]]:
        chosen = None if adapters is None else [refs[index] for index in adapters]
        return [
            completion.token_ids for completion in llm.generate(prompts, params, adapter=chosen)
        ]

    return generate


def _peft(options: argparse.Namespace, base: Path, folders: Sequence[Path]) -> Generate:
    names = [f"adapter{index}" for index in range(len(folders))]
    model = PeftModel.from_pretrained(
        _load(base), folders[0], adapter_name=names[0], autocast_adapter_dtype=False
    )
    for name, folder in zip(names[1:], folders[1:], strict=True):
        model.load_adapter(folder, adapter_name=name, autocast_adapter_dtype=False)
    model.eval()

    return lambda prompts, adapters: _generate(
        model,
        prompts,
        options.output_tokens,
        adapter_names=[names[index] for index in adapters or []],
    )


def _load(base: Path) -> Any:  # noqa: ANN401 - transformers is untyped
    model: Any = Qwen2ForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.eval()
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def _generate(model: Any, prompts: Prompts, output_tokens: int, **options: Any) -> list[list[int]]:  # noqa: ANN401
    ids = torch.tensor(prompts)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=output_tokens,
        do_sample=False,
        **options,
    )
    answers: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return answers


def _agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    return sum(a[0] == b[0] for a, b in zip(ours, theirs, strict=True)) / len(ours)
