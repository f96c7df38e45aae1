"""A GGUF file as a folder with the files of a checkpoint: `config.json` and the tokenizer, written once from the file.

Everything that reads a checkpoint can read this folder. It lies in the user's cache, is named after path, size and time
of the file, and has a link to the file. No torch, except for the rotary factors of a Llama 3.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manylora.engine.model.config_fields import ConfigFields, shown
from manylora.errors import ConfigError
from manylora.user_cache import cache_folder, is_private

if TYPE_CHECKING:
    from gguf import GGUFReader

GGUF_FILE = "model.gguf"
LAYOUT = 1
"""Version of the written files; to be raised when they change."""
ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of a Llama 3 with the divisors of its rotary frequencies. The config says the same."""
GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Architectures in the file, with their names in the config."""
FLOATS = ("F32", "F16", "BF16")
END_IDS = {f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")}
TOKENS = "tokenizer.ggml.tokens"
END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>")
"""Tokens that always end an answer in llama.cpp."""
PRETRAINED = [1 << bits for bits in range(5, 21)]
"""Possible context lengths of the pretraining of a Llama 3, which files do not tell."""


def gguf_file(folder: Path) -> Path | None:
    """The GGUF file of a folder without safetensors.

    Raises:
        ConfigError: The folder has several.
    """
    found = [] if any(folder.glob("*.safetensors")) else sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConfigError(
            f"model.path: {folder} has several GGUF files: name one of {names}", param="model.path"
        )
    return found[0] if found else None


def gguf_folder(path: Path) -> Path:
    """Return the folder of a GGUF file; make it if it is missing.

    Raises:
        ConfigError: The file cannot be read, its model is not served, or there is no cache folder that only this user
            can write to.
    """
    path, state = path.absolute(), path.stat()
    key = json.dumps([LAYOUT, str(path), state.st_size, state.st_mtime_ns])
    with _cache_errors_told(path):
        cache = cache_folder("gguf")
        target = cache / hashlib.sha256(key.encode()).hexdigest()[:32]
        if target.exists() and not is_private(target):
            raise PermissionError(f"{target} is another user's or can be written by others")
    if not target.is_dir():
        config = gguf_config(path)
        with _cache_errors_told(path), tempfile.TemporaryDirectory(dir=cache) as temporary:
            made = Path(temporary) / "made"
            made.mkdir(mode=0o700)
            (made / GGUF_FILE).symlink_to(path)
            (made / "config.json").write_text(json.dumps(config, indent=2))
            _write_tokenizer(made)
            _move(made, target)
    return target


@contextmanager
def _cache_errors_told(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: the home folder is unknown
        message = f"model.path: no folder for config and tokenizer of {path}: {error}; set XDG_CACHE_HOME to another"
        raise ConfigError(message, param="model.path") from error


def _move(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():  # if it is there, another process was faster
            raise


def _write_tokenizer(folder: Path) -> None:
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(str(folder), gguf_file=GGUF_FILE).save_pretrained(str(folder))
    except (
        Exception
    ) as error:  # transformers may raise anything for a tokenizer that it cannot read
        path = os.path.realpath(folder / GGUF_FILE)
        message = f"model.path: transformers cannot read the tokenizer of {path}: {error}"
        raise ConfigError(message, param="model.path") from error


def open_gguf(path: Path) -> GGUFReader:
    """Read the head of a GGUF file.

    Raises:
        ConfigError: The file is damaged or cut off, or the package `gguf` is not installed.
    """
    try:
        reader = _bounded_reader()
    except ImportError as error:
        raise ConfigError(
            "model.path: GGUF files need the package gguf: pip install 'manylora[quant]'"
        ) from error
    try:
        return reader(path)
    except (OSError, ValueError, IndexError, KeyError, OverflowError, RecursionError) as error:
        message = (
            f"model.path: cannot read {path}: it is no GGUF file, or damaged or cut off ({error})"
        )
        raise ConfigError(message, param="model.path") from error


def _bounded_reader() -> type[GGUFReader]:
    """Make a reader like that of gguf, for damaged files too. It is a function because gguf need not be installed.

    gguf returns empty arrays past the end of a file, and loops over any number of items that the file claims. This
    reader raises ValueError in both cases.
    """
    import numpy as np
    from gguf import GGUFReader, GGUFValueType

    class BoundedReader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:  # noqa: ANN401
            values = super()._get(offset, dtype, count, override_order)
            if len(values) < count:
                raise ValueError(f"expected {count} values at byte {offset}, got {len(values)}")
            return values

        def _get_field_parts(
            self, orig_offs: int, raw_type: int
        ) -> tuple[int, list[Any], list[int], list[Any]]:
            if (
                raw_type == GGUFValueType.ARRAY
            ):  # type and number of items come first; each item takes at least a byte
                self._get(orig_offs + 12, np.uint8, int(self._get(orig_offs + 4, np.uint64)[0]))
            return super()._get_field_parts(orig_offs, raw_type)

        def _build_fields(self, offs: int, count: int) -> int:
            self._get(offs, np.uint8, int(count) + int(self.fields["GGUF.tensor_count"].contents()))
            return super()._build_fields(offs, count)

    return BoundedReader


def gguf_config(path: Path) -> dict[str, Any]:
    """The `config.json` of a GGUF file.

    Raises:
        ConfigError: The file is damaged, the architecture is not served, or a key is missing, wrong or unknown.
    """
    reader = open_gguf(path)
    try:
        return _config(reader)
    except Exception as error:  # a damaged head may raise anything
        reason = error if isinstance(error, ConfigError) else "its head cannot be read"
        raise ConfigError(
            f"model.path: {path} is damaged or not served: {reason}", param="model.path"
        ) from error


def _config(reader: GGUFReader) -> dict[str, Any]:
    given = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("tokenizer.")
    }
    arch = ConfigFields(given).text("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise ConfigError(
            f"general.architecture: {shown(arch)} is not served; served are {', '.join(GGUF_ARCHITECTURES)}"
        )
    own = {
        name.removeprefix(f"{arch}."): value
        for name, value in given.items()
        if name.startswith(f"{arch}.")
    }
    fields = ConfigFields(own, prefix=f"{arch}.")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    num_heads = fields.integer("attention.head_count")
    hidden = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        fields.require(key, head_dim, default=head_dim)
    if "token_embd.weight" not in tensors or not len(tensors["token_embd.weight"].shape):
        raise ConfigError("the file lacks token_embd.weight, or its shape")
    config = {
        "architectures": [GGUF_ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.integer("context_length"),
        "rope_parameters": _rope(fields, tensors, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": _end_ids(reader),
        **_storage(reader),
    }
    fields.refuse_unread(("vocab_size", "rope.scaling.finetuned"))
    if arch != "qwen2" and "blk.0.attn_q.bias" in tensors:
        config["attention_bias"] = True
    if "blk.0.ffn_gate.bias" in tensors:
        config["mlp_bias"] = True
    return config


def _storage(reader: GGUFReader) -> dict[str, Any]:
    """Fields of the config about number formats. The type of most weights decides."""
    sizes: Counter[str] = Counter(F32=0)
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    usual = sizes.most_common(1)[0][0]
    if usual in FLOATS:
        return {"dtype": {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[usual]}
    bits = next(int(letter) for letter in usual if letter.isdigit())
    return {"dtype": "bfloat16", "quantization_config": {"quant_method": "gguf", "bits": bits}}


def _end_ids(reader: GGUFReader) -> list[int]:
    fields = ConfigFields(
        {name: reader.fields[name].contents() for name in {*END_IDS, TOKENS} & reader.fields.keys()}
    )
    ids = {fields.integer(name, minimum=0) for name in END_IDS & reader.fields.keys()}
    return sorted(
        ids
        | {
            token_id
            for token_id, text in enumerate(fields.texts(TOKENS) or ())
            if text in END_TOKENS
        }
    )


def _rope(fields: ConfigFields, tensors: dict[str, Any], head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": fields.number("rope.freq_base", 10_000.0)}
    kind = fields.choice("rope.scaling.type", ("none", "linear", "yarn"), "none")
    factor = fields.number("rope.scaling.factor", 1.0)
    original = fields.integer(
        "rope.scaling.original_context_length", fields.integer("context_length")
    )
    fields.require("rope.scaling.attn_factor", 1.0, default=1.0)
    if ROPE_FACTORS in tensors:
        return {**rope, **_llama3(tensors[ROPE_FACTORS].data, rope["rope_theta"], head_dim)}
    if kind == "none":
        return rope
    scaled = {**rope, "rope_type": kind, "factor": factor}
    return {**scaled, "original_max_position_embeddings": original} if kind == "yarn" else scaled


def _llama3(factors: Any, theta: float, head_dim: int) -> dict[str, Any]:  # noqa: ANN401 - an array of numpy
    """Find the scaling with these factors. The file has only the factors, not the numbers that they come from."""
    import torch

    from manylora.engine.model.rope import inverse_frequencies
    from manylora.engine.model.rope_spec import RopeSpec

    if factors.shape != (head_dim // 2,):
        raise ConfigError(
            f"{ROPE_FACTORS}: expected {head_dim // 2} factors for a head, got {list(factors.shape)}"
        )
    wanted = inverse_frequencies(RopeSpec(theta=theta), head_dim) / torch.tensor(factors.tolist())
    for original in PRETRAINED:
        spec = RopeSpec(
            kind="llama3", theta=theta, factor=float(factors.max()), original_positions=original
        )
        if torch.allclose(inverse_frequencies(spec, head_dim), wanted, rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": spec.factor,
                "original_max_position_embeddings": original,
                "low_freq_factor": spec.low_freq_factor,
                "high_freq_factor": spec.high_freq_factor,
            }
    raise ConfigError(
        "rope_freqs.weight: not the factors of a Llama 3, which are the only ones served"
    )
