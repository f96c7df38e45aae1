"""With keys and values in 8 bits, a request gets the same whatever befalls it, bit by bit, and the demo its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drive_core import collect
from manylora import LLM, demo
from manylora.adapters.blobs.local import LocalBlobs
from manylora.config import (
    AdapterConfig,
    Config,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from manylora.engine.build import EngineParts, build_engine
from manylora.engine.request import GenerationRequest, RequestOutput
from manylora.engine.sampling_params import BeamParams, SamplingParams
from manylora.kernels.native.library import native_library
from manylora.memory.eviction import PageCosts
from stored_adapters import adapter_pages, store_adapter
from tiny_models import ALL_LINEAR, TINY_VOCAB_SIZE, make_adapter, make_model

EXPECTED = json.loads(demo.EXPECTED.read_text())
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"architecture": "qwen2"},
    "mistral-window": {"architecture": "mistral", "sliding_window": 90},
}
COSTS = {
    "swap": PageCosts(copy_s=1e-9, load_s=1.0, token_s=1.0),
    "recompute": PageCosts(copy_s=1.0, load_s=1.0, token_s=1e-9),
}
"""Costs that leave no choice."""
NUM_REQUESTS = 8
NUM_TOKENS = 40
Answers = dict[str, list[tuple[int, float]]]
"""By request: its tokens, each with its logprob."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demos_answers_are_unchanged(dtype: str) -> None:
    styles = ["base", *EXPECTED["adapters"]]
    asked = [(question, style) for question in EXPECTED["questions"] for style in styles]
    folders = [None if style == "base" else demo.ADAPTERS / style for _, style in asked]
    sizes = {"memory_gib": 0.05, "host_gib": 0.05, "threads": 1, "poison": True}
    with LLM(demo.MODEL, device="cpu", dtype=dtype, kv_dtype="int8", **sizes) as llm:
        assert llm.engine.ready.geometry.is_kv_int8
        prompts = [question["prompt_token_ids"] for question, _ in asked]
        found = llm.generate(prompts, SamplingParams(max_tokens=64, temperature=0.0), folders)
    for (question, style), completion in zip(asked, found, strict=True):
        assert completion.text == question["answers"][style], (question["question"], style)


class Bench:
    """A tiny model with two adapters, and requests for them and for the base."""

    def __init__(self, folder: Path, fields: dict[str, Any]) -> None:
        self.folder, self.model = folder, make_model(folder / "model", **fields)
        self.adapters = [
            make_adapter(
                self.model, folder / f"rank{rank}", rank=rank, targets=ALL_LINEAR, seed=rank
            )
            for rank in (8, 16)
        ]

    @contextmanager
    def engine(
        self,
        *,
        prefix_cache: bool,
        kib: float = 4096,
        costs: PageCosts | None = None,
        **scheduler: int,
    ) -> Iterator[EngineParts]:
        config = Config(
            model=ModelConfig(path=str(self.model), dtype="float32", device="cpu", threads=1),
            memory=MemoryConfig(
                gib=kib / (1 << 20),
                host_gib=0.01,
                poison=True,
                prefix_cache=prefix_cache,
                kv_dtype="int8",
            ),
            adapter=AdapterConfig(max_rank=64, slots=4),
            scheduler=SchedulerConfig(**scheduler),  # type: ignore[arg-type]
            server=ServerConfig(data_dir=self.folder / "data"),
        )
        parts = build_engine(config, costs=costs)
        try:
            yield parts
            parts.core.check()
        finally:
            parts.core.close()

    def requests(self, parts: EngineParts) -> list[GenerationRequest]:
        blobs = LocalBlobs(self.folder / "data" / "blobs")
        refs = [
            None,
            *(store_adapter(blobs, adapter, parts.ready.base) for adapter in self.adapters),
        ]
        draw = torch.Generator().manual_seed(7)
        lengths = torch.randint(60, 200, (NUM_REQUESTS,), generator=draw).tolist()
        return [
            GenerationRequest(
                request_id=f"r{index}",
                prompt_token_ids=torch.randint(
                    0, TINY_VOCAB_SIZE, (length,), generator=draw
                ).tolist(),
                params=SamplingParams(
                    temperature=0.9, seed=index, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1
                ),
                adapter=refs[index % 3],
            )
            for index, length in enumerate(lengths)
        ]


def answers(outputs: dict[str, list[RequestOutput]]) -> Answers:
    found: Answers = {}
    for name, parts in outputs.items():
        assert parts[-1].error is None, parts[-1].error
        scores = [entry.logprob for part in parts for entry in part.logprobs or []]
        found[name] = list(
            zip([token for part in parts for token in part.token_ids], scores, strict=True)
        )
    return found


