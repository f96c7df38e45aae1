"""What does it cost to hold answers to a grammar, and whom does it hold up?

    manylora bench grammar [--shape qwen] [--json benchmarks/results/grammar-cost-cpu.json]

    steps    a full batch decodes, free and held to a schema, in turns: their times
    flood    one tenant asks for answers to ever new schemas at a fixed rate while others, who have a request in flight
             each, ask freely: their time to the first token beside as many free requests of that tenant, in turns, and
             the memory of the process after the first half of the flood and at its end
    refused  milliseconds of CPU until the server refuses schemas that are made to be expensive, its child's included

Prints a table; last, one JSON line. The model's weights are random; its tokenizer has as many byte-level tokens as the
logits are wide. `--shape demo` takes the shipped model and ends within seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import random
import statistics
import string
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from manylora.benchmarks.engine.own_engine import (
    OwnEngine,
    add_shape_options,
    own_engine,
    shape_config,
)
from manylora.benchmarks.metrics import distribution, percentile
from manylora.benchmarks.qwen_shape import VOCAB_SIZE
from manylora.benchmarks.report import AddOption, goal, take_turns
from manylora.config import Config, MemoryConfig
from manylora.engine.grammar.json_schema import json_grammar
from manylora.engine.request import FlowKey, GenerationRequest, Grammar
from manylora.engine.sampling_params import SamplingParams
from manylora.errors import InvalidRequestError
from manylora.server.generation.grammar import checked_grammar
from manylora.server.sandbox.grammar_checker import GrammarChecker

PROMPT = [10, 11]
TEXTS = {
    "name": {"type": "string"},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 30}},
}
NUMBERS = {
    "age": {"type": "integer", "minimum": 0, "maximum": 130},
    "when": {"type": "string", "format": "date-time"},
}
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {**TEXTS, **NUMBERS},
    "additionalProperties": False,
}
ORDER["required"] = list(ORDER["properties"])
SETTLE_STEPS = 20
"""Steps before each phase that are not timed."""
QUIET_TENANTS = 4
ANSWER_TOKENS = (2, 6)
"""Of the flood: a slow CPU keeps up with them, too, and lengths differ, so that rows do not end together for ever."""
MAX_STEP_RATIO = 1.05
MAX_FIRST_TOKEN_RATIO = 1.1
MAX_REFUSAL_MS = 100.0
MAX_GROWTH_MIB = 16.0
PAGES_PER_MIB = 256
FLOOD_ROUNDS = 8
"""Of each phase."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the three parts."""
    with _config(options) as config, own_engine(config) as engine:
        steps = _steps(engine, options)
        flood = _flood(engine, options)
        folder = Path(config.model.path)
        refused = {
            name: _refusal_cpu_ms(name, schema, folder) for name, schema in _hostile().items()
        }
    step_ratio = steps["held"]["p50"] / steps["free"]["p50"]
    first_ratio = flood["flooded"]["p99 of a turn"] / flood["quiet"]["p99 of a turn"]
    half_mib, end_mib = flood["memory_mib"]
    return {
        "step_ms": steps,
        "first_token_ms": {name: flood[name] for name in ("quiet", "flooded")},
        "memory_mib": flood["memory_mib"],
        "refused_cpu_ms": refused,
        "goals": [
            goal("step held / free, p50", step_ratio, MAX_STEP_RATIO),
            goal(
                "first token of others, flooded / quiet, p99 of a turn",
                first_ratio,
                MAX_FIRST_TOKEN_RATIO,
            ),
            goal(
                "growth over the second half of the flood, MiB", end_mib - half_mib, MAX_GROWTH_MIB
            ),
            goal("longest refusal, ms of CPU", max(refused.values()), MAX_REFUSAL_MS),
        ],
        "table": [
            *({"ms": f"step, {name}", **found} for name, found in steps.items()),
            *(
                {"ms": f"first token of others, {name}", **flood[name]}
                for name in ("quiet", "flooded")
            ),
            *({"ms": f"CPU of a refusal: {name}", "p50": found} for name, found in refused.items()),
        ],
    }


