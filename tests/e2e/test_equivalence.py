"""The heart of the project: whatever the batch, every request gets the tokens that transformers + PEFT gives it alone.

The reference generates in batches, but its tokens count only where one forward pass on the request alone finds each
of them clearly the likeliest. Its outputs are first shown to differ between adapters. Then the same requests run alone,
mixed, shuffled, in chunks, on cached prefixes, as forks, and under preemption of either kind, and must come out token
by token the same.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from drive_core import collect, run_all
from manylora.adapters.blobs.local import LocalBlobs
from manylora.adapters.ref import AdapterRef
from manylora.config import (
    AdapterConfig,
    Config,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from manylora.engine.build import EngineParts, build_engine
from manylora.engine.request import GenerationRequest
from manylora.engine.sampling_params import SamplingParams
from manylora.kernels.weight_format import WeightFormat
from manylora.memory.eviction import PageCosts
from rounded_models import round_linears
from stored_adapters import adapter_pages, store_adapter
from tiny_models import ALL_LINEAR, TINY_VOCAB_SIZE, load_reference, make_adapter, make_model

RANKS = (1, 4, 8, 16, 24, 64)
COSTS = {
    "swap": PageCosts(copy_s=1e-9, load_s=1.0, token_s=1.0),
    "recompute": PageCosts(copy_s=1.0, load_s=1.0, token_s=1e-9),
}
"""Costs that leave no choice."""
NUM_REQUESTS = 14
NUM_TOKENS = 20
PATTERNS = ("identical", "distinct", "uniform", "zipf", "one-against-many")
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama", "tied": False},
    "qwen2-tied": {"architecture": "qwen2", "tied": True},
    "qwen2-int8": {"architecture": "qwen2", "tied": True},
    "qwen3": {"architecture": "qwen3", "tied": False},
}
MIN_MARGINS = {"bf16": 2e-4, "int8": 5e-2}
"""Prompts whose reference is closer to a tie than this say nothing about equality and are drawn again. Where inputs are
rounded to codes, the last bit of one may turn a code, which has changed logits by up to 0.044."""
WAYS_TO_PREEMPT = (("swap", True), ("recompute", True), ("recompute", False))
"""What preemption does, and whether there is a prefix cache."""
CANDIDATES = 4
"""Prompts drawn at once for each request."""


def targets_of(rank: int) -> tuple[str, ...]:
    return {
        1: ("q_proj", "v_proj"),
        8: ("q_proj", "k_proj", "v_proj", "o_proj"),
        24: ("gate_proj", "down_proj"),
    }.get(rank, ALL_LINEAR)


def popularity(pattern: str) -> list[int]:
    """Adapter index of each request; -1 is the base, which every pattern but two contains."""
    n = NUM_REQUESTS
    choices = {
        "identical": [5] * n,
        "distinct": [*range(6), -1] * 2,
        "uniform": [i % 4 for i in range(n - 2)] + [-1, -1],
        "zipf": [3] * 7 + [1] * 3 + [5] * 2 + [-1, 0],
        "one-against-many": [2] + [4] * (n - 3) + [-1, -1],
    }
    return choices[pattern][:n]


@dataclass
class Bench:
    """One tiny base with its adapters and the memoised reference."""

    folder: Path
    model: Path
    adapters: list[Path]
    weights: WeightFormat
    number: int
    """Of the model."""
    stored: list[AdapterRef] = field(default_factory=list)

    @cached_property
    def reference(self) -> Any:
        model: Any = round_linears(load_reference(self.model), self.weights)
        for adapter in self.adapters:
            if isinstance(model, PeftModel):
                model.load_adapter(str(adapter), adapter.name)
            else:
                model = PeftModel.from_pretrained(model, str(adapter), adapter_name=adapter.name)
        model.generation_config.eos_token_id = None
        return model.eval()

    @torch.inference_mode()
    def draft(self, prompts: list[list[int]], adapters: list[int]) -> list[list[int]]:
        """Likely tokens for many requests at once, which `margin` has to confirm for each."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        names = [
            self.adapters[adapter].name if adapter >= 0 else "__base__" for adapter in adapters
        ]
        made = self.reference.generate(
            input_ids=ids,
            attention_mask=mask,
            adapter_names=names,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
        return [list(map(int, row)) for row in made[:, width:]]

    @torch.inference_mode()
    def margin(self, prompt: list[int], tokens: list[int], adapter: int) -> float:
        """By how much each token is the likeliest where the reference runs the request alone; below 0: one is not."""
        with contextlib.ExitStack() as stack:
            if adapter >= 0:
                self.reference.set_adapter(self.adapters[adapter].name)
            else:
                stack.enter_context(self.reference.disable_adapter())
            logits = self.reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        chosen = torch.tensor(tokens)[:, None]
        others = logits.scatter(1, chosen, -torch.inf)
        return float((logits.gather(1, chosen)[:, 0] - others.amax(1)).min())

    def engine(
        self,
        *,
        prefix_cache: bool,
        kib: float = 4096,
        costs: PageCosts | None = None,
        **scheduler: Any,
    ) -> EngineParts:
        return build_engine(
            Config(
                model=ModelConfig(
                    path=str(self.model),
                    dtype="float32",
                    weights=self.weights,
                    device="cpu",
                    threads=1,
                ),
                memory=MemoryConfig(
                    gib=kib / (1 << 20), host_gib=0.01, poison=True, prefix_cache=prefix_cache
                ),
                adapter=AdapterConfig(max_rank=64, slots=8),
                scheduler=SchedulerConfig(**scheduler),
                server=ServerConfig(data_dir=self.folder / "data"),
            ),
            costs=costs,
        )

    def refs(self, parts: EngineParts) -> list[AdapterRef]:
        """The adapters in the blob store; all engines of a bench have the same base."""
        if not self.stored:
            blobs = LocalBlobs(self.folder / "data" / "blobs")
            self.stored += [
                store_adapter(blobs, adapter, parts.ready.base) for adapter in self.adapters
            ]
        return self.stored


@pytest.fixture(scope="module", params=list(MODELS))
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder / "model", **MODELS[request.param])
    adapters = [
        make_adapter(
            model,
            folder / f"rank{rank}",
            rank=rank,
            alpha=2 * rank if rank > 1 else 4,
            targets=targets_of(rank),
            seed=rank,
            use_rslora=rank == 16,
        )
        for rank in RANKS
    ]
    weights: WeightFormat = "int8" if request.param.endswith("int8") else "bf16"
    return Bench(folder, model, adapters, weights, list(MODELS).index(request.param))


