"""A Hugging Face `config.json` as data for the one decoder.

`ARCHITECTURES` has an entry for each architecture of the Llama family. A key of the config is read, known to have no
effect on the result, switched off, or refused by name, so the decoder ignores nothing that it cannot do.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from manylora import strict_json
from manylora.adapters.base_shape import MODULE_PATHS, BaseShape, ModuleShape
from manylora.config import KvDtype
from manylora.engine.model.config_fields import ConfigFields, shown
from manylora.engine.model.gguf import gguf_file, gguf_folder
from manylora.engine.model.quantisation import RECIPE_FILE, Quantisation, read_quantisation
from manylora.engine.model.rope_spec import RopeSpec, rope_spec
from manylora.engine.model.weight_files import EMBEDDING, HEAD, INDEX_FILE, NORM, holds_own_head
from manylora.errors import ConfigError
from manylora.memory.geometry import PageGeometry, page_geometry

CONFIG_FILE = "config.json"
SPEC_FILES = (CONFIG_FILE, RECIPE_FILE, INDEX_FILE)
"""Files that `read_spec` reads, besides the weights if they are there."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", RECIPE_FILE)
HUB_DUPLICATES = ("consolidated*", "*/*")
"""Copies of the weights in other formats, which some repositories have."""
logger = logging.getLogger(__name__)
MIB = 1 << 20
MAX_CONFIG_BYTES = MIB
MAX_LAYERS = 4096
"""Largest number of layers; real models have some hundreds. Names are made for each before files are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Description of a decoder without its weights."""

    architecture: str
    """Name in `architectures` of the config, such as `LlamaForCausalLM`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    max_positions: int
    """Length of the longest sequence that the model was made for."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """True if queries and keys are normalised per head before the rotation."""
    is_tied: bool
    """True if the head is the embedding table."""
    sliding_windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens, the token itself included; None sees all."""
    dtype: str | None
    """Number format of the checkpoint, as torch names it."""
    quantisation: Quantisation | None = None
    """Storage of linear weights; None for plain floats."""

    @property
    def q_features(self) -> int:
        """Elements of the queries of one token."""
        return self.num_heads * self.head_dim

    @property
    def kv_features(self) -> int:
        """Elements of the keys (or values) of one token."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Numbers in the checkpoint. A tied head counts once."""
        return sum(math.prod(shape) for shape in expected_tensors(self).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Description of an architecture. A string in place of a bool is the config key with the answer."""

    model_type: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window: Literal["none", "every_layer", "by_layer"] = "none"
    """Layers with a sliding window; `by_layer` follows layer_types or max_window_layers."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of transformers for absent keys."""


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        model_type="llama",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"max_position_embeddings": 2048},
    ),
    "MistralForCausalLM": Architecture(
        model_type="mistral",
        window="every_layer",
        defaults={
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "num_key_value_heads": 8,
        },
    ),
    "Qwen2ForCausalLM": Architecture(
        model_type="qwen2",
        qkv_bias=True,
        window="by_layer",
        defaults={
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "Qwen3ForCausalLM": Architecture(
        model_type="qwen3",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        window="by_layer",
        defaults={
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "head_dim": 128,
        },
    ),
}

WITHOUT_EFFECT = frozenset(
    {
        "attention_dropout",
        "hidden_dropout",
        "initializer_range",
        "pretraining_tp",
        "bos_token_id",
        "decoder_start_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "use_cache",
        "finetuning_task",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "task_specific_params",
        "attn_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "torch_dtype",
        "torchscript",
        "architectures",
        "model_type",
        "name_or_path",
        "tokenizer_class",
        "transformers_version",
    }
)
"""Keys of training, generation settings or bookkeeping. Keys that start with _ or unsloth count as such too."""


def resolve_model(
    path: str, files: Sequence[str] = HUB_FILES, *, is_downloaded: bool = False
) -> Path:
    """Find the checkpoint's folder. Download it if `path` is a hub id, or make it if it is a GGUF file.

    Args:
        path: Folder, hub id or GGUF file. A folder may have one GGUF file instead of safetensors.
        files: Patterns of the files to download.
        is_downloaded: True if the files are in the cache already, so that the hub is not asked.

    Raises:
        ConfigError: There is no such folder, and no such hub id or the hub does not deliver it; or the GGUF file cannot
            be served.
    """
    folder = Path(path)
    found = folder if folder.suffix == ".gguf" and folder.is_file() else gguf_file(folder)
    if found:
        return gguf_folder(found)
    if folder.is_dir():
        return folder
    if not HUB_ID.fullmatch(path):
        raise ConfigError(
            f"model.path: no folder {path!r}, and it is not a hub id", param="model.path"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                path,
                allow_patterns=list(files),
                ignore_patterns=list(HUB_DUPLICATES),
                local_files_only=is_downloaded,
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model.path: no folder {path!r}, and the Hugging Face hub did not deliver it: {error}",
            param="model.path",
        ) from error


def read_spec(folder: Path) -> DecoderSpec:
    """Read the spec of the checkpoint in `folder`. A head in its files overrides `tie_word_embeddings`.

    Raises:
        ConfigError: `config.json` is missing or no JSON object, it or `recipe.yaml` is too large or cannot be read, or
            `decoder_spec` refuses it.
    """
    path = folder / CONFIG_FILE
    try:
        config = strict_json.parse(_read(path), strict_json.MAX_DEPTH)
    except strict_json.JsonRefusedError as error:
        raise ConfigError(f"model.path: cannot read {path}: {error}", param="model.path") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model.path: {path} must be a JSON object", param="model.path")
    recipe = folder / RECIPE_FILE
    spec = decoder_spec(config, _read(recipe).decode(errors="replace") if recipe.is_file() else "")
    if spec.is_tied and holds_own_head(folder):
        logger.warning(
            "%s says tie_word_embeddings, but the weights hold a head that differs from the embedding: this head is "
            "served. Set tie_word_embeddings to false to say so.",
            path,
        )
        return replace(spec, is_tied=False)
    return spec


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"model.path: cannot read {path}: {error}", param="model.path") from error
    if len(raw) > MAX_CONFIG_BYTES:
        raise ConfigError(f"model.path: {path} must be of at most 1 MiB", param="model.path")
    return raw


