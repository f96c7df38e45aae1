"""Models with weights in 8 and 4 bits equal transformers and PEFT with layers rounded in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from manylora.engine.execution.memory_plan import model_bytes
from manylora.engine.model.spec import read_spec
from manylora.kernels import dispatch
from manylora.kernels.native.library import native_library
from manylora.kernels.weight_format import WeightFormat
from rounded_models import round_linears
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

ADAPTERS: dict[str, dict[str, Any]] = {
    "qv-rank8": {"rank": 8},
    "all-rank13": {"rank": 13, "targets": ALL_LINEAR},
    "mlp-rslora": {
        "rank": 16,
        "alpha": 4,
        "targets": ("gate_proj", "down_proj"),
        "use_rslora": True,
    },
}
FORMATS = pytest.mark.parametrize("weights", ["int8", "int4"])
MAX_ERRORS = {"int8": 0.02, "int4": 0.2}
"""Of logits, relative, against weights that are not rounded, where weights are about as large as in real models."""
TURNED = 5e-3
"""Error where only codes differ that lie in the middle between two: the last bit of a sum decides which it is."""


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def reference(folder: Path, weights: str) -> Any:
    return round_linears(load_reference(folder), weights)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(root / name, name, tied=name == "qwen2") for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def adapters(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(models["qwen2"], root / name, seed=seed, **fields)
        for seed, (name, fields) in enumerate(ADAPTERS.items())
    }


@FORMATS
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_those_of_rounded_layers(
    weights: WeightFormat, architecture: str, models: dict[str, Path]
) -> None:
    tokens, folder = prompt(40, seed=3), models[architecture]
    logits = StepDriver(folder, weights=weights).logits_alone(tokens)
    assert error(logits, reference_logits(reference(folder, weights), tokens)) < TURNED
    assert error(logits, reference_logits(reference(folder, "bf16"), tokens)) > 4 * TURNED


@FORMATS
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_come_close_to_those_of_weights_that_are_not_rounded(
    weights: WeightFormat, architecture: str, models: dict[str, Path], tmp_path: Path
) -> None:
    model = load_reference(models[architecture])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight"):
                parameter *= 0.2
    model.save_pretrained(tmp_path)
    tokens = prompt(40, seed=3)
    exact = reference_logits(reference(tmp_path, "bf16"), tokens)
    assert (
        error(StepDriver(tmp_path, weights=weights).logits_alone(tokens), exact)
        < MAX_ERRORS[weights]
    )


@FORMATS
@pytest.mark.parametrize("has_compiler", [True, False], ids=["native kernels", "torch operators"])
def test_adapters_read_what_is_not_rounded_and_add_to_the_output(
    weights: WeightFormat,
    has_compiler: bool,
    models: dict[str, Path],
    adapters: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_compiler:
        monkeypatch.setattr(dispatch, "native_library", lambda: None)
    driver = StepDriver(models["qwen2"], weights=weights)
    folders: list[Path | None] = [None, *adapters.values()]
    slots = [None if folder is None else driver.load_adapter(folder) for folder in folders]
    order = [3, 0, 1, 2, 0, 3]
    prompts = [prompt(5 + 3 * place, seed=place) for place in range(len(order))]
    mixed = driver.logits(
        [driver.request(tokens, slots[which]) for tokens, which in zip(prompts, order, strict=True)]
    )
    base = reference_logits(reference(models["qwen2"], weights), prompts[0])
    for tokens, which, logits in zip(prompts, order, mixed, strict=True):
        expected = reference_logits(reference(models["qwen2"], weights), tokens, folders[which])
        assert error(logits, expected) < TURNED
        if which == 3:
            assert error(expected[: len(base)], base[: len(expected)]) > 0.1


@FORMATS
def test_rows_have_the_same_bits_alone_in_a_batch_and_in_chunks(
    weights: WeightFormat, models: dict[str, Path], adapters: dict[str, Path]
) -> None:
    if native_library() is None:
        pytest.skip("torch operators do not promise it")
    driver = StepDriver(models["qwen2"], weights=weights)
    slots = [None, *(driver.load_adapter(folder) for folder in adapters.values())]
    prompts = [prompt(5 + 9 * place, seed=place) for place in range(len(slots))]
    alone = [driver.logits_alone(tokens, slot) for tokens, slot in zip(prompts, slots, strict=True)]
    together = driver.logits(
        [driver.request(tokens, slot) for tokens, slot in zip(prompts, slots, strict=True)]
    )
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)
    request = driver.request(prompts[3], slots[3])
    chunks = torch.cat([driver.logits([request], 8)[0] for _ in range(4)])
    assert torch.equal(chunks, alone[3][:32])


@FORMATS
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_planned_bytes_are_those_that_are_loaded(
    weights: WeightFormat, architecture: str, models: dict[str, Path]
) -> None:
    if native_library() is None:
        pytest.skip("torch operators keep other layouts")
    folder = models[architecture]
    decoder = StepDriver(folder, weights=weights).decoder
    kept = [decoder._embedding, decoder._next_norms[-1]]
    layers: list[Any] = [decoder._head]
    for layer in decoder._layers:
        kept += [layer.input_norm, layer.post_norm]
        layers += [layer.qkv, layer.o, layer.gate_up, layer.down]
    loaded = sum(tensor.nbytes for tensor in kept)
    for linear in layers:
        loaded += linear._panels.nbytes + linear._scales.nbytes + linear._bias.nbytes
    assert model_bytes(read_spec(folder), weights, 4, on_cpu=True) == loaded
