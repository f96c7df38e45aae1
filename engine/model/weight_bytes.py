"""Format in which the weights of a model are kept, and their bytes in it. Needs no torch."""

from __future__ import annotations

import math

from manylora.adapters.base_shape import SITES
from manylora.config import Weights
from manylora.engine.model.spec import DecoderSpec, expected_tensors, module_shapes
from manylora.engine.model.weight_files import HEAD
from manylora.errors import ConfigError
from manylora.kernels.weight_format import HEAD_FORMAT, WeightFormat, layer_bytes


def choose_weights(setting: Weights, spec: DecoderSpec, *, on_cpu: bool) -> WeightFormat:
    """Choose the format of the layers for `model.weights`. On a CPU, auto keeps a checkpoint of up to 8 bits in 8 bits.

    Raises:
        ConfigError: The device does not compute the format.
    """
    if setting in ("int8", "int4") and not on_cpu:
        raise ConfigError(
            f"model.weights: {setting} is computed on a CPU only; take auto or bf16, or model.device cpu",
            param="model.weights",
        )
    if setting != "auto":
        return setting
    return (
        "int8"
        if on_cpu and spec.quantisation is not None and spec.quantisation.bits <= 8
        else "bf16"
    )


def model_bytes(spec: DecoderSpec, weights: WeightFormat, dtype_bytes: int, *, on_cpu: bool) -> int:
    """Bytes of a loaded model.

    Args:
        spec: The model.
        weights: Format of its layers.
        dtype_bytes: Bytes of a number that is not quantised.
        on_cpu: True on a CPU, which keeps a tied head beside the embedding, because a packed weight cannot be indexed.
    """
    head = (spec.vocab_size, spec.hidden_size)
    sizes = {name: math.prod(shape) for name, shape in expected_tensors(spec).items()}
    if on_cpu and spec.is_tied:
        sizes[HEAD] = math.prod(head)
    if weights == "bf16":
        return sum(sizes.values()) * dtype_bytes
    del sizes[HEAD]
    total = layer_bytes(HEAD_FORMAT, *head)
    modules = module_shapes(spec)
    for site in SITES:
        width = sum(modules[index].out_features for index in site.modules)
        total += spec.num_layers * layer_bytes(weights, width, modules[site.modules[0]].in_features)
    return total + dtype_bytes * sum(size for name, size in sizes.items() if "_proj." not in name)
