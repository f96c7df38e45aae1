"""How much faster is Weft than transformers and PEFT, on the same machine in the same process?

    weft bench offline [--repeats 3] [--json benchmarks/results/offline-cpu.json]

32 requests of 64 + 64 tokens at once on the 0.5B shape in bfloat16, greedy: the base, 8 mixed adapters (ranks 8, 16,
32, 64, twice), and one request alone. Repeats of all contenders are interleaved, so that a slow minute of the machine
hits all of them; medians are compared. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from weft import LLM, SamplingParams
from weft.benchmarks.floor import LinearPass
from weft.benchmarks.qwen_shape import MODEL_ABOUT, VOCAB_SIZE, make_checkpoints
from weft.benchmarks.report import DEFAULT_CACHE, chosen
from weft.benchmarks.rounds import take_turns

Prompts = list[list[int]]
Generate = Callable[[Prompts, Sequence[int] | None], list[list[int]]]
"""Token ids of each answer, from prompts and the adapter index of each (None is the base)."""


@dataclass(frozen=True, slots=True)
class Case:
    """One load that contenders are timed on."""

    name: str
    prompts: Prompts
    adapters: list[int] | None


@dataclass(slots=True)
class Contender:
    """Something that generates."""

    name: str
    generate: Generate
    cases: tuple[str, ...]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    outputs: dict[str, list[list[int]]] = field(default_factory=dict)

    def time(self, case: Case) -> None:
        """One repeat."""
        start = time.perf_counter()
        self.outputs[case.name] = self.generate(case.prompts, case.adapters)
        self.seconds.setdefault(case.name, []).append(time.perf_counter() - start)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All contenders on all loads, in turns."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    if options.threads:
        torch.set_num_threads(options.threads)
    base, adapters = make_checkpoints(options.cache)
    floors = measure_floors(options)
    cases = make_cases(options.requests, options.input_tokens, len(adapters))
    contenders, memory = load_contenders(options, base, adapters, cases[1])
    turns = {
        f"{case.name}, {contender.name}": functools.partial(contender.time, case)
        for case in cases
        for contender in contenders
        if case.name in contender.cases
    }
    take_turns(turns, options.repeats, lambda name, _: turns[name](), first=1)
    result = make_result(options, cases, contenders) | {"floor_seconds": floors, "resident_mib_added": memory}
    for name, floor_s in floors.items():
        result["ratios"][f"weft {name} time / floor"] = statistics.median(contenders[0].seconds[name]) / floor_s
    return result


def make_cases(num_requests: int, input_tokens: int, num_adapters: int) -> list[Case]:
    """The three loads; prompts are random token ids of one length, so that nobody pads."""
    draw = random.Random(0)
    prompts = [[draw.randrange(2, VOCAB_SIZE) for _ in range(input_tokens)] for _ in range(num_requests)]
    mixed = [index % num_adapters for index in range(num_requests)]
    return [Case("base", prompts, None), Case("mixed", prompts, mixed), Case("single", prompts[:1], None)]


def measure_floors(options: argparse.Namespace) -> dict[str, float]:
    """Least seconds of the two base loads on this machine: their linear layers alone."""
    linear_pass = LinearPass()
    lengths = options.input_tokens, options.output_tokens
    return {
        "base": linear_pass.seconds_of_load(options.requests, *lengths),
        "single": linear_pass.seconds_of_load(1, *lengths),
    }


def load_contenders(
    options: argparse.Namespace, base: Path, adapters: Sequence[Path], warm_up: Case
) -> tuple[list[Contender], dict[str, float]]:
    """Load everything that takes part and run it once, and what each adds to the resident memory in MiB by that."""
    makers: list[tuple[str, Callable[[], Generate], tuple[str, ...]]] = [
        ("weft", lambda: _weft(options, base, adapters), ("base", "mixed", "single")),
        ("transformers", lambda: _transformers(options, base), ("base", "single")),
        ("transformers + PEFT", lambda: _peft(options, base, adapters), ("mixed",)),
    ]
    contenders, memory = [], {}
    for name, make, cases in makers:
        before = _resident_mib()
        contender = Contender(name, make(), cases)
        contender.generate(warm_up.prompts[: len(adapters)], warm_up.adapters and warm_up.adapters[: len(adapters)])
        memory[name] = _resident_mib() - before
        contenders.append(contender)
    return contenders, memory


def make_result(options: argparse.Namespace, cases: Sequence[Case], contenders: Sequence[Contender]) -> dict[str, Any]:
    """Medians, ratios and how far the outputs agree."""
    tokens = {case.name: len(case.prompts) * options.output_tokens for case in cases}
    rates = {
        contender.name: {name: tokens[name] / statistics.median(seconds) for name, seconds in contender.seconds.items()}
        for contender in contenders
    }
    weft, plain, peft = contenders
    return {
        "threads": torch.get_num_threads(),
        "load": {
            "model": MODEL_ABOUT,
            **chosen(options, "requests", "input_tokens", "output_tokens", "repeats"),
        },
        "output_tokens_per_s": rates,
        "seconds": {contender.name: contender.seconds for contender in contenders},
        "ratios": {
            "base: weft / transformers": rates["weft"]["base"] / rates["transformers"]["base"],
            "single: weft / transformers": rates["weft"]["single"] / rates["transformers"]["single"],
            "mixed: weft / transformers + PEFT": rates["weft"]["mixed"] / rates["transformers + PEFT"]["mixed"],
            "weft: mixed / base": rates["weft"]["mixed"] / rates["weft"]["base"],
        },
        "first_tokens_equal": {
            "base": _agreement(weft.outputs["base"], plain.outputs["base"]),
            "mixed": _agreement(weft.outputs["mixed"], peft.outputs["mixed"]),
        },
        "table": [{"tokens/s": name, **{case: rates[name].get(case, "-") for case in tokens}} for name in rates],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add its options."""
    add = parser.add_argument
    add("--repeats", type=int, default=3)
    add("--requests", type=int, default=32)
    add("--input-tokens", type=int, default=64)
    add("--output-tokens", type=int, default=64)
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--memory-gib", type=float, default=1.0, help="Weft's arena")
    add("--cache", type=Path, default=DEFAULT_CACHE, help="folder of the generated checkpoints")