def assert_same(found: Answers, expected: Answers) -> None:
    if native_library() is not None:
        assert found == expected
    for name, tokens in expected.items():  # torch operators round otherwise in another batch
        assert [token for token, _ in found[name]] == [token for token, _ in tokens]


@pytest.fixture(scope="module", params=list(MODELS))
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp(request.param), MODELS[request.param])


@pytest.fixture(scope="module")
def undisturbed(bench: Bench) -> Answers:
    with bench.engine(prefix_cache=False, max_running=16, step_tokens=512) as parts:
        found: Answers = {}
        for request in bench.requests(parts):
            found |= answers(collect(parts.core, [request]))
        return found


def test_in_one_batch_and_in_chunks(bench: Bench, undisturbed: Answers) -> None:
    with bench.engine(prefix_cache=False, max_running=16, step_tokens=50) as parts:
        assert_same(answers(collect(parts.core, bench.requests(parts))), undisturbed)


def test_on_cached_blocks(bench: Bench, undisturbed: Answers) -> None:
    with bench.engine(prefix_cache=True, max_running=16, step_tokens=128) as parts:
        requests = bench.requests(parts)
        assert_same(answers(collect(parts.core, requests)), undisturbed)
        again = collect(parts.core, requests)
        assert_same(answers(again), undisturbed)
        page_tokens = parts.ready.geometry.page_tokens
        for request in requests:
            cached = (len(request.prompt_token_ids) - 1) // page_tokens * page_tokens
            assert again[request.request_id][0].cached_tokens == cached
        assert parts.core.status().prefix_hits > 0


@pytest.mark.parametrize("how", list(COSTS))
def test_with_preemption(how: str, bench: Bench, undisturbed: Answers) -> None:
    """A pool in which all can start, and which is too small for what they grow to."""
    with bench.engine(prefix_cache=False, max_running=16, step_tokens=512) as parts:
        base, geometry = parts.ready.base, parts.ready.geometry
        at_start = sum(
            geometry.pages(len(request.prompt_token_ids)) for request in bench.requests(parts)
        )
    taken = sum(adapter_pages(adapter, base, geometry) for adapter in bench.adapters)
    kib = (1 + taken + at_start + 1) * geometry.page_bytes / 1024
    with bench.engine(
        prefix_cache=True, kib=kib, costs=COSTS[how], max_running=16, step_tokens=2048
    ) as parts:
        requests = bench.requests(parts)
        for request in requests[1:3]:
            collect(
                parts.core,
                [replace(request, prompt_token_ids=[1], params=SamplingParams(max_tokens=1))],
            )
            assert request.adapter is not None
            parts.core.residency.pin(request.adapter, True)
        assert_same(answers(collect(parts.core, requests)), undisturbed)
        preemptions = parts.core.status().preemptions
        assert preemptions[how] == sum(preemptions.values()) > 0


def test_forks_and_beams(bench: Bench) -> None:
    with bench.engine(prefix_cache=False, max_running=16, step_tokens=512) as parts:
        prompts = bench.requests(parts)[:3]
        choices = [
            replace(request, request_id=f"{request.request_id}-{index}", choice_index=index)
            for request in prompts
            for index in range(3)
        ]
        alone: Answers = {}
        for choice in choices:
            alone |= answers(collect(parts.core, [choice]))
        beams = [replace(request, beam=BeamParams(width=3)) for request in prompts]
        searched = {
            each.request_id: collect(parts.core, [each])[each.request_id][0].hypotheses
            for each in beams
        }
    with bench.engine(prefix_cache=True, max_running=16, step_tokens=100) as parts:
        forks = [
            replace(choice, fork_of=f"{choice.request_id[:-1]}0" if choice.choice_index else None)
            for choice in choices
        ]
        outputs = collect(parts.core, [*forks, *beams])
        assert_same(answers({fork.request_id: outputs[fork.request_id] for fork in forks}), alone)
        for fork in forks:
            if fork.choice_index:
                assert outputs[fork.request_id][0].cached_tokens == len(fork.prompt_token_ids) - 1
        for beam in beams:
            found, expected = outputs[beam.request_id][0].hypotheses, searched[beam.request_id]
            assert found is not None
            assert expected is not None
            assert [each.token_ids for each in found] == [each.token_ids for each in expected]


def test_the_same_memory_holds_about_twice_the_tokens(bench: Bench) -> None:
    with bench.engine(prefix_cache=False, max_running=16, step_tokens=512) as parts:
        geometry, plan = parts.ready.geometry, parts.ready.memory
    assert plan.kv_tokens == plan.num_pages * geometry.page_tokens
    # Of float32, which takes 4 bytes: 16 elements and a scale take 20 instead of 64.
    assert geometry.page_tokens == 4 * 16
    assert geometry.page_bytes / geometry.page_tokens == pytest.approx(3 * 2 * 2 * 20, rel=0.02)
