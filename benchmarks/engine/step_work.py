"""The least that a step must read and compute. Arithmetic only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from manylora.benchmarks.model_shapes import (
    DTYPE_BYTES,
    ModelShape,
    kv_elements,
    lora_elements,
    weight_elements,
)
from manylora.kernels.native.peaks import Product
from manylora.kernels.weight_format import HEAD_FORMAT, WeightFormat, layer_bytes
from manylora.memory.geometry import SCALE_BYTES

PRODUCT_OF: dict[WeightFormat, Product] = {"bf16": "bfloat16", "int8": "int8", "int4": "int4"}
"""Kinds of the products with weights in each format."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Requests of one step."""

    requests: int
    context: int
    """Tokens of each request."""
    is_prompt: bool = False
    """True if the step computes all these tokens, and no keys and values are there before; False for one of each."""
    ranks: Sequence[int] = ()
    """Ranks of the adapters that the requests have in turn, on all linear layers; empty for the base."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """Bytes and multiply-adds of a step."""

    num_bytes: int
    """Weights, keys and values, and the weights of adapters, each read once."""
    multiply_adds: Counter[Product]
    """Products of linear layers, LoRA and attention, by their kind."""


def step_work(
    model: ModelShape,
    vocab_size: int,
    load: StepLoad,
    weights: WeightFormat,
    *,
    is_kv_int8: bool = False,
) -> StepWork:
    """Return the work of one step.

    Args:
        model: Sizes of the model.
        vocab_size: Outputs of the head.
        load: The requests of the step.
        weights: Format of the linear layers.
        is_kv_int8: True if keys and values have 8 bits.
    """
    head_weights = weights if weights == "bf16" else HEAD_FORMAT
    requests = load.requests
    tokens = load.context if load.is_prompt else 1  # of each request
    keys = load.context * (load.context + 1) // 2 if load.is_prompt else load.context
    kept = 0 if load.is_prompt else kv_elements(model, requests * load.context)
    ranks = [
        load.ranks[request % len(load.ranks)] for request in range(requests if load.ranks else 0)
    ]
    products = Counter[Product]()
    products[PRODUCT_OF[weights]] += weight_elements(model, 0) * requests * tokens
    products[PRODUCT_OF[head_weights]] += vocab_size * model.hidden * requests
    products["bfloat16"] += lora_elements(model, ranks) * tokens
    products["bfloat16"] += (
        2 * model.num_layers * model.num_heads * model.head_dim * requests * keys
    )
    layer = sum(
        _weight_bytes(weights, module.out_features, module.in_features)
        for module in model.base().modules
    )
    kept_bytes = kept + kept // model.head_dim * SCALE_BYTES if is_kv_int8 else kept * DTYPE_BYTES
    lora_bytes = lora_elements(model, load.ranks[:requests]) * DTYPE_BYTES
    head_bytes = _weight_bytes(head_weights, vocab_size, model.hidden)
    return StepWork(model.num_layers * layer + head_bytes + kept_bytes + lora_bytes, products)


def _weight_bytes(weights: WeightFormat, out_features: int, in_features: int) -> int:
    if weights == "bf16":
        return out_features * in_features * DTYPE_BYTES
    return layer_bytes(weights, out_features, in_features)
