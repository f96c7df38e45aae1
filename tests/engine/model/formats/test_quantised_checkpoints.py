"""Quantised checkpoints of every format answer as the dequantised model does in transformers, with adapters as PEFT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from manylora.engine.model.checkpoint.weights import load_decoder
from manylora.engine.model.linear import Linear, make_linear
from manylora.engine.model.spec import read_spec
from manylora.kernels.quantised import Int8Weight
from manylora.kernels.weight_format import WeightFormat
from quantised_cases import CASES
from quantised_models import (
    TOKENS,
    TOLERANCE,
    QuantisedModel,
    assert_same,
    expected_logits,
    expected_logits_of_adapters,
    make_quantised,
)
from step_driver import StepDriver
from tiny_models import ALL_LINEAR, make_adapter, make_model

ARCHITECTURES = ("llama", "qwen2", "qwen3")
FIRST_OF_METHOD = {
    case.config["quant_method"]: name for name, case in reversed(CASES.items())
}.values()
PAIRS = [(case, "qwen2") for case in CASES] + [
    (case, architecture) for case in FIRST_OF_METHOD for architecture in ("llama", "qwen3")
]
"""Formats know nothing of architectures: each is read into one, and one format of each method into all."""
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


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(root / name, name) for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def originals(models: dict[str, Path]) -> dict[str, torch.Tensor]:
    """The logits of each model before it is quantised."""
    return {name: expected_logits(folder) for name, folder in models.items()}


@pytest.fixture(scope="module")
def adapters(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters for Qwen 2; random ones, which the base's weights have no part in."""
    root = tmp_path_factory.mktemp("adapters")
    return [
        make_adapter(models["qwen2"], root / name, seed=seed, **fields)
        for seed, (name, fields) in enumerate(ADAPTERS.items())
    ]


def made(case: str, source: Path, folder: Path, **options: Any) -> QuantisedModel:
    return make_quantised(source, folder, CASES[case].config, CASES[case].encode, **options)


@pytest.mark.parametrize(("case", "architecture"), PAIRS)
def test_logits_equal_the_dequantised_model(
    case: str,
    architecture: str,
    models: dict[str, Path],
    originals: dict[str, torch.Tensor],
    adapters: list[Path],
    tmp_path: Path,
) -> None:
    """And, for Qwen 2, PEFT on it."""
    model = made(case, models[architecture], tmp_path)
    expected = expected_logits(model.decoded)

    assert (expected - originals[architecture]).abs().max() > 2 * TOLERANCE
    driver = StepDriver(model.stored)
    assert_same(driver.logits_alone(TOKENS), expected)
    found = driver.spec.quantisation
    assert found is not None
    assert (found.bits, found.folds_input_scale) == (CASES[case].bits, CASES[case].folds)
    if architecture != "qwen2":
        return
    driver.base = replace(
        driver.base, folds_input_scale=False
    )  # as if the adapters were made on this checkpoint
    with_adapters = expected_logits_of_adapters(model.decoded, adapters)
    for adapter, logits in zip(adapters, with_adapters, strict=True):
        assert (logits - expected).abs().max() > 2 * TOLERANCE
        assert_same(driver.logits_alone(TOKENS, driver.load_adapter(adapter)), logits)


@pytest.mark.parametrize("case", ["w4a16-ordered", "fine-grained", "gptq-asymmetric", "nf4"])
def test_linears_that_were_left_out_stay_as_they_are(
    case: str, models: dict[str, Path], tmp_path: Path
) -> None:
    model = made(case, models["qwen3"], tmp_path, plain=("o_proj", "gate_proj"))
    assert_same(StepDriver(model.stored).logits_alone(TOKENS), expected_logits(model.decoded))


def kept(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[torch.Tensor | Int8Weight]:
    """What layers are made of when a checkpoint is loaded into 8 bits in bfloat16."""
    found: list[torch.Tensor | Int8Weight] = []

    def note(
        weight: torch.Tensor | Int8Weight,
        bias: torch.Tensor | None = None,
        weights: WeightFormat = "bf16",
    ) -> Linear:
        found.append(weight)
        return make_linear(weight, bias, weights)

    monkeypatch.setattr("manylora.engine.model.checkpoint.weights.make_linear", note)
    load_decoder(folder, read_spec(folder), torch.bfloat16, torch.device("cpu"), weights="int8")
    return found


def test_rows_that_are_stored_in_8_bits_are_kept_as_they_are(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made("w8a8", models["llama"], tmp_path)
    stored = load_file(model.stored / "model.safetensors")
    first = "model.layers.0.self_attn."
    qkv = kept(monkeypatch, model.stored)[0]
    assert isinstance(qkv, Int8Weight)
    codes = torch.cat([stored[f"{first}{name}_proj.weight"] for name in "qkv"])
    scales = torch.cat(
        [stored[f"{first}{name}_proj.weight_scale"].float().flatten() for name in "qkv"]
    )
    assert codes.min() == -128, "-128: rounding these rows again would change them"
    assert torch.equal(qkv.codes, codes)
    assert torch.equal(qkv.scales, scales)


def test_what_is_rounded_to_8_bits_is_not_rounded_to_16_before(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    floats = kept(monkeypatch, models["llama"])[0]
    assert isinstance(floats, torch.Tensor)
    assert floats.dtype == torch.float32
    mixed = made("w8a8", models["llama"], tmp_path, plain=("k_proj",))
    assert isinstance(kept(monkeypatch, mixed.stored)[0], torch.Tensor), (
        "one of the three is stored in floats"
    )
