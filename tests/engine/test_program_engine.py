"""The whole engine on step programs with interpreted kernels, with steps that overlap: the tokens of the C++ kernels.

`tests/engine/execution/test_step_program.py` runs this file in a process that interprets Triton.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from implementations import INTERPRETS, TRITON
from manylora.adapters.lora import step as lora_step
from manylora.engine import build
from manylora.engine.llm import LLM
from manylora.engine.model.checkpoint import weights
from manylora.engine.sampling_params import SamplingParams
from tiny_models import ALL_LINEAR, make_adapter, make_model

pytestmark = pytest.mark.skipif(not INTERPRETS, reason="runs in a process that interprets Triton")
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [20], [5, 6, 7]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=5),
    SamplingParams(temperature=0.9, top_p=0.8, seed=3, max_tokens=7, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=6, repetition_penalty=1.3),
    SamplingParams(temperature=0.8, seed=5, max_tokens=8),
]
GRAMMARS = [None, None, None, 'start: %json {"enum": ["red", "blue"]}']


def generate(
    model: Path, adapters: list[Path | None], overlap: str
) -> list[tuple[list[int], str | None]]:
    llm = LLM(
        str(model),
        overlap=overlap,
        memory_gib=0.02,
        dtype="float32",
        max_rank=16,
        slots=4,
        max_running=4,
        step_tokens=16,
    )
    try:
        outputs = llm.generate(PROMPTS, PARAMS, adapters, GRAMMARS)
        return [(each.token_ids, each.finish_reason) for each in outputs]
    finally:
        llm.close()


def test_an_engine_of_programs_gives_the_tokens_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model", "llama", num_hidden_layers=1)
    folders = [
        make_adapter(model, tmp_path / str(rank), rank=rank, targets=ALL_LINEAR) for rank in (8, 16)
    ]
    adapters = [folders[0], folders[1], None, folders[0]]
    expected = generate(model, adapters, "off")
    assert expected[3][1] == "stop", "the grammar ends it"
    for module in (build, weights, lora_step):
        monkeypatch.setattr(module, "kernels_for", lambda *_: TRITON.make())
    monkeypatch.setattr(build, "runs_beside_host", lambda _: True)
    monkeypatch.setattr(build, "cuda_graphs", lambda: None)
    assert generate(model, adapters, "on") == expected
