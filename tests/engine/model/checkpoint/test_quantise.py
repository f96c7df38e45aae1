"""`quantise` writes checkpoints that Manylora serves, and that others read; its errors are those of the weights."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from gguf_writer import write_gguf
from manylora.engine.model.checkpoint.quantise import TargetFormat, quantise
from manylora.engine.model.checkpoint.weights import load_decoder
from manylora.engine.model.formats import three_half
from manylora.engine.model.spec import read_spec, resolve_model
from manylora.engine.model.weight_files import weight_files
from manylora.errors import ConfigError
from quantised_models import WEIGHTS
from step_driver import StepDriver
from tiny_models import load_reference, make_model, prompt, reference_logits

TARGETS: tuple[TargetFormat, ...] = ("int8", "int4", "q3.5")
WORST: dict[TargetFormat, float] = {"int8": 0.01, "int4": 0.1, "q3.5": 0.15}
"""Relative error of normally distributed weights."""
TOKENS = prompt(21, seed=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.mark.parametrize("target", TARGETS)
def test_the_errors_are_those_of_the_weights_that_are_served(
    target: TargetFormat, model: Path, tmp_path: Path
) -> None:
    errors = quantise(model, tmp_path / "out", target)
    given, served = load_file(model / WEIGHTS), served_weights(tmp_path / "out")

    assert {len(layers) for layers in errors.values()} == {3}
    for path, layers in errors.items():
        for layer, error in enumerate(layers):
            name = f"model.layers.{layer}.{path}.weight"
            expected = (served[name] - given[name]).norm() / given[name].norm()
            assert error == pytest.approx(float(expected), rel=1e-4)
            assert 0 < error < WORST[target]


def served_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the linears in the layers, by stored values; packed ones as compressed-tensors unpacks them."""
    tensors, found = load_file(folder / WEIGHTS), {}
    for name in tensors:
        stem, _, part = name.rpartition(".")
        if part == "weight_minimum":
            levels = three_half.unpack(tensors[f"{stem}.weight_packed"]).float()
            values = (
                levels * tensors[f"{stem}.weight_step"].float()[..., None]
                + tensors[name].float()[..., None]
            )
            width = 112 if "down" in stem else 64
            found[f"{stem}.weight"] = values.flatten(1)[:, :width]
        elif part == "weight_shape":
            found[f"{stem}.weight"] = unpacked(tensors, stem)
        elif part == "weight_scale" and f"{stem}.weight" in tensors:
            found[f"{stem}.weight"] = tensors[f"{stem}.weight"].float() * tensors[name]
    return found


def unpacked(tensors: dict[str, torch.Tensor], stem: str) -> torch.Tensor:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    shape, scale = (
        torch.Size(tensors[f"{stem}.weight_shape"].tolist()),
        tensors[f"{stem}.weight_scale"],
    )
    zero_shape = torch.Size((shape[0], scale.shape[1]))
    q = unpack_from_int32(tensors[f"{stem}.weight_packed"], 4, shape)
    zero = unpack_from_int32(tensors[f"{stem}.weight_zero_point"], 4, zero_shape, packed_dim=0)
    size = shape[1] // scale.shape[1]
    weight: torch.Tensor = (q - zero.repeat_interleave(size, 1)).float() * scale.repeat_interleave(
        size, 1
    )
    return weight


