"""LoRA uploads as bytes, written without safetensors or PEFT so that they may be wrong in any way."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from manylora.adapters.base_shape import MODULE_PATHS, BaseShape, ModuleShape

PEFT_DEFAULTS: dict[str, Any] = json.loads("""{
    "alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null, "auto_mapping": null,
    "base_model_name_or_path": "base", "bias": "none", "corda_config": null, "ensure_weight_tying": false,
    "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false, "inference_mode": true,
    "init_lora_weights": true, "layer_replication": null, "layers_pattern": null, "layers_to_transform": null,
    "loftq_config": {}, "lora_alpha": 16, "lora_bias": false, "lora_dropout": 0.0, "megatron_config": null,
    "megatron_core": "megatron.core", "modules_to_save": null, "peft_type": "LORA", "peft_version": "0.21.2",
    "qalora_group_size": 16, "r": 8, "rank_pattern": {}, "revision": null, "target_modules": ["q_proj", "v_proj"],
    "target_parameters": null, "task_type": "CAUSAL_LM", "trainable_token_indices": null, "use_dora": false,
    "use_qalora": false, "use_rslora": false
}""")
MLX_CONFIG: dict[str, Any] = json.loads("""{
    "adapter_path": "adapters", "batch_size": 4, "config": null, "data": "data/", "fine_tune_type": "lora",
    "grad_checkpoint": false, "iters": 1000, "learning_rate": 1e-5,
    "lora_parameters": {"rank": 6, "dropout": 0.0, "scale": 2.5, "keys": ["self_attn.q_proj", "mlp.up_proj"]},
    "lr_schedule": null, "mask_prompt": false, "max_seq_length": 2048, "model": "tiny", "num_layers": 2,
    "optimizer": "adam", "optimizer_config": {"adam": {}, "adamw": {}}, "resume_adapter_file": null, "save_every": 100,
    "seed": 0, "steps_per_eval": 200, "steps_per_report": 10, "test": false, "test_batches": 500, "train": true,
    "val_batches": 25, "wandb": null
}""")
"""As mlx-lm writes it, with the scale that rank 6 and alpha 15 make."""


@dataclass(frozen=True)
class RawTensor:
    """A tensor as it stands in a file; nothing is checked."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def base_shape(
    hidden: int = 64, intermediate: int = 112, kv: int = 32, num_layers: int = 2
) -> BaseShape:
    """A base with these sizes; the defaults are a toy."""
    sizes = (
        (hidden, hidden),
        (hidden, kv),
        (hidden, kv),
        (hidden, hidden),
        (hidden, intermediate),
        (hidden, intermediate),
        (intermediate, hidden),
    )
    modules = tuple(
        ModuleShape(path, *size) for path, size in zip(MODULE_PATHS, sizes, strict=True)
    )
    return BaseShape(digest="sha256:" + "0" * 64, num_layers=num_layers, modules=modules)


def encode(values: np.ndarray[Any, Any], dtype: str) -> bytes:
    """Floats as little-endian bytes of F32, F16 or BF16 (truncated)."""
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    bits = np.ascontiguousarray(values, dtype="<f4")
    return bits.tobytes() if dtype == "F32" else (bits.view("<u4") >> 16).astype("<u2").tobytes()


def tensor(
    shape: tuple[int, ...], dtype: str = "F32", value: float | None = None, seed: int = 0
) -> RawTensor:
    """A tensor of small random numbers, or of one value."""
    values = (
        np.random.default_rng(seed).normal(0, 0.02, shape)
        if value is None
        else np.full(shape, value)
    )
    return RawTensor(dtype, shape, encode(values, dtype))


def lora_name(layer: int, path: str, part: str) -> str:
    """PEFT's name of a matrix; `part` is A or B."""
    return f"base_model.model.model.layers.{layer}.{path}.lora_{part}.weight"


def lora_tensors(
    base: BaseShape,
    ranks: Mapping[tuple[int, int], int],
    dtypes: Sequence[str] = ("F32",),
) -> dict[str, RawTensor]:
    """Random A and B for each (layer, module index); the dtypes take turns."""
    tensors: dict[str, RawTensor] = {}
    for (layer, module), rank in ranks.items():
        shape = base.modules[module]
        for part, extents in (("A", (rank, shape.in_features)), ("B", (shape.out_features, rank))):
            dtype = dtypes[len(tensors) % len(dtypes)]
            tensors[lora_name(layer, shape.path, part)] = tensor(extents, dtype, seed=len(tensors))
    return tensors


def q_and_v(base: BaseShape, rank: int = 8) -> dict[str, RawTensor]:
    """The tensors of an adapter on q_proj and v_proj of every layer."""
    return lora_tensors(
        base, {(layer, module): rank for layer in range(base.num_layers) for module in (0, 2)}
    )


def header_of(tensors: Mapping[str, RawTensor]) -> dict[str, Any]:
    """The header that describes these tensors one after the other."""
    header: dict[str, Any] = {}
    start = 0
    for name, raw in tensors.items():
        end = start + len(raw.data)
        header[name] = {"dtype": raw.dtype, "shape": list(raw.shape), "data_offsets": [start, end]}
        start = end
    return header


def container(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file of these pieces; `length` overrides the true header length."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def weights_bytes(
    tensors: Mapping[str, RawTensor], header: Mapping[str, Any] | None = None
) -> bytes:
    """A safetensors file; `header` overrides the true one."""
    written = json.dumps(
        {"__metadata__": {"format": "pt"}, **(header_of(tensors) if header is None else header)}
    )
    raw = written.encode()
    return container(
        raw + b" " * (-len(raw) % 8), b"".join(raw_tensor.data for raw_tensor in tensors.values())
    )


def config_bytes(**fields: Any) -> bytes:
    """An `adapter_config.json` with PEFT's defaults and these fields."""
    return json.dumps({**PEFT_DEFAULTS, **fields}, indent=2).encode()


def mlx_tensors(base: BaseShape) -> dict[str, RawTensor]:
    """The tensors that mlx-lm writes for `MLX_CONFIG`'s rank on q_proj and v_proj of every layer."""
    tensors: dict[str, RawTensor] = {}
    for layer in range(base.num_layers):
        for shape in (base.modules[0], base.modules[2]):
            name = f"model.layers.{layer}.{shape.path}.lora_"
            tensors[f"{name}a"] = tensor((shape.in_features, 6), seed=len(tensors))
            tensors[f"{name}b"] = tensor((6, shape.out_features), seed=len(tensors))
    return tensors


def mlx_config_bytes(**fields: Any) -> bytes:
    """An `adapter_config.json` of mlx-lm with these fields."""
    return json.dumps({**MLX_CONFIG, **fields}, indent=4).encode()
