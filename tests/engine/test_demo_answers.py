"""The engine gives the demo's recorded answers on each device, with more adapters than its pages hold."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from manylora import demo
from manylora.engine.llm import LLM
from manylora.engine.sampling_params import SamplingParams

GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)


@pytest.mark.parametrize(
    ("device", "cuda_graphs", "count"),
    [
        ("cpu", True, 20),
        pytest.param("cuda", True, 200, marks=GPU),
        pytest.param("cuda", False, 200, marks=GPU),
    ],
)
def test_answers_are_those_that_are_recorded(device: str, cuda_graphs: bool, count: int) -> None:
    asked = [
        (question["prompt_token_ids"], name, answer)
        for question in json.loads(demo.EXPECTED.read_text())["questions"]
        for name, answer in question["answers"].items()
    ]
    drawn = random.Random(0).choices(asked, k=count)
    settings: dict[str, Any] = {
        "memory_gib": 1 / 512,
        "host_gib": 1 / 64,
        "max_running": 16,
        "poison": True,
    }
    with LLM(
        demo.MODEL, device=device, dtype="float32", cuda_graphs=cuda_graphs, **settings
    ) as llm:
        programs: Any = llm.engine.core._runner.programs
        is_recorded = programs is not None and programs.num_recorded > 0
        assert is_recorded == (device == "cuda" and cuda_graphs)
        answers = llm.generate(
            [prompt for prompt, _, _ in drawn],
            SamplingParams(max_tokens=64, temperature=0),
            [None if name == "base" else demo.ADAPTERS / name for _, name, _ in drawn],
        )
        evictions = llm.engine.core.status().evictions
    assert [found.text for found in answers] == [answer for _, _, answer in drawn]
    assert evictions["adapter"] > 0
