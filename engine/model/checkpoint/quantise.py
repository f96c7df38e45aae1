"""Quantises a checkpoint: rounds the linear weights of its layers to the nearest level, and measures each one's error.

int8 and int4 are written as compressed-tensors, which vLLM and transformers read too; q3.5 is Manylora's own. Embedding
and head stay as they are: a quantised head costs most, and a tied one is the embedding.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from manylora.adapters.base_shape import MODULE_PATHS
from manylora.engine.model.checkpoint.weights import check_checkpoint
from manylora.engine.model.formats import dequantised, packed, scaled, three_half
from manylora.engine.model.formats.stored import StoredLinear, is_finite, pack
from manylora.engine.model.quantisation import RECIPE_FILE, Quantisation, read_quantisation
from manylora.engine.model.spec import CONFIG_FILE, HUB_FILES, DecoderSpec, module_shapes, read_spec
from manylora.engine.model.weight_files import INDEX_FILE, weight_files
from manylora.errors import ConfigError

TargetFormat = Literal["int8", "int4", "q3.5"]
Errors = dict[str, list[float]]
"""By module path: the relative error of its weight in each layer, ||W' - W|| / ||W||."""
INT8_MOST, INT4_MOST = 127, 15
GROUP_SIZES = (128, 64, 32, 16)
RECIPE = "# manylora quantize: weights are rounded to the nearest level. No scale is folded into other layers.\n"


def quantise(source: Path, output: Path, target: TargetFormat) -> Errors:
    """Write a quantised copy of a checkpoint.

    Args:
        source: Folder of a checkpoint in floats.
        output: Folder that is made; all of it is there, or nothing.
        target: How weights are stored.

    Raises:
        ConfigError: The checkpoint is damaged, not served, quantised already or a GGUF file, its sizes do not allow the
            format, or `output` exists or cannot be written.
    """
    if target not in get_args(TargetFormat):
        raise ConfigError(
            f"format must be one of {', '.join(get_args(TargetFormat))}, got {target!r}",
            param="format",
        )
    spec = read_spec(source)
    files = weight_files(source)
    if files[0].suffix == ".gguf":
        message = (
            "model.path: manylora quantize reads safetensors only; "
            "take the model's Hugging Face folder, not a GGUF file"
        )
        raise ConfigError(message, param="model.path")
    if spec.quantisation is not None:
        raise ConfigError(
            "model.path: already quantised; take the model's original weights", param="model.path"
        )
    check_checkpoint(source, spec)
    if output.exists():
        raise ConfigError(f"output: {output} exists; name a folder that does not", param="output")
    config = _config(spec, target)
    quantisation = read_quantisation(config, RECIPE)
    errors: Errors = {path: [0.0] * spec.num_layers for path in MODULE_PATHS}
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent) as folder:
            made = Path(folder) / "made"
            made.mkdir()
            places = {}
            for file in files:
                tensors = _quantised(file, spec, quantisation, errors)
                places.update(dict.fromkeys(tensors, file.name))
                save_file(tensors, made / file.name, {"format": "pt"})
            _write_others(source, made, config, places if len(files) > 1 else None)
            made.rename(output)
    except (OSError, SafetensorError) as error:  # the latter where save_file cannot write
        raise ConfigError(f"output: cannot write {output}: {error}", param="output") from error
    return errors


def _quantised(
    file: Path, spec: DecoderSpec, quantisation: Quantisation, errors: Errors
) -> dict[str, torch.Tensor]:
    """The tensors of a file, with the parts of linears in place of their weights."""
    linears = {
        f"model.layers.{layer}.{module.path}.weight": (layer, module)
        for layer in range(spec.num_layers)
        for module in module_shapes(spec)
    }
    tensors = {}
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - the file is no dict
            tensor: torch.Tensor = opened.get_tensor(name)
            if name not in linears:
                tensors[name] = tensor
                continue
            if not is_finite(tensor):
                raise ConfigError(
                    f"model.path: {name} has values that are infinite or NaN", param="model.path"
                )
            layer, module = linears[name]
            weight = tensor.float()
            parts = _ENCODERS[quantisation.layout](weight, quantisation, tensor.dtype)
            stem = name.removesuffix(".weight")
            linear = StoredLinear(
                stem, module.out_features, module.in_features, quantisation, parts
            )
            errors[module.path][layer] = float(
                (dequantised(linear) - weight).norm() / weight.norm().clamp(min=1e-30)
            )
            tensors.update({f"{stem}.{part}": value.contiguous() for part, value in parts.items()})
    return tensors


