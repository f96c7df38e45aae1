"""GGUF files are served as they are: weights, config and tokenizer from the file."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType, GGUFWriter

from gguf_writer import Blocks, q4_k, q5_k, q6_k, write_gguf
from manylora.engine.model.checkpoint.weights import base_digest, load_decoder
from manylora.engine.model.spec import DecoderSpec, read_spec, resolve_model
from manylora.engine.model.weight_files import weight_files
from manylora.engine.text.tokenizer import Tokenizer, read_eos_token_ids
from manylora.errors import ConfigError
from quantised_models import (
    TOKENS,
    WEIGHTS,
    as_checkpoint,
    assert_same,
    expected_logits,
    expected_logits_of_adapters,
)
from step_driver import StepDriver
from tiny_models import ALL_LINEAR, make_adapter, make_model

ARCHITECTURES = ("llama", "qwen2", "qwen3")
SMALL: dict[str, tuple[dict[str, Type], int | None]] = {
    "f32": ({}, None),
    "f16": ({"": Type.F16}, None),
    "bf16": ({"": Type.BF16}, None),
    "q8_0": ({"": Type.Q8_0}, 8),
    "q4_0": ({"": Type.Q4_0}, 4),
    "mixed": (
        {
            "": Type.Q4_0,
            "attn_v.weight": Type.Q8_0,
            "output.weight": Type.F16,
            "ffn_up.weight": Type.F32,
        },
        4,
    ),
}
"""Types by name, and the bits of most weights."""
K_QUANTS: dict[Type, tuple[Blocks, int]] = {
    Type.Q4_K: (q4_k, 4),
    Type.Q5_K: (q5_k, 5),
    Type.Q6_K: (q6_k, 6),
}
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "head_dim": 64,
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = {"intermediate_size": 128, "head_dim": 32}
    return {
        name: make_model(root / name, name, tied=name == "qwen3", **sizes) for name in ARCHITECTURES
    }


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [(kind, "llama") for kind in SMALL]
    + [(kind, name) for kind in ("f16", "q4_0") for name in ("qwen2", "qwen3")],
)
def test_logits_equal_the_dequantised_model(
    kind: str, architecture: str, models: dict[str, Path], tmp_path: Path
) -> None:
    kinds, bits = SMALL[kind]
    decoded = write_gguf(models[architecture], tmp_path / "tiny.gguf", kinds)
    folder = resolve_model(str(tmp_path / "tiny.gguf"))
    reference = as_checkpoint(models[architecture], tmp_path / "decoded", decoded)

    assert_same(StepDriver(folder).logits_alone(TOKENS), expected_logits(reference))
    found = read_spec(folder).quantisation
    assert (found.bits if found else None) == bits


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [*((kind, "llama") for kind in K_QUANTS), (Type.Q4_K, "qwen2"), (Type.Q5_K, "qwen3")],
    ids=lambda value: getattr(value, "name", value),
)
def test_blocks_of_256_equal_the_dequantised_model(
    kind: Type, architecture: str, tmp_path: Path
) -> None:
    source = make_model(tmp_path / "source", architecture, **WIDE)
    decoded = write_gguf(source, tmp_path / "tiny.gguf", {"": kind}, blocks=K_QUANTS[kind][0])
    folder = resolve_model(str(tmp_path / "tiny.gguf"))

    assert_same(
        StepDriver(folder).logits_alone(TOKENS),
        expected_logits(as_checkpoint(source, tmp_path / "decoded", decoded)),
    )
    found = read_spec(folder).quantisation
    assert found is not None
    assert (found.bits, found.folds_input_scale) == (K_QUANTS[kind][1], False)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_adapters_equal_peft_on_the_dequantised_model(
    architecture: str, models: dict[str, Path], tmp_path: Path
) -> None:
    decoded = write_gguf(models[architecture], tmp_path / "tiny.gguf", {"": Type.Q4_0})
    reference = as_checkpoint(models[architecture], tmp_path / "decoded", decoded)
    driver = StepDriver(resolve_model(str(tmp_path / "tiny.gguf")))
    adapters = [
        make_adapter(reference, tmp_path / f"adapter-{seed}", seed=seed, targets=targets)
        for seed, targets in enumerate((("q_proj", "v_proj"), ALL_LINEAR, ("k_proj", "down_proj")))
    ]
    for adapter, logits in zip(
        adapters, expected_logits_of_adapters(reference, adapters), strict=True
    ):
        assert_same(driver.logits_alone(TOKENS, driver.load_adapter(adapter)), logits)


def test_the_config_is_read_from_the_file(models: dict[str, Path], tmp_path: Path) -> None:
    for name, source in models.items():
        write_gguf(source, tmp_path / f"{name}.gguf", {"": Type.F32})
        found, given = read_spec(resolve_model(str(tmp_path / f"{name}.gguf"))), read_spec(source)
        assert without_rounding(found) == without_rounding(given)


def without_rounding(spec: DecoderSpec) -> dict[str, Any]:
    """The fields; the file has floats of 32 bits."""
    fields = {name: getattr(spec, name) for name in spec.__slots__}
    return {**fields, "norm_eps": np.float32(spec.norm_eps)}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("linear", {"rope.scaling.factor": 4.0}),
        ("yarn", {"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}),
    ],
)
def test_a_scaled_rotary_embedding_is_read(
    kind: str, fields: dict[str, Any], models: dict[str, Path], tmp_path: Path
) -> None:
    write_gguf(
        models["qwen2"], tmp_path / "a.gguf", {}, fields={"rope.scaling.type": kind, **fields}
    )
    rope = read_spec(resolve_model(str(tmp_path / "a.gguf"))).rope
    assert (rope.kind, rope.factor) == (kind, 4.0)
    assert rope.original_positions == fields.get("rope.scaling.original_context_length", 0)


@pytest.mark.parametrize("original", [64, 128])
def test_the_rotary_factors_of_a_llama_3_equal_transformers(original: int, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    source = make_model(tmp_path / "source", "llama", head_dim=32, rope_parameters=rope)
    factors = llama3_factors(32, 500_000.0, 8.0, original)
    decoded = write_gguf(source, tmp_path / "a.gguf", {}, factors=factors)
    folder = resolve_model(str(tmp_path / "a.gguf"))
    assert read_spec(folder).rope == read_spec(source).rope
    assert_same(
        StepDriver(folder).logits_alone(TOKENS),
        expected_logits(as_checkpoint(source, tmp_path / "decoded", decoded)),
    )


def llama3_factors(head_dim: int, theta: float, factor: float, original: int) -> np.ndarray:
    """As convert_hf_to_gguf.py computes them."""
    found = []
    for frequency in 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim):
        length = 2 * np.pi / frequency
        smooth = (original / length - 1.0) / (4.0 - 1.0)
        if length < original / 4.0:
            found.append(1.0)
        elif length > original / 1.0:
            found.append(factor)
        else:
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found)


def test_the_tokenizer_is_read_from_the_file(models: dict[str, Path], tmp_path: Path) -> None:
    write_gguf(models["llama"], tmp_path / "tiny.gguf", {"": Type.Q8_0})
    folder = resolve_model(str(tmp_path / "tiny.gguf"))
    found, given = Tokenizer(folder), Tokenizer(models["llama"])
    for text in ("Hello, world", "naïve 東京\n\n  x", "<|user|>hi<|end|>"):
        assert found.encode(text) == given.encode(text)
        assert found.decode(found.encode(text)) == given.decode(given.encode(text))
    messages = [{"role": "user", "content": "Say hello."}]
    assert found.chat_prompt(messages) == given.chat_prompt(messages)
    assert found.eos_token_ids == given.eos_token_ids == read_eos_token_ids(folder) == {257}


def test_a_real_tokenizer_is_read_from_the_file(tmp_path: Path) -> None:
    demo = Path(__file__).parents[4] / "manylora" / "demo" / "manylora-demo"
    write_gguf(demo, tmp_path / "demo.gguf", {"": Type.F16})
    found, given = Tokenizer(resolve_model(str(tmp_path / "demo.gguf"))), Tokenizer(demo)
    for text in (
        "Where is the nearest lighthouse?",
        "It's 12,500 euros -- isn't it?\n",
        "  indented\tcode",
    ):
        assert found.encode(text) == given.encode(text)


def test_a_folder_with_one_file_is_its_model(models: dict[str, Path], tmp_path: Path) -> None:
    write_gguf(models["llama"], tmp_path / "a" / "tiny.gguf", {"": Type.Q8_0})
    folder = resolve_model(str(tmp_path / "a"))
    assert folder == resolve_model(str(tmp_path / "a" / "tiny.gguf"))
    assert [path.resolve() for path in weight_files(folder)] == [tmp_path / "a" / "tiny.gguf"]
    assert base_digest(folder).startswith("sha256:")
    shutil.copy(tmp_path / "a" / "tiny.gguf", tmp_path / "a" / "other.gguf")
    with pytest.raises(
        ConfigError, match=r"several GGUF files: name one of other\.gguf, tiny\.gguf"
    ):
        resolve_model(str(tmp_path / "a"))


def test_a_file_that_changed_is_read_again(models: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(models["llama"], path, {"": Type.Q8_0})
    before = resolve_model(str(path))
    path.unlink()
    write_gguf(models["qwen2"], path, {"": Type.Q8_0})
    after = resolve_model(str(path))
    assert (read_spec(before).architecture, read_spec(after).architecture) == (
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
    )


def test_a_folder_of_safetensors_beside_a_gguf_file_is_taken_as_it_is(
    models: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(models["llama"], tmp_path / "both")
    (tmp_path / "both" / "x.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path / "both")) == tmp_path / "both"
    assert weight_files(tmp_path / "both") == [tmp_path / "both" / "model.safetensors"]


def test_a_gguf_file_beside_several_safetensors_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").touch()
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"x": "model-1.safetensors"}}'
    )
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert weight_files(tmp_path) == [tmp_path / "model-1.safetensors"]


def test_a_cache_that_cannot_be_written_is_told(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(models["llama"], tmp_path / "tiny.gguf", {})
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        resolve_model(str(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("kept", [0.001, 0.02, 0.3, 0.6, 0.99])
def test_a_file_that_is_cut_off_is_refused(
    kept: float, models: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(models["llama"], path, {"": Type.Q8_0})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(ConfigError, match=r"tiny\.gguf: it is no GGUF file, or damaged or cut off"):
        resolve_model(str(path))


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ConfigError, match="it is no GGUF file"):
        resolve_model(str(tmp_path / "x.gguf"))


def nan_scale(tensors: dict[str, np.ndarray]) -> None:
    tensors["blk.1.attn_q.weight"][0, :2] = np.array([np.nan], np.float16).view(np.uint8)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"expert_count": 8}, r"llama\.expert_count: not understood"),
        ({"attention.sliding_window": 512}, r"llama\.attention\.sliding_window: not understood"),
        (
            {"rope.scaling.type": "longrope"},
            r"llama\.rope\.scaling\.type: 'longrope' is not served",
        ),
        (
            {"rope.scaling.attn_factor": 2.0},
            r"llama\.rope\.scaling\.attn_factor: only 1\.0 is served",
        ),
    ],
)
def test_metadata_that_is_not_served_is_named(
    fields: dict[str, Any], said: str, models: dict[str, Path], tmp_path: Path
) -> None:
    write_gguf(models["llama"], tmp_path / "a.gguf", {}, fields=fields)
    with pytest.raises(ConfigError, match=said):
        resolve_model(str(tmp_path / "a.gguf"))


def test_rotary_factors_that_are_no_llama_3s_are_refused(
    models: dict[str, Path], tmp_path: Path
) -> None:
    write_gguf(models["llama"], tmp_path / "a.gguf", {}, factors=np.linspace(1, 3, 16))
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        resolve_model(str(tmp_path / "a.gguf"))


def test_an_architecture_that_is_not_served_is_named(
    models: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(models["llama"], tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps({**config, "model_type": "gemma2"}))
    write_gguf(tmp_path / "source", tmp_path / "a.gguf", {})
    with pytest.raises(
        ConfigError, match=r"general\.architecture: 'gemma2' is not served; served are llama"
    ):
        resolve_model(str(tmp_path / "a.gguf"))


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _array(kind: int, *items: bytes, count: int | None = None) -> bytes:
    return struct.pack("<IIQ", 9, kind, len(items) if count is None else count) + b"".join(items)


def _head(value: bytes, *, key: str = "a", fields: int = 1, tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + _string(key) + value


U8 = struct.pack("<IB", 0, 1)
HUGE = 1 << 62


@pytest.mark.parametrize(
    "content",
    [
        _head(_array(0, count=HUGE)),
        _head(_array(8, count=HUGE)),
        _head(_array(0, b"x", count=2)),
        _head(struct.pack("<IQ", 8, HUGE)),
        _head(U8, fields=HUGE),
        _head(U8, tensors=HUGE),
        _head(U8, tensors=1) + _string("t") + struct.pack("<I", 1 << 31),
        _head(struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 0, 0)),
    ],
    ids=["numbers", "strings", "bytes", "string", "fields", "tensors", "dimensions", "nesting"],
)
def test_sizes_that_the_file_does_not_have_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.gguf: it is no GGUF file, or damaged or cut off"):
        resolve_model(str(tmp_path / "a.gguf"))


def test_rotary_factors_of_another_number_are_refused(
    models: dict[str, Path], tmp_path: Path
) -> None:
    write_gguf(models["llama"], tmp_path / "a.gguf", {}, factors=np.ones(17))
    with pytest.raises(
        ConfigError,
        match=r"a\.gguf is .*rope_freqs\.weight: expected 16 factors for a head, got \[17\]",
    ):
        resolve_model(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("general.architecture", [1, 2], r"general\.architecture: expected a string, got \[1, 2\]"),
        (
            "tokenizer.ggml.eos_token_id",
            [1, 2],
            r"tokenizer\.ggml\.eos_token_id: expected a whole number >= 0, got \[1",
        ),
        (
            "tokenizer.ggml.eot_token_id",
            "x",
            r"tokenizer\.ggml\.eot_token_id: expected a whole number >= 0, got 'x'",
        ),
        ("tokenizer.ggml.tokens", 7, r"tokenizer\.ggml\.tokens: expected a list of strings, got 7"),
        (
            "tokenizer.ggml.tokens",
            [7],
            r"tokenizer\.ggml\.tokens: expected a list of strings, got \[7\]",
        ),
        ("llama.block_count", "3", r"llama\.block_count: expected a whole number >= 1, got '3'"),
        ("general.name", b"\xff\xfe", "its head cannot be read"),
    ],
)
def test_metadata_of_a_wrong_kind_is_named(
    key: str,
    value: object,
    said: str,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write(writer: GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        adders: dict[type, Callable[[str, Any], None]] = {
            list: writer.add_array,
            str: writer.add_string,
            bytes: lambda name, text: writer.add_key_value(name, text, GGUFValueType.STRING),
            int: writer.add_uint32,
        }
        adders[type(value)](key, value)
        write_header(writer)

    write_header = GGUFWriter.write_header_to_file
    monkeypatch.setattr(GGUFWriter, "write_header_to_file", write)
    write_gguf(models["llama"], tmp_path / "a.gguf", {})
    with pytest.raises(ConfigError, match=rf"a\.gguf is damaged or not served: .*{said}"):
        resolve_model(str(tmp_path / "a.gguf"))


def test_an_embedding_without_a_shape_is_refused(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(writer: GGUFWriter, name: str, tensor: np.ndarray, **more: Any) -> None:
        add_tensor(
            writer,
            name,
            tensor.flatten()[0].reshape(()) if name == "token_embd.weight" else tensor,
            **more,
        )

    add_tensor = GGUFWriter.add_tensor
    monkeypatch.setattr(GGUFWriter, "add_tensor", add)
    write_gguf(models["llama"], tmp_path / "a.gguf", {})
    with pytest.raises(ConfigError, match=r"a\.gguf is .*lacks token_embd\.weight, or its shape"):
        resolve_model(str(tmp_path / "a.gguf"))


def test_a_cache_that_others_can_write_to_is_refused(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(models["llama"], tmp_path / "tiny.gguf", {})
    before = os.umask(0)
    try:
        folder = resolve_model(str(tmp_path / "tiny.gguf"))
    finally:
        os.umask(before)
    assert folder == resolve_model(str(tmp_path / "tiny.gguf"))
    for refused in (folder, folder.parent):
        for mode in (0o770, 0o702):
            refused.chmod(mode)
            with pytest.raises(
                ConfigError, match=rf"{refused} is another user's .*; set XDG_CACHE_HOME"
            ):
                resolve_model(str(tmp_path / "tiny.gguf"))
        refused.chmod(0o700)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ConfigError, match=rf"{folder.parent} is another user's"):
        resolve_model(str(tmp_path / "tiny.gguf"))


def _write_with(source: Path, path: Path, edit: Callable[[dict[str, np.ndarray]], None]) -> None:
    """A file whose bytes were changed after it was written."""
    from gguf import GGUFReader

    write_gguf(source, path, {"": Type.Q8_0})
    reader = GGUFReader(path, "r+")
    edit({tensor.name: tensor.data for tensor in reader.tensors})
    reader.data.flush()


def test_values_that_are_damaged_are_named(models: dict[str, Path], tmp_path: Path) -> None:
    _write_with(models["llama"], tmp_path / "a.gguf", nan_scale)
    folder = resolve_model(str(tmp_path / "a.gguf"))
    with pytest.raises(
        ConfigError,
        match=r"layers\.1\.self_attn\.q_proj\.weight has values that are infinite or NaN",
    ):
        load_decoder(folder, read_spec(folder), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model.layers.1.mlp.up_proj.weight": None},
            r"lacks model\.layers\.1\.mlp\.up_proj\.weight",
        ),
        (
            {"model.norm.weight": torch.ones(63)},
            r"model\.norm\.weight must be .*\[64\], got F32 \[63\]",
        ),
        (
            {"model.layers.0.self_attn.q_proj.bias": torch.ones(128)},
            r"lacks model\.layers\.0\.self_attn\.k_proj\.bias",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named_as_in_the_hub_s_layout(
    changes: dict[str, torch.Tensor | None], said: str, models: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    tensors = {**load_file(models["llama"] / WEIGHTS), **changes}
    source = as_checkpoint(
        models["llama"], tmp_path / "s", {n: t for n, t in tensors.items() if t is not None}
    )
    write_gguf(source, tmp_path / "a.gguf", {"": Type.F16})
    folder = resolve_model(str(tmp_path / "a.gguf"))
    with pytest.raises(ConfigError, match=said):
        load_decoder(folder, read_spec(folder), torch.float32, torch.device("cpu"))