@contextmanager
def _config(options: argparse.Namespace) -> Iterator[Config]:
    config, _ = shape_config(options, MemoryConfig(gib=0.25, host_gib=0.125))
    with tempfile.TemporaryDirectory(prefix="manylora-grammar-") as folder:
        for file in Path(config.model.path).iterdir():
            (Path(folder) / file.name).symlink_to(file)
        if options.shape == "qwen":
            (Path(folder) / "tokenizer.json").unlink()
            _byte_level_tokenizer().save(str(Path(folder) / "tokenizer.json"))
        yield replace(config, model=replace(config.model, path=folder))


def _byte_level_tokenizer() -> Tokenizer:
    """All bytes, and random words of letters, digits and marks, as many as the model has tokens."""
    rng = random.Random(0)
    alphabet = string.ascii_lowercase * 4 + string.ascii_uppercase + string.digits + ' "{}[]:,.-_/'
    words = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(words) < VOCAB_SIZE - 2:
        words["".join(rng.choices(alphabet, k=rng.randint(2, 8))).replace(" ", "Ġ")] = None
    vocab = {word: index for index, word in enumerate(["<pad>", "<eos>", *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    return tokenizer


def _steps(engine: OwnEngine, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Milliseconds of steps whose rows are all free, or all held to a list of objects that has no end."""
    endless = Grammar.of(json_grammar({"type": "array", "items": ORDER, "minItems": 100_000}))
    most = engine.parts.ready.max_model_len - len(PROMPT)

    def run(phase: str, round_: int) -> list[float]:
        requests = [f"{phase}-{round_}-{index}" for index in range(options.requests)]
        for index, request_id in enumerate(requests):
            params = SamplingParams(
                max_tokens=most, temperature=1.0, seed=index, ignore_eos=phase == "free"
            )
            engine.submit(_request(request_id, params, endless if phase == "held" else None))
        engine.pump_until_decoding(requests)
        for _ in range(SETTLE_STEPS):
            engine.pump()
        step_s = [engine.pump() for _ in range(options.steps)]
        engine.abort(requests)
        return step_s

    turns = take_turns(("free", "held"), options.rounds, run, first=1)
    return {name: distribution(list(itertools.chain(*each)), 1e3) for name, each in turns.items()}


def _flood(engine: OwnEngine, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds to the first token of tenants who ask freely, and MiB half way through the flood and after it.

    The 99th percentile is also given as the median of those of the turns: a stall of the machine is in one of them.
    """
    memory_mib: dict[int, float] = {}
    schemas = map(_schema_number, itertools.count())

    def run(phase: str, round_: int) -> list[float]:
        first_s = _flood_round(
            engine, f"{phase}-{round_}", schemas if phase == "flooded" else None, options
        )
        memory_mib[round_] = int(Path("/proc/self/statm").read_text().split()[1]) / PAGES_PER_MIB
        return first_s

    turns = take_turns(("quiet", "flooded"), FLOOD_ROUNDS, run, first=1)
    found = {
        phase: distribution(list(itertools.chain(*each)), 1e3) for phase, each in turns.items()
    }
    for phase, each in turns.items():
        found[phase]["p99 of a turn"] = (
            statistics.median(percentile(turn, 99) for turn in each) * 1e3
        )
    return {**found, "memory_mib": [memory_mib[FLOOD_ROUNDS // 2], memory_mib[FLOOD_ROUNDS]]}


def _flood_round(
    engine: OwnEngine, name: str, schemas: Iterator[Grammar] | None, options: argparse.Namespace
) -> list[float]:
    """Seconds to the first token of those who ask freely; one tenant asks for answers to schemas, or freely too."""
    seconds = options.seconds / FLOOD_ROUNDS
    count = round(seconds * options.schemas_per_minute / 60)
    grammars = [None if schemas is None else next(schemas) for _ in range(count)]
    rng = random.Random(0)
    asked: dict[str, float] = {}
    first_s: list[float] = []
    began_s, num_sent, numbers = time.perf_counter(), 0, itertools.count()
    while (now_s := time.perf_counter() - began_s) < seconds:
        while len(asked) < QUIET_TENANTS:
            request_id = f"{name}-free-{next(numbers)}"
            asked[request_id] = time.perf_counter()
            engine.submit(
                _request(request_id, SamplingParams(max_tokens=1), tenant=f"quiet {len(asked)}")
            )
        while num_sent < min(now_s / seconds * count, count):
            grammar = grammars[num_sent]
            params = SamplingParams(
                max_tokens=rng.randint(*ANSWER_TOKENS), seed=num_sent, ignore_eos=grammar is None
            )
            engine.submit(_request(f"{name}-{num_sent}", params, grammar, tenant="flood"))
            num_sent += 1
        engine.pump()
        came_s = time.perf_counter()
        first_s += [
            came_s - asked.pop(each.request_id)
            for each in engine.outputs
            if each.request_id in asked
        ]
    while engine.core.has_work():
        engine.pump()
    return first_s


def _request(
    name: str, params: SamplingParams, grammar: Grammar | None = None, tenant: str = "benchmark"
) -> GenerationRequest:
    flow = FlowKey(tenant=tenant)
    return GenerationRequest(
        request_id=name, prompt_token_ids=PROMPT, params=params, flow=flow, grammar=grammar
    )


def _schema_number(number: int) -> Grammar:
    properties = {
        **ORDER["properties"],
        f"field {number}": {"type": "string", "maxLength": number % 50 + 1},
    }
    return Grammar.of(json_grammar({**ORDER, "properties": properties}))


def _hostile() -> dict[str, dict[str, Any]]:
    doubled = {
        f"d{index}": {"allOf": [{"$ref": f"#/$defs/d{index + 1}"}] * 2} for index in range(25)
    }
    return {
        "1 MiB": {"const": "x" * (1 << 20)},
        "2 to the 25 by references": {
            "$ref": "#/$defs/d0",
            "$defs": {**doubled, "d25": {"type": "string", "pattern": "^a"}},
        },
        "300 patterns at once": {
            "allOf": [{"pattern": f"^.*{index}.*$", "type": "string"} for index in range(300)]
        },
        "8,000 required": {"type": "object", "required": [f"r{index}" for index in range(8000)]},
        "5,000 properties": {
            "type": "object",
            "properties": {f"p{index}": {} for index in range(5000)},
        },
    }


def _refusal_cpu_ms(name: str, schema: dict[str, Any], folder: Path) -> float:
    """NaN where it was not refused."""
    return asyncio.run(_measure_refusal(name, schema, GrammarChecker(folder)))


async def _measure_refusal(name: str, schema: dict[str, Any], checker: GrammarChecker) -> float:
    await checked_grammar(f'start: "{name}"', "schema", checker)  # its process starts
    before_s = _cpu_s()
    try:
        await checked_grammar(json_grammar(schema), "schema", checker)
    except InvalidRequestError:
        return (_cpu_s() - before_s) * 1e3
    finally:
        await checker.close()
    return math.nan


def _cpu_s() -> float:
    """CPU seconds of this thread, of all children, and of theirs, ended or not."""
    tasks = Path("/proc/self/task").glob("*/children")
    children = [child for task in tasks for child in task.read_text().split()]
    grandchildren = [
        each
        for child in children
        for each in Path(f"/proc/{child}/task/{child}/children").read_text().split()
    ]
    total_s = time.thread_time()
    for pid in (*children, *grandchildren):
        total_s += int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total_s += (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
    return total_s


def add_options(add: AddOption) -> None:
    """Add its options."""
    add_shape_options(add)
    add("--requests", type=int, default=32, help="rows of a step")
    add("--rounds", type=int, default=4, help="how often free and held steps take turns")
    add("--steps", type=int, default=60, help="timed steps of each phase in a round")
    add("--seconds", type=float, default=120.0, help="of each phase of the flood")
    add("--schemas-per-minute", type=float, default=1000.0, help="of the flood")