def decoder_spec(config: dict[str, Any], recipe: str = "") -> DecoderSpec:
    """Translate a `config.json`.

    Args:
        config: Its content.
        recipe: Content of `recipe.yaml`, the steps of the quantisation; empty if there is none.

    Raises:
        ConfigError: The architecture is not served, a needed key is missing or of a wrong kind, or a key asks for
            something that the decoder cannot do. The message names the key.
    """
    name, architecture = _architecture(config)
    fields = ConfigFields(config, architecture.defaults)
    quantised = fields.nested("quantization_config")
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    max_positions = fields.integer("max_position_embeddings")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    rope = rope_spec(fields, max_positions)
    fields.require("hidden_act", "silu", default="silu")
    spec = DecoderSpec(
        architecture=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_positions=max(max_positions, rope.max_positions),
        qkv_bias=_part(fields, architecture.qkv_bias),
        o_bias=_part(fields, architecture.o_bias),
        mlp_bias=_part(fields, architecture.mlp_bias),
        qk_norm=architecture.qk_norm,
        is_tied=fields.flag("tie_word_embeddings", False),
        sliding_windows=_sliding_windows(fields, architecture, num_layers),
        dtype=fields.text("dtype") or fields.text("torch_dtype"),
        quantisation=read_quantisation(quantised, recipe) if quantised else None,
    )
    fields.refuse_unread(WITHOUT_EFFECT)
    _check_heads(spec)
    return spec


def module_shapes(spec: DecoderSpec) -> tuple[ModuleShape, ...]:
    """The linear layers of one decoder layer, in the order of `MODULE_PATHS`."""
    hidden = spec.hidden_size
    inter = spec.intermediate_size
    q = spec.q_features
    kv = spec.kv_features
    sizes = (
        (hidden, q),
        (hidden, kv),
        (hidden, kv),
        (q, hidden),
        (hidden, inter),
        (hidden, inter),
        (inter, hidden),
    )
    return tuple(ModuleShape(path, *size) for path, size in zip(MODULE_PATHS, sizes, strict=True))