def _weft(options: argparse.Namespace, base: Path, folders: Sequence[Path]) -> Generate:
    llm = LLM(str(base), dtype="bfloat16", memory_gib=options.memory_gib, threads=options.threads)
    refs = [llm.load_adapter(folder) for folder in folders]
    params = SamplingParams(max_tokens=options.output_tokens, temperature=0, ignore_eos=True)

    def generate(prompts: Prompts, adapters: Sequence[int] | None) -> list[list[int]]:
        chosen = None if adapters is None else [refs[index] for index in adapters]
        return [completion.token_ids for completion in llm.generate(prompts, params, adapter=chosen)]

    return generate


def _transformers(options: argparse.Namespace, base: Path) -> Generate:
    model = _load(base)

    def generate(prompts: Prompts, _adapters: Sequence[int] | None) -> list[list[int]]:
        return _generate(model, prompts, options.output_tokens)

    return generate


def _peft(options: argparse.Namespace, base: Path, folders: Sequence[Path]) -> Generate:
    names = [f"adapter{index}" for index in range(len(folders))]
    model = PeftModel.from_pretrained(_load(base), folders[0], adapter_name=names[0], autocast_adapter_dtype=False)
    for name, folder in zip(names[1:], folders[1:], strict=True):
        model.load_adapter(folder, adapter_name=name, autocast_adapter_dtype=False)
    model.eval()

    def generate(prompts: Prompts, adapters: Sequence[int] | None) -> list[list[int]]:
        chosen = [names[index] for index in adapters or []]
        return _generate(model, prompts, options.output_tokens, adapter_names=chosen)

    return generate


def _load(base: Path) -> Any:  # noqa: ANN401 - transformers is untyped
    model: Any = Qwen2ForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.eval()
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def _generate(model: Any, prompts: Prompts, output_tokens: int, **options: Any) -> list[list[int]]:  # noqa: ANN401
    ids = torch.tensor(prompts)
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=output_tokens, do_sample=False, **options
    )
    answers: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return answers


def _agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    return sum(a[0] == b[0] for a, b in zip(ours, theirs, strict=True)) / len(ours)


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