@dataclass
class Case:
    """Requests of one popularity pattern and what the reference answers."""

    prompts: list[list[int]]
    adapters: list[int]
    expected: dict[str, list[int]]
    number: int
    """Of the pattern."""

    def requests(self, refs: list[AdapterRef]) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                request_id=f"r{index}",
                prompt_token_ids=prompt,
                params=SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
                adapter=refs[adapter] if adapter >= 0 else None,
            )
            for index, (prompt, adapter) in enumerate(zip(self.prompts, self.adapters, strict=True))
        ]


@pytest.fixture(scope="module", params=PATTERNS)
def case(request: pytest.FixtureRequest, bench: Bench) -> Case:
    rng = random.Random(request.param)
    adapters = popularity(request.param)
    found: dict[int, tuple[list[int], list[int]]] = {}
    for _ in range(20):
        missing = [
            index for index in range(len(adapters)) if index not in found for _ in range(CANDIDATES)
        ]
        if not missing:
            break
        drawn = [
            [rng.randrange(TINY_VOCAB_SIZE) for _ in range(rng.randint(1, 45))] for _ in missing
        ]
        drafts = bench.draft(drawn, [adapters[index] for index in missing])
        for index, prompt, tokens in zip(missing, drawn, drafts, strict=True):
            if (
                index not in found
                and bench.margin(prompt, tokens, adapters[index]) > MIN_MARGINS[bench.weights]
            ):
                found[index] = prompt, tokens
    if len(found) < len(adapters):
        pytest.fail("no prompt with a clear reference was found")
    prompts = [found[index][0] for index in range(len(adapters))]
    expected = {f"r{index}": tokens for index, (_, tokens) in found.items()}
    return Case(prompts, adapters, expected, PATTERNS.index(request.param))