def expected_tensors(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the checkpoint must have."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, hidden), NORM: (hidden,)}
    if not spec.is_tied:
        shapes[HEAD] = (spec.vocab_size, hidden)
    biases = (spec.qkv_bias,) * 3 + (spec.o_bias,) + (spec.mlp_bias,) * 3
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if spec.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (spec.head_dim,)
        for module, has_bias in zip(module_shapes(spec), biases, strict=True):
            shapes[f"{prefix}{module.path}.weight"] = (module.out_features, module.in_features)
            if has_bias:
                shapes[f"{prefix}{module.path}.bias"] = (module.out_features,)
    return shapes


def base_shape(spec: DecoderSpec, digest: str, *, trained_on_quantised: bool = False) -> BaseShape:
    """The base as adapters see it.

    Args:
        spec: The decoder.
        digest: `sha256:<64 hex>` of config and weights.
        trained_on_quantised: True if adapters were trained on this checkpoint, with its scaled inputs.
    """
    folds = (
        spec.quantisation is not None
        and spec.quantisation.folds_input_scale
        and not trained_on_quantised
    )
    modules = module_shapes(spec)
    return BaseShape(
        digest=digest, num_layers=spec.num_layers, modules=modules, folds_input_scale=folds
    )


def model_geometry(
    spec: DecoderSpec, shape: BaseShape, dtype_bytes: int, kv_dtype: KvDtype
) -> PageGeometry:
    """Choose the pages of an arena for the model's keys and values and the rows of its adapters.

    Args:
        spec: The decoder.
        shape: The base as adapters see it.
        dtype_bytes: Bytes of an element.
        kv_dtype: Dtype of keys and values; auto takes elements of `dtype_bytes`.
    """
    return page_geometry(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype_bytes=dtype_bytes,
        largest_row_features=shape.largest_row_features,
        is_kv_int8=kv_dtype == "int8",
    )


def _architecture(config: dict[str, Any]) -> tuple[str, Architecture]:
    if config.get("auto_map"):
        raise ConfigError(
            "auto_map: models with code of their own are not served", param="auto_map"
        )
    names = config.get("architectures") or [
        name
        for name, entry in ARCHITECTURES.items()
        if entry.model_type == config.get("model_type")
    ]
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    entry = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if entry is None:
        raise ConfigError(
            f"architectures: {shown(name or config.get('model_type'))} is not served; "
            f"served are {', '.join(sorted(ARCHITECTURES))}",
            param="architectures",
        )
    if config.get("model_type", entry.model_type) != entry.model_type:
        raise ConfigError(
            f"model_type: expected {entry.model_type!r} for {name}, got {shown(config['model_type'])}",
            param="model_type",
        )
    return str(name), entry


def _part(fields: ConfigFields, value: bool | str) -> bool:
    return fields.flag(value, False) if isinstance(value, str) else value


def _sliding_windows(
    fields: ConfigFields, architecture: Architecture, num_layers: int
) -> tuple[int | None, ...]:
    if architecture.window == "none":
        return (None,) * num_layers
    window = fields.optional_integer("sliding_window")
    if architecture.window == "every_layer":
        return (window,) * num_layers
    if not fields.flag("use_sliding_window", False):
        window = None
    first = fields.integer("max_window_layers", minimum=0)
    given = fields.texts("layer_types")
    kinds = given or [
        "sliding_attention" if i >= first else "full_attention" for i in range(num_layers)
    ]
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"layer_types: expected full_attention or sliding_attention for each of {num_layers} layers",
            param="layer_types",
        )
    if window is None and given:
        fields.require("layer_types", ["full_attention"] * num_layers, default=given)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _check_heads(spec: DecoderSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise ConfigError(
            f"num_key_value_heads: {spec.num_kv_heads} does not divide num_attention_heads {spec.num_heads}",
            param="num_key_value_heads",
        )
    if spec.head_dim % 2:
        raise ConfigError(f"head_dim: must be even, got {spec.head_dim}", param="head_dim")
