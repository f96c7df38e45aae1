"""The least that a step must do, and what Manylora aims at. Arithmetic only.

E1 and E2 are for decode steps, E3 for prompts, K1 to K3 for the LoRA kernels, M1 to M3 for memory; docs/benchmarks.md
lists them.
"""

from __future__ import annotations

from collections.abc import Sequence

from manylora.benchmarks.engine.kernels import Machine
from manylora.benchmarks.model_shapes import (
    DTYPE_BYTES,
    ModelShape,
    kv_elements,
    lora_elements,
    weight_elements,
)

GOAL_BASE = 1.25
"""E1: a decode step of the base, as a multiple of its floor."""
GOAL_ADAPTERS = {1: 1.08, 32: 1.25, 64: 1.45}
"""E2: a decode step with this number of adapters of rank 16, as a multiple of one of the base."""
GOAL_PROMPT = 1.12
"""E3: a prompt with an adapter, as a multiple of one without."""
GOAL_LORA = 1.4
"""K1: LoRA for many adapters, as a multiple of its floor."""
GOAL_SINGLE_S = 10e-6
"""K1: LoRA for one adapter, which is two kernels that move few bytes."""
GOAL_MIXED = 1.15
"""K2: mixed ranks, as a multiple of one rank with equally many bytes."""
GOAL_COPY = 0.85
"""M1: bandwidth of page copies, as a share of that of one large copy."""
GOAL_SWAPS = 1.05
"""M1: the 99th percentile of steps while adapters are loaded, as a multiple of that without loads."""
GOAL_LAUNCHES = {False: 310, True: 440}
"""Kernels of a decode step on 32 layers, by whether adapters are in it."""


def decode_floor_s(
    model: ModelShape,
    vocab_size: int,
    rows: int,
    context: int,
    ranks: Sequence[int],
    machine: Machine,
) -> float:
    """The least time of a decode step: weights, keys and values, and the weights of its adapters are read once."""
    weights = weight_elements(model, vocab_size)
    linear_s = max(
        weights * DTYPE_BYTES / machine.bytes_per_s, 2 * weights * rows / machine.flops_per_s
    )
    others = kv_elements(model, rows * context) + lora_elements(model, ranks)
    return linear_s + others * DTYPE_BYTES / machine.bytes_per_s


def prompt_floor_s(
    model: ModelShape, vocab_size: int, tokens: int, ranks: Sequence[int], machine: Machine
) -> float:
    """The least time of a prompt of one request: products of all its tokens but for the head, and causal attention."""
    linear = 2 * (weight_elements(model, vocab_size) - vocab_size * model.hidden) * tokens
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * tokens * tokens
    adapters = 2 * lora_elements(model, ranks) * tokens
    return (linear + attention + adapters) / machine.flops_per_s
