"""Logits with adapters equal those of transformers with PEFT, alone and mixed in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from manylora.kernels import dispatch
from step_driver import StepDriver
from tiny_models import (
    ALL_LINEAR,
    ARCHITECTURES,
    load_reference,
    make_adapter,
    make_model,
    prompt,
    reference_logits,
)

TOLERANCE = 1e-4
ADAPTERS: dict[str, dict[str, Any]] = {
    "qv-rank8": {"rank": 8},
    "all-rank1": {"rank": 1, "alpha": 2, "targets": ALL_LINEAR},
    "all-rank13": {"rank": 13, "targets": ALL_LINEAR},
    "all-rank64": {"rank": 64, "alpha": 32, "targets": ALL_LINEAR},
    "mlp-rslora": {
        "rank": 16,
        "alpha": 4,
        "targets": ("gate_proj", "down_proj"),
        "use_rslora": True,
    },
    "patterns": {
        "rank": 4,
        "targets": ALL_LINEAR,
        "rank_pattern": {"layers.1.self_attn.q_proj": 24, "up_proj": 3},
        "alpha_pattern": {"v_proj": 40, "layers.2.mlp.down_proj": 1},
    },
    "one-layer": {"rank": 8, "targets": ("o_proj", "up_proj"), "layers_to_transform": [1]},
}
QWEN_ADAPTERS = ("qv-rank8", "all-rank13", "patterns")


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(root / name, name, tied=name == "qwen2") for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def adapters(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Path]:
    root = tmp_path_factory.mktemp("adapters")
    wanted = [("llama", name) for name in ADAPTERS]
    wanted += [
        (model, name) for model in ARCHITECTURES if model != "llama" for name in QWEN_ADAPTERS
    ]
    return {
        (model, name): make_adapter(models[model], root / model / name, seed=seed, **ADAPTERS[name])
        for seed, (model, name) in enumerate(wanted)
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_adapter_alone_equals_peft(
    architecture: str, models: dict[str, Path], adapters: dict[tuple[str, str], Path]
) -> None:
    driver = StepDriver(models[architecture])
    tokens = prompt(21, seed=3)
    base = reference_logits(load_reference(models[architecture]), tokens)
    assert_same(driver.logits_alone(tokens), base)
    for (model, _), folder in adapters.items():
        if model == architecture:
            expected = reference_logits(load_reference(models[model]), tokens, folder)
            assert (expected - base).abs().max() > 0.1
            assert_same(driver.logits_alone(tokens, driver.load_adapter(folder)), expected)


@pytest.mark.parametrize("has_compiler", [True, False], ids=["native kernels", "torch operators"])
def test_a_mixed_batch_equals_peft_row_by_row(
    has_compiler: bool,
    models: dict[str, Path],
    adapters: dict[tuple[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_compiler:
        monkeypatch.setattr(dispatch, "native_library", lambda: None)
    driver = StepDriver(models["llama"])
    folders: list[Path | None] = [
        None,
        *(folder for (model, _), folder in adapters.items() if model == "llama"),
    ]
    slots = [None if folder is None else driver.load_adapter(folder) for folder in folders]
    order = [3, 0, 5, 1, 7, 2, 0, 6, 4, 3]
    prompts = [prompt(5 + 3 * place, seed=place) for place in range(len(order))]
    requests = [
        driver.request(tokens, slots[which]) for tokens, which in zip(prompts, order, strict=True)
    ]

    whole = driver.logits(requests)
    for request in requests:
        request.token_ids.append(7)
    decoded = driver.logits(requests)

    for tokens, which, prefill, step in zip(prompts, order, whole, decoded, strict=True):
        expected = reference_logits(load_reference(models["llama"]), [*tokens, 7], folders[which])
        assert_same(torch.cat((prefill, step)), expected)


def test_a_prompt_in_chunks_beside_others_equals_the_whole_prompt_alone(
    models: dict[str, Path], adapters: dict[tuple[str, str], Path]
) -> None:
    driver = StepDriver(models["qwen2"])
    slots = [driver.load_adapter(adapters["qwen2", name]) for name in QWEN_ADAPTERS]
    tokens = prompt(40, seed=9)
    alone = driver.logits_alone(tokens, slots[1])

    request = driver.request(tokens, slots[1])
    parts = []
    for _ in range(4):
        first, last = (driver.request(prompt(4, seed=1), slots[place]) for place in (0, 2))
        parts.append(driver.logits([first, request, last], 4)[1])
        parts.append(driver.logits([request], 6)[0])

    assert_same(torch.cat(parts), alone)


def test_the_same_prompt_answers_differently_per_adapter_and_the_same_in_any_order(
    models: dict[str, Path], adapters: dict[tuple[str, str], Path]
) -> None:
    driver = StepDriver(models["llama"])
    slots = [
        None,
        *(
            driver.load_adapter(adapters["llama", name])
            for name in ("qv-rank8", "all-rank13", "patterns")
        ),
    ]
    tokens = prompt(9, seed=5)

    apart = [driver.generate([driver.request(tokens, slot)], 10)[0] for slot in slots]
    forward = driver.generate([driver.request(tokens, slot) for slot in slots], 10)
    backward = driver.generate([driver.request(tokens, slot) for slot in reversed(slots)], 10)

    assert len({tuple(answer) for answer in apart}) == len(slots)
    assert forward == apart
    assert backward == apart[::-1]