@contextlib.contextmanager
def checked(parts: EngineParts) -> Iterator[EngineParts]:
    """An engine whose pages, slots and requests add up in the end."""
    yield parts
    parts.core.check()
    parts.core.close()


@pytest.fixture(scope="module")
def roomy(bench: Bench) -> Iterator[EngineParts]:
    with checked(bench.engine(prefix_cache=False, max_running=16, step_tokens=512)) as parts:
        yield parts


@pytest.fixture(scope="module")
def caching(bench: Bench) -> Iterator[EngineParts]:
    with checked(bench.engine(prefix_cache=True, max_running=16, step_tokens=64)) as parts:
        yield parts


@pytest.fixture(scope="module")
def chunking(bench: Bench) -> Iterator[EngineParts]:
    with checked(bench.engine(prefix_cache=True, max_running=6, step_tokens=9)) as parts:
        yield parts


@pytest.fixture(scope="module")
def overlapping(bench: Bench) -> Iterator[EngineParts]:
    made = bench.engine(prefix_cache=True, max_running=6, step_tokens=24, overlap="on")
    with checked(made) as parts:
        yield parts


def test_the_reference_itself_tells_the_adapters_apart(bench: Bench) -> None:
    prompt = [7, 100, 23, 5]
    adapters = list(range(-1, len(RANKS)))
    outputs = bench.draft([prompt] * len(adapters), adapters)
    assert len(set(map(tuple, outputs))) == len(RANKS) + 1
    assert all(
        bench.margin(prompt, tokens, adapter) >= 0
        for tokens, adapter in zip(outputs, adapters, strict=True)
    )


def test_alone(bench: Bench, case: Case, roomy: EngineParts) -> None:
    requests = dict(zip(case.adapters, case.requests(bench.refs(roomy)), strict=True))
    for (
        request
    ) in requests.values():  # one for each adapter: how many share it makes no difference here
        assert run_all(roomy.core, [request]) == {
            request.request_id: case.expected[request.request_id]
        }


def test_in_one_mixed_batch(bench: Bench, case: Case, roomy: EngineParts) -> None:
    assert run_all(roomy.core, case.requests(bench.refs(roomy))) == case.expected
    assert max(step.adapters for step in roomy.core.status().last_steps[-NUM_TOKENS:]) == len(
        {adapter for adapter in case.adapters if adapter >= 0}
    )


def test_in_shuffled_order(bench: Bench, case: Case, roomy: EngineParts) -> None:
    requests = case.requests(bench.refs(roomy))
    random.Random(3).shuffle(requests)
    assert run_all(roomy.core, requests) == case.expected


def test_with_chunked_prefill(bench: Bench, case: Case, chunking: EngineParts) -> None:
    assert run_all(chunking.core, case.requests(bench.refs(chunking))) == case.expected
    assert max(step.tokens for step in chunking.core.status().last_steps) <= 9


def test_with_overlap(bench: Bench, case: Case, overlapping: EngineParts) -> None:
    """Each step is launched before the one before it is read; requests come while others decode."""
    assert run_all(overlapping.core, case.requests(bench.refs(overlapping))) == case.expected