def _write_others(
    source: Path, made: Path, quantisation: dict[str, Any], places: dict[str, str] | None
) -> None:
    """Config, index, and all other files of a checkpoint, as they are."""
    config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    (made / CONFIG_FILE).write_text(
        json.dumps({**config, "quantization_config": quantisation}, indent=2)
    )
    (made / RECIPE_FILE).write_text(RECIPE)
    if places is not None:
        (made / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}, indent=2))
    others = {
        path
        for pattern in HUB_FILES
        for path in source.glob(pattern)
        if path.suffix != ".safetensors"
    }
    for path in sorted(others):
        if not (made / path.name).exists() and path.name != INDEX_FILE:
            shutil.copyfile(path, made / path.name)


def _config(spec: DecoderSpec, target: TargetFormat) -> dict[str, Any]:
    """The `quantization_config`."""
    if target == "q3.5":
        return {"quant_method": "manylora", "format": "q3.5"}
    inputs = None
    if target == "int8":
        storage, weights = (
            "int-quantized",
            {"num_bits": 8, "strategy": "channel", "symmetric": True},
        )
        inputs = {
            "num_bits": 8,
            "type": "int",
            "strategy": "token",
            "symmetric": True,
            "dynamic": True,
        }
    else:
        sizes = {module.in_features for module in module_shapes(spec)}
        group = next(
            (size for size in GROUP_SIZES if not any(width % size for width in sizes)), None
        )
        if group is None:
            raise ConfigError(
                f"format: int4 needs inputs in groups of 16 at least, got {sorted(sizes)}",
                param="format",
            )
        weights = {"num_bits": 4, "strategy": "group", "group_size": group, "symmetric": False}
        storage = "pack-quantized"
    scheme = {
        "targets": ["Linear"],
        "weights": {"type": "int", **weights},
        "input_activations": inputs,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


def _int8(
    weight: torch.Tensor, _quantisation: Quantisation, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    scale = _scale(weight.abs().amax(1, keepdim=True) / INT8_MOST, dtype)
    values = (weight / scale.float()).round().clamp(-INT8_MOST, INT8_MOST)
    return {"weight": values.to(torch.int8), scaled.SCALE: scale}


def _int4(
    weight: torch.Tensor, quantisation: Quantisation, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    size = quantisation.block[1] if quantisation.block else weight.shape[1]
    groups = weight.view(len(weight), -1, size)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = _scale((high - low) / INT4_MOST, dtype)
    zero = (-low / scale.float()).round().clamp(0, INT4_MOST)
    values = (
        (groups / scale.float().unsqueeze(-1) + zero.unsqueeze(-1))
        .round()
        .clamp(0, INT4_MOST)
        .flatten(1)
    )
    return {
        packed.PACKED: pack(values.int(), 4),
        packed.SCALE: scale,
        packed.ZERO: pack(zero.int().T, 4).T,
        packed.SHAPE: torch.tensor(weight.shape),
    }


def _scale(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In the format of the checkpoint, and above 0 where all weights are 0."""
    return scale.to(dtype).clamp(min=torch.finfo(dtype).tiny)


_ENCODERS: dict[
    str, Callable[[torch.Tensor, Quantisation, torch.dtype], dict[str, torch.Tensor]]
] = {
    "scaled": _int8,
    "packed": _int4,
    "q3.5": lambda weight, _quantisation, _dtype: three_half.encoded(weight),
}
