"""Manylora beside transformers and PEFT, on the same machine in the same process.

    manylora bench offline [--repeats 3] [--json benchmarks/results/offline-cpu.json]

32 requests of 64 + 64 tokens at once on the 0.5B shape in bfloat16, greedy: the base, 8 mixed adapters (ranks 8, 16,
32, 64, twice), and one request alone. Repeats of all contenders are interleaved, so that a slow minute of the machine
hits all of them; medians are compared. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from manylora import LLM, SamplingParams
from manylora.benchmarks.engine.own_engine import random_prompts
from manylora.benchmarks.qwen_shape import MODEL_ABOUT, VOCAB_SIZE, make_checkpoints
from manylora.benchmarks.report import Figures, Options, take_turns
from manylora.config import usable_cores

PEERS = {"base": "transformers", "mixed": "transformers + PEFT", "single": "transformers"}
"""The peer that Manylora is compared with, by load."""
OURS = "manylora"
REQUESTS = 32
INPUT_TOKENS = 64
OUTPUT_TOKENS = 64
MEMORY_GIB = 1.0
"""Memory of Manylora's pages."""
Prompts = list[list[int]]
Generate = Callable[[Prompts, Sequence[int]], Prompts]
"""Token ids of each answer, from prompts and the adapter index of each; without indices the base answers."""
Timed = tuple[float, Prompts]
"""Seconds that a contender took for one load, and its answers."""


def measure(options: Namespace) -> Figures:
    """Run all contenders on all loads, in turns."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(usable_cores())
    base, adapters = make_checkpoints()
    cases = make_cases(len(adapters))
    contenders: dict[str, Generate] = {
        OURS: _manylora(base, adapters),
        "transformers": _transformers(base, []),
        "transformers + PEFT": _transformers(base, adapters),
    }

    def run(turn: tuple[str, str], _round: int) -> Timed:
        case, name = turn
        start_s = time.perf_counter()
        answers = contenders[name](*cases[case])
        return time.perf_counter() - start_s, answers

    turns = [(case, name) for case in cases for name in (OURS, PEERS[case])]
    return make_result(take_turns(turns, options.repeats, run))


def make_cases(num_adapters: int) -> dict[str, tuple[Prompts, list[int]]]:
    """Prompts and the adapter of each, by load; prompts are random token ids of one length, which needs no padding."""
    prompts = random_prompts(0, VOCAB_SIZE, REQUESTS, INPUT_TOKENS)
    mixed = [index % num_adapters for index in range(REQUESTS)]
    return {"base": (prompts, []), "mixed": (prompts, mixed), "single": (prompts[:1], [])}


def make_result(timed: dict[tuple[str, str], list[Timed]]) -> Figures:
    """Medians, ratios and how far the outputs of the last repeat agree, from the repeats by case and contender."""
    rates: dict[str, dict[str, float]] = {name: {} for _, name in timed}
    for (case, name), repeats in timed.items():
        tokens = sum(map(len, repeats[-1][1]))
        rates[name][case] = tokens / statistics.median(taken_s for taken_s, _ in repeats)
    ours = rates[OURS]
    ratios = {
        f"{case}: {OURS} / {peer}": ours[case] / rates[peer][case] for case, peer in PEERS.items()
    }
    ratios[f"{OURS}: mixed / base"] = ours["mixed"] / ours["base"]
    return {
        "threads": torch.get_num_threads(),
        "load": {
            "model": MODEL_ABOUT,
            "requests": REQUESTS,
            "input_tokens": INPUT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
        },
        "output_tokens_per_s": rates,
        "seconds": {
            f"{case}: {name}": [taken_s for taken_s, _ in repeats]
            for (case, name), repeats in timed.items()
        },
        "ratios": ratios,
        "first_tokens_equal": {
            case: _agreement(timed[case, OURS], timed[case, PEERS[case]])
            for case in ("base", "mixed")
        },
        "table": [
            {"tokens/s": name, **{case: each.get(case, "-") for case in PEERS}}
            for name, each in rates.items()
        ],
    }


def _manylora(base: Path, folders: Sequence[Path]) -> Generate:
    llm = LLM(str(base), dtype="bfloat16", memory_gib=MEMORY_GIB, threads=usable_cores())
    refs = [llm.load_adapter(folder) for folder in folders]
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)

    def generate(prompts: Prompts, adapters: Sequence[int]) -> Prompts:
        chosen = [refs[index] for index in adapters] or None
        return [each.token_ids for each in llm.generate(prompts, params, adapter=chosen)]

    return generate


def _transformers(base: Path, folders: Sequence[Path]) -> Generate:
    """A model of transformers; with adapters, one of PEFT."""
    model: Any = Qwen2ForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    for index, folder in enumerate(folders):
        how: dict[str, Any] = {"adapter_name": str(index), "autocast_adapter_dtype": False}
        if index == 0:
            model = PeftModel.from_pretrained(model, folder, **how)
        else:
            model.load_adapter(folder, **how)
    model.eval()

    @torch.inference_mode()
    def generate(prompts: Prompts, adapters: Sequence[int]) -> Prompts:
        ids = torch.tensor(prompts)
        chosen = {"adapter_names": list(map(str, adapters))} if adapters else {}
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=OUTPUT_TOKENS,
            do_sample=False,
            **chosen,
        )
        answers: Prompts = output[:, ids.shape[1] :].tolist()
        return answers

    return generate


def _agreement(ours: list[Timed], theirs: list[Timed]) -> float:
    """The share of answers of the last repeat that begin with the same token."""
    pairs = list(zip(ours[-1][1], theirs[-1][1], strict=True))
    return sum(one[0] == other[0] for one, other in pairs) / len(pairs)


OPTIONS: Options = {"repeats": (3, "")}
