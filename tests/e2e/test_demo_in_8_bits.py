"""The demo with weights in 8 bits: the same answers, and text it has not seen is about as likely."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from drive_core import run_all
from manylora import demo
from manylora.adapters.blobs.local import LocalBlobs
from manylora.config import (
    Config,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    Weights,
)
from manylora.engine.build import build_engine
from manylora.engine.request import GenerationRequest
from manylora.engine.sampling_params import SamplingParams
from manylora.kernels.weight_format import WeightFormat
from step_driver import StepDriver
from stored_adapters import store_adapter

EXPECTED = json.loads(demo.EXPECTED.read_text())
ROOT = Path(__file__).resolve().parents[2]
CORPUS_SEED = 20


def answers(weights: Weights, dtype: Any, folder: Path) -> dict[str, list[int]]:
    """Greedy answers of base and adapters to all recorded questions, by `<style> <number>`."""
    parts = build_engine(
        Config(
            model=ModelConfig(
                path=str(demo.MODEL), device="cpu", dtype=dtype, weights=weights, threads=1
            ),
            memory=MemoryConfig(gib=0.1, host_gib=0.02, poison=True),
            scheduler=SchedulerConfig(max_running=48),
            server=ServerConfig(data_dir=folder),
        )
    )
    assert parts.ready.memory.weights == weights
    blobs = LocalBlobs(folder / "blobs")
    refs = {
        style: store_adapter(blobs, demo.ADAPTERS / style, parts.ready.base)
        for style in EXPECTED["adapters"]
    }
    params = SamplingParams(temperature=0.0, max_tokens=64)
    try:
        return run_all(
            parts.core,
            [
                GenerationRequest(
                    request_id=f"{style} {number}",
                    prompt_token_ids=question["prompt_token_ids"],
                    params=params,
                    adapter=refs.get(style),
                )
                for number, question in enumerate(EXPECTED["questions"])
                for style in ("base", *refs)
            ],
        )
    finally:
        parts.core.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_base_and_adapters_answer_as_recorded(dtype: str, tmp_path: Path) -> None:
    found = answers("int8", dtype, tmp_path)
    assert len(found) == 6 * len(EXPECTED["questions"])
    for number, question in enumerate(EXPECTED["questions"]):
        for style, expected in question["answer_token_ids"].items():
            assert found[f"{style} {number}"] == expected, (style, question["question"])


@pytest.fixture(scope="module")
def held_out() -> list[list[int]]:
    """Token ids of conversations with phrasings that the demo was not trained on, in all styles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        text = importlib.import_module("demo_text")
    tokenizer: Any = AutoTokenizer.from_pretrained(demo.MODEL)
    exchanges = text.make_corpus(CORPUS_SEED).held_out
    styles = (text.BASE, *text.STYLES)
    return [
        text.chat_sample(tokenizer, exchange, styles[number % len(styles)]).ids
        for number, exchange in enumerate(exchanges[:240])
    ]


def perplexity(weights: WeightFormat, texts: list[list[int]]) -> float:
    """Of all tokens but the first of each text."""
    driver = StepDriver(demo.MODEL, weights=weights, num_pages=4000)
    losses = [
        torch.nn.functional.cross_entropy(scores[:-1], torch.tensor(ids[1:]), reduction="none")
        for start in range(0, len(texts), 32)
        for ids, scores in zip(
            texts[start : start + 32],
            driver.logits([driver.request(ids) for ids in texts[start : start + 32]]),
            strict=True,
        )
    ]
    return math.exp(torch.cat(losses).mean())


def test_text_that_was_not_trained_on_is_about_as_likely(held_out: list[list[int]]) -> None:
    whole = perplexity("bf16", held_out)
    assert whole > 1.5
    assert perplexity("int8", held_out) == pytest.approx(whole, rel=0.01)
    assert perplexity("int4", held_out) == pytest.approx(whole, rel=0.2)
