"""The real model, adapters and loader threads in a pool that is far too small; freed pages read as NaN."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from weft import LLM
from weft.config import GIB
from weft.engine.llm import Completion
from weft.engine.sampling_params import SamplingParams

DEMO = Path(__file__).resolve().parents[3] / "weft" / "demo"
ADAPTERS = [None, *(DEMO / "adapters" / name for name in ("french", "haiku", "json", "pirate", "shout"))]
NUM_REQUESTS = 30
PAGE_BYTES = 32768


def generate(
    num_pages: int | None, page_bytes: int = PAGE_BYTES, **settings: object
) -> tuple[list[Completion], int, int]:
    """Completions, preemptions and evictions of one mixed workload."""
    draw = random.Random(3)
    gib = 0.05 if num_pages is None else (num_pages + 1) * page_bytes / GIB
    fixed: dict[str, object] = {"device": "cpu", "dtype": "float32", "threads": 1, "host_gib": 0.02, "poison": True}
    with LLM(DEMO / "weft-demo", memory_gib=gib, **fixed, **settings) as llm:
        prompts = [[draw.randrange(6, 640) for _ in range(draw.randrange(1, 120))] for _ in range(NUM_REQUESTS)]
        params = [
            SamplingParams(
                max_tokens=draw.randrange(1, 40), temperature=draw.choice([0.0, 1.0]), seed=index, ignore_eos=True
            )
            for index in range(NUM_REQUESTS)
        ]
        adapters = [draw.choice(ADAPTERS) for _ in range(NUM_REQUESTS)]
        completions = llm.generate(prompts, params, adapters)
        llm.engine.core.check()
        status = llm.engine.core.status()
        assert status.pages["kv"] == status.pages["quarantine"] == 0
        assert llm.engine.ready.geometry.page_bytes == page_bytes
        return completions, sum(status.preemptions.values()), sum(status.evictions.values())


@pytest.fixture(scope="module")
def undisturbed() -> list[Completion]:
    completions, preemptions, _ = generate(None, max_running=1, step_tokens=512)
    assert preemptions == 0
    return completions


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_tokens_are_those_of_an_engine_with_all_the_room(undisturbed: list[Completion], policy: str) -> None:
    completions, preemptions, evictions = generate(60, max_running=8, step_tokens=48, max_model_len=160, policy=policy)
    assert preemptions > 0
    assert evictions > 0
    assert [c.token_ids for c in completions] == [c.token_ids for c in undisturbed]
    assert [c.finish_reason for c in completions] == ["length"] * NUM_REQUESTS


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_tokens_are_the_same_where_a_block_is_two_pages(
    undisturbed: list[Completion], prefix_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.memory.geometry.MAX_PAGE_BYTES", PAGE_BYTES // 2)
    settings = {"max_running": 8, "step_tokens": 48, "max_model_len": 160, "prefix_cache": prefix_cache}
    completions, preemptions, evictions = generate(120, PAGE_BYTES // 2, **settings)
    assert preemptions > 0
    assert evictions > 0
    assert [c.token_ids for c in completions] == [c.token_ids for c in undisturbed]