@pytest.mark.parametrize("target", ["int8", "int4"])
def test_transformers_reads_what_is_written(
    target: TargetFormat, model: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    quantise(model, tmp_path / "out", target)
    settings = CompressedTensorsConfig(dequantize=True)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=settings,
    )
    expected = reference_logits(loaded, TOKENS)
    given = reference_logits(load_reference(model), TOKENS)

    torch.testing.assert_close(
        StepDriver(tmp_path / "out").logits_alone(TOKENS), expected, rtol=1e-3, atol=1e-3
    )
    assert (expected - given).abs().max() > 0.01


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_written_says_how_it_is_stored_and_takes_adapters(
    target: TargetFormat, model: Path, tmp_path: Path
) -> None:
    quantise(model, tmp_path / "out", target)
    found = read_spec(tmp_path / "out").quantisation
    assert found is not None
    assert (found.bits, found.folds_input_scale) == (8 if target == "int8" else 4, False)
    assert load_file(tmp_path / "out" / WEIGHTS)["model.embed_tokens.weight"].dtype == torch.float32
    kept = {path.name for path in model.iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == kept | {"recipe.yaml"}


@pytest.mark.parametrize("target", TARGETS)
def test_a_model_in_shards_and_16_bits_is_written_as_such(
    target: TargetFormat, tmp_path: Path
) -> None:
    source = make_model(tmp_path / "source", "llama", sharded=True, dtype=torch.bfloat16)
    quantise(source, tmp_path / "out", target)
    assert [path.name for path in weight_files(tmp_path / "out")] == [
        path.name for path in weight_files(source)
    ]
    load_decoder(tmp_path / "out", read_spec(tmp_path / "out"), torch.float32, torch.device("cpu"))


def test_rows_of_zeros_stay_zeros(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "source")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(model / WEIGHTS)
    tensors[name][:8] = 0
    save_file(tensors, tmp_path / "source" / WEIGHTS)
    for target in TARGETS:
        quantise(tmp_path / "source", tmp_path / target, target)
        assert not served_weights(tmp_path / target)[name][:8].any()


def test_what_cannot_be_quantised_is_refused(model: Path, tmp_path: Path) -> None:
    quantise(model, tmp_path / "out", "int8")
    with pytest.raises(ConfigError, match="exists; name a folder that does not"):
        quantise(model, tmp_path / "out", "int8")
    with pytest.raises(ConfigError, match="already quantised; take the model's original weights"):
        quantise(tmp_path / "out", tmp_path / "twice", "int4")
    with pytest.raises(ConfigError, match=r"format must be one of int8, int4, q3\.5, got 'int2'"):
        quantise(model, tmp_path / "other", "int2")  # type: ignore[arg-type]
    odd = make_model(tmp_path / "odd", "llama", intermediate_size=116)
    with pytest.raises(ConfigError, match="int4 needs inputs in groups of 16"):
        quantise(odd, tmp_path / "other", "int4")
    assert not (tmp_path / "other").exists()


def test_nothing_is_left_of_a_model_with_damaged_values(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "source")
    tensors = load_file(model / WEIGHTS)
    tensors["model.layers.2.mlp.down_proj.weight"][3, 4] = torch.nan
    save_file(tensors, tmp_path / "source" / WEIGHTS)
    with pytest.raises(
        ConfigError, match=r"layers\.2\.mlp\.down_proj\.weight has values that are infinite or NaN"
    ):
        quantise(tmp_path / "source", tmp_path / "out" / "deep", "int4")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_model_that_is_not_whole_is_refused(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "source")
    tensors = load_file(model / WEIGHTS)
    tensors["model.layers.2.mlp.down_proj.weight"] = torch.zeros(64, 111)
    save_file(tensors, tmp_path / "source" / WEIGHTS)
    with pytest.raises(
        ConfigError,
        match=r"layers\.2\.mlp\.down_proj\.weight must be a float tensor of shape \[64, 112\]",
    ):
        quantise(tmp_path / "source", tmp_path / "out", "int8")


def test_a_folder_that_cannot_be_written_is_told(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output: cannot write"):
        quantise(model, tmp_path / "file" / "out", "int8")


def test_a_disk_that_is_full_is_told(model: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(ConfigError, match="output: cannot write"):
            quantise(model, tmp_path / "out" / "deep", "int8")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_gguf_file_is_refused_whatever_it_holds(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for kind in (GGMLQuantizationType.F16, GGMLQuantizationType.F32):
        path = tmp_path / f"{kind.name}.gguf"
        write_gguf(model, path, {"": kind})
        with pytest.raises(
            ConfigError, match="reads safetensors only; take the model's Hugging Face folder"
        ):
            quantise(resolve_model(str(path)), tmp_path / "out", "int8")


def test_the_config_keeps_what_it_said(model: Path, tmp_path: Path) -> None:
    quantise(model, tmp_path / "out", "q3.5")
    given, written = (
        json.loads((folder / "config.json").read_text()) for folder in (model, tmp_path / "out")
    )
    assert written == {
        **given,
        "quantization_config": {"quant_method": "manylora", "format": "q3.5"},
    }
