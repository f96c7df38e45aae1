"""Estimate of a CPU's speed with a model's weights in each format, measured with one layer in two seconds."""

from __future__ import annotations

import time

import torch

from manylora.engine.model.linear import Linear, make_head, make_linear
from manylora.engine.model.spec import DecoderSpec
from manylora.kernels.weight_format import WEIGHT_FORMATS, WeightFormat

MANY = 32
SAMPLE_PARAMETERS = 1 << 24
CACHE_BYTES = 256 << 20
"""Bytes that are written before each run, so that weights come from memory, as in a step."""
RUNS = 5


@torch.inference_mode()
def weight_speeds(spec: DecoderSpec, dtype: torch.dtype) -> dict[WeightFormat, tuple[float, float]]:
    """Measure a layer of the model's hidden size in each format, with the threads that torch has.

    Returns:
        Tokens per second of one request, and of `MANY` together. These are upper bounds, without attention.
    """
    weight = torch.randn(max(SAMPLE_PARAMETERS // spec.hidden_size, 1), spec.hidden_size).to(dtype)
    cache = torch.empty(CACHE_BYTES, dtype=torch.uint8)

    def seconds(linear: Linear, rows: int) -> float:
        """Time per parameter in the best run: other processes make a run slower, never faster."""
        x = torch.randn(rows, weight.shape[1]).to(dtype)
        found = []
        for _ in range(RUNS):
            cache.zero_()
            started_s = time.perf_counter()
            linear(x)
            found.append(time.perf_counter() - started_s)
        return min(found) / weight.numel()

    head = spec.vocab_size * spec.hidden_size
    layers = spec.num_parameters - head * (1 if spec.is_tied else 2)

    def speed(weights: WeightFormat, rows: int) -> float:
        body = seconds(make_linear(weight, weights=weights), rows) * layers
        return rows / (body + seconds(make_head(weight, weights), rows) * head)

    return {weights: (speed(weights, 1), speed(weights, MANY)) for weights in WEIGHT_FORMATS}