def test_on_cached_prefixes(bench: Bench, case: Case, caching: EngineParts) -> None:
    """The same prompts again, and then prompts that go on with what was answered."""
    requests = case.requests(bench.refs(caching))
    assert run_all(caching.core, requests) == case.expected
    page_tokens = caching.ready.geometry.page_tokens

    again = collect(caching.core, requests)
    assert {
        name: [token for o in outputs for token in o.token_ids] for name, outputs in again.items()
    } == case.expected
    for request in requests:
        cached = (len(request.prompt_token_ids) - 1) // page_tokens * page_tokens
        assert [output.cached_tokens for output in again[request.request_id]][:2] == [cached, 0]

    longer = [
        replace(
            request,
            prompt_token_ids=request.prompt_token_ids + case.expected[request.request_id][:12],
        )
        for request in requests
    ]
    answers = run_all(caching.core, longer)
    assert {name: tokens[:8] for name, tokens in answers.items()} == {
        name: tokens[12:] for name, tokens in case.expected.items()
    }
    status = caching.core.status()
    assert status.prefix_hits > 0
    assert status.pages["kv"] == status.pages["quarantine"] == 0


def test_forks_draw_what_requests_of_their_own_draw(
    bench: Bench, case: Case, roomy: EngineParts, caching: EngineParts
) -> None:
    params = SamplingParams(temperature=1.5, top_p=0.95, seed=11, max_tokens=10, ignore_eos=True)
    choices = [
        replace(
            request,
            request_id=f"{request.request_id}-{index}",
            prompt_token_ids=[
                index_of_case,
                *request.prompt_token_ids,
            ],  # a prompt that no other test has cached
            params=params,
            choice_index=index,
        )
        for index_of_case, request in enumerate(case.requests(bench.refs(roomy))[:4])
        for index in range(3)
    ]
    alone = run_all(roomy.core, choices)
    assert len({tuple(tokens) for tokens in alone.values()}) == len(choices)
    first_ids = [
        choice.request_id for choice in choices for _ in range(3) if choice.choice_index == 0
    ]
    forks = [
        replace(choice, fork_of=first_id if choice.choice_index else None)
        for choice, first_id in zip(choices, first_ids, strict=True)
    ]
    outputs = collect(caching.core, forks)
    assert {
        name: [token for o in parts for token in o.token_ids] for name, parts in outputs.items()
    } == alone
    for fork in forks:
        if fork.choice_index:
            assert outputs[fork.request_id][0].cached_tokens == len(fork.prompt_token_ids) - 1


def test_with_preemption(bench: Bench, case: Case, roomy: EngineParts) -> None:
    """A pool in which all can start, and which is too small for what they grow to.

    Every model and every pattern meets every way to preempt, though not every pair of them.
    """
    how, prefix_cache = WAYS_TO_PREEMPT[(bench.number + case.number) % len(WAYS_TO_PREEMPT)]
    refs = bench.refs(roomy)
    geometry = roomy.ready.geometry
    used = sorted({*case.adapters} - {-1})
    taken = sum(
        adapter_pages(bench.adapters[adapter], roomy.ready.base, geometry) for adapter in used
    )
    at_start = sum(geometry.pages(len(prompt)) for prompt in case.prompts)
    pages = 1 + taken + at_start + (taken + at_start) // 16 + 1
    parts = bench.engine(
        prefix_cache=prefix_cache,
        kib=pages * geometry.page_bytes / 1024,
        costs=COSTS[how],
        max_running=16,
        step_tokens=512,
    )
    for adapter in used:
        run_all(
            parts.core,
            [replace(case.requests(refs)[0], request_id=f"warm{adapter}", adapter=refs[adapter])],
        )
        parts.core.residency.pin(refs[adapter], True)
    assert run_all(parts.core, case.requests(refs)) == case.expected
    preemptions = parts.core.status().preemptions
    assert preemptions[how] == sum(preemptions.values()) > 0
    parts.core.check()
    parts.core.close()


def test_interrupted_requests_go_on_from_their_tokens(
    bench: Bench, case: Case, roomy: EngineParts
) -> None:
    requests = [
        replace(request, generated_token_ids=case.expected[request.request_id][:4])
        for request in case.requests(bench.refs(roomy))
    ]
    rest = {request_id: tokens[4:] for request_id, tokens in case.expected.items()}
    assert run_all(roomy.core, requests) == rest
