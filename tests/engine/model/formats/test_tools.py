"""The formats' own tools agree: what they wrote is read, and they read what the tests' writers write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import CompressedTensorsConfig, FineGrainedFP8Config

from gguf_writer import q4_k, q5_k, q6_k, write_gguf
from manylora.engine.model.formats import FORMATS, dequantised
from manylora.engine.model.formats.stored import StoredLinear
from manylora.engine.model.quantisation import read_quantisation
from manylora.engine.model.spec import resolve_model
from quantised_cases import BNB, CASES
from quantised_models import TOKENS, WEIGHTS, Tensors, make_quantised
from step_driver import StepDriver
from tiny_models import make_model, reference_logits

BY_BITSANDBYTES = Path(__file__).parent / "bitsandbytes-0.50.2.safetensors"
"""A weight [64, 48] as `bitsandbytes.functional` quantised and dequantised it; names begin with the kind."""
COMPRESSED = [
    name for name, case in CASES.items() if case.config["quant_method"] == "compressed-tensors"
]
REMOVED = ("w4a16-ordered",)
"""compressed-tensors 0.20 does not read an order of inputs any more."""


def read(config: dict[str, Any], tensors: Tensors, shape: torch.Size) -> torch.Tensor:
    """The weight of a linear, whose tensors must be just those that the format has."""
    quantisation = read_quantisation(config)
    linear = StoredLinear("linear", shape[0], shape[1], quantisation, tensors)
    parts = FORMATS[quantisation.layout].parts(linear, set(tensors))
    assert tensors.keys() <= parts.keys()
    assert all(parts[name].is_optional for name in parts.keys() - tensors.keys())
    for name, tensor in tensors.items():
        assert not parts[name].shapes or tuple(tensor.shape) in parts[name].shapes
    return dequantised(linear)


@pytest.mark.parametrize(
    ("preset", "storage"),
    [
        ("W4A16", "pack-quantized"),
        ("W4A16_ASYM", "pack-quantized"),
        ("W8A16", "pack-quantized"),
        ("W8A8", "int-quantized"),
        ("FP8", "float-quantized"),
        ("FP8_DYNAMIC", "float-quantized"),
        ("FP8_BLOCK", "float-quantized"),
    ],
)
def test_what_compressed_tensors_writes_is_read(preset: str, storage: str) -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    scheme = preset_name_to_scheme(preset, ["Linear"])
    scheme.format = storage
    low, high = _ranges(weight, scheme.weights)
    scale, zero = calculate_qparams(low, high, scheme.weights)
    compressor: Any = BaseCompressor.get_value_from_registry(storage)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    if scheme.weights.symmetric:
        del state["weight_zero_point"]
    stored = compressor.compress(state, scheme)
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=storage).model_dump(
        mode="json"
    )

    found = read(config, stored, weight.shape)
    torch.testing.assert_close(
        found, compressor.decompress(stored, scheme)["weight"], rtol=1e-5, atol=1e-6
    )
    assert 0 < (found - weight).norm() / weight.norm() < 0.15


def _ranges(weight: torch.Tensor, settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value of each scale."""
    if settings.strategy == "tensor":
        return weight.amin().reshape(1), weight.amax().reshape(1)
    if settings.strategy == "block":
        rows, columns = settings.block_structure
        blocks = weight.view(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns)
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.view(
        len(weight), -1, settings.group_size if settings.strategy == "group" else weight.shape[1]
    )
    return groups.amin(-1), groups.amax(-1)


@pytest.mark.parametrize("case", [name for name in COMPRESSED if name not in REMOVED])
def test_transformers_reads_compressed_tensors_alike(case: str, tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", "qwen2", intermediate_size=128)
    made = make_quantised(source, tmp_path, CASES[case].config, CASES[case].encode)
    tensors = load_file(
        made.stored / WEIGHTS
    )  # compressed-tensors rounds weights to the format of the scales
    save_file(
        {
            name: part.float() if part.dtype == torch.bfloat16 else part
            for name, part in tensors.items()
        },
        made.stored / WEIGHTS,
        {"format": "pt"},
    )
    settings = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        made.stored, dtype=torch.float32, attn_implementation="eager", quantization_config=settings
    )
    torch.testing.assert_close(
        StepDriver(made.stored).logits_alone(TOKENS),
        reference_logits(model, TOKENS),
        rtol=1e-3,
        atol=1e-3,
    )


def test_transformers_reads_fine_grained_float8_alike(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", "llama", intermediate_size=128)
    made = make_quantised(
        source, tmp_path, CASES["fine-grained"].config, CASES["fine-grained"].encode
    )
    settings = FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        made.stored, dtype=torch.float32, attn_implementation="eager", quantization_config=settings
    )
    torch.testing.assert_close(
        StepDriver(made.stored).logits_alone(TOKENS),
        reference_logits(model, TOKENS),
        rtol=1e-3,
        atol=1e-3,
    )


def test_compressed_tensors_unpacks_awq_alike() -> None:
    weight = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    stored, _ = CASES["awq"].encode(weight)
    values, zeros = AutoAWQConverter.unpack_awq(
        stored["qweight"].contiguous(), stored["qzeros"].contiguous(), 4
    )
    values, zeros = (
        part & 15
        for part in AutoAWQConverter.reverse_awq_order(values, zeros, 4)
        if part is not None
    )
    expected = (values - zeros.repeat_interleave(16, 0)).float() * stored[
        "scales"
    ].float().repeat_interleave(16, 0)
    assert torch.equal(read(dict(CASES["awq"].config), stored, weight.shape), expected.T)


@pytest.mark.parametrize("kind", ["nf4", "nf4-nested", "fp4", "int8"])
def test_what_bitsandbytes_wrote_is_read(kind: str) -> None:
    tensors = load_file(BY_BITSANDBYTES)
    stored = {
        name.removeprefix(f"{kind}."): part
        for name, part in tensors.items()
        if name.startswith(f"{kind}.")
    }
    expected = stored.pop("dequantised")
    config = {**BNB, "load_in_8bit": True}
    if kind != "int8":
        config = {**BNB, "load_in_4bit": True, "bnb_4bit_quant_type": kind.removesuffix("-nested")}
    torch.testing.assert_close(read(config, stored, expected.shape), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "kind", [Type.Q8_0, Type.Q4_0, Type.Q4_K, Type.Q5_K, Type.Q6_K], ids=lambda kind: kind.name
)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_transformers_reads_gguf_alike(
    kind: Type, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    head_dim = (
        128 if architecture == "qwen3" else 64
    )  # transformers does not read it from files of Qwen 3
    source = make_model(tmp_path / "source", architecture, head_dim=head_dim, **sizes)
    blocks = {Type.Q4_K: q4_k, Type.Q5_K: q5_k, Type.Q6_K: q6_k}.get(kind)
    write_gguf(source, tmp_path / "gguf" / "tiny.gguf", {"": kind}, blocks=blocks)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "gguf", gguf_file="tiny.gguf", dtype=torch.float32, attn_implementation="eager"
    )
    found = StepDriver(resolve_model(str(tmp_path / "gguf"))).logits_alone(TOKENS)
    torch.testing.assert_close(found, reference_logits(model, TOKENS), rtol=1e-3, atol=1e-3)
