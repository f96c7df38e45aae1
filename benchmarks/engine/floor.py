"""How long must a step take at least? One pass through all linear layers with packed weights, and nothing else.

    weft bench floor [--rows 1,8,32,64]

The layers run in model order, so that every weight comes from memory and not from a cache, as in a real step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from weft.benchmarks.arguments import counts
from weft.benchmarks.model_shapes import QWEN
from weft.benchmarks.qwen_shape import VOCAB_SIZE
from weft.engine.model.linear import Linear, make_linear

NUM_PASSES = 5
"""Timed passes, after one that is not."""


class LinearPass:
    """All linear layers of the 0.5B shape in bfloat16 with random weights (0.8 GB)."""

    def __init__(self) -> None:
        hidden, inner = QWEN.hidden, QWEN.intermediate
        qkv = (QWEN.num_heads + 2 * QWEN.num_kv_heads) * QWEN.head_dim
        shapes = [(qkv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
        self._layers = [
            (make_linear(_weights(out_features, in_features)), in_features)
            for _ in range(QWEN.num_layers)
            for out_features, in_features in shapes
        ]
        self._head = (make_linear(_weights(VOCAB_SIZE, hidden)), hidden)

    def seconds(self, rows: int, head_rows: int | None = None) -> float:
        """Median time of one pass.

        Args:
            rows: Rows of activations.
            head_rows: Rows whose logits are computed; all when None.
        """
        timed = [*self._layers, self._head]
        counts = [rows] * len(self._layers) + [rows if head_rows is None else head_rows]
        inputs = {(count, width): _weights(count, width) for count, (_, width) in zip(counts, timed, strict=True)}
        work = [(linear, inputs[count, width]) for count, (linear, width) in zip(counts, timed, strict=True)]
        return statistics.median([_time(work) for _ in range(NUM_PASSES + 1)][1:])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add its options."""
    parser.add_argument("--rows", type=counts, default="1,8,32,64", help="rows of activations, comma-separated")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A pass with each number of rows."""
    torch.set_num_threads(options.threads)
    linear_pass = LinearPass()
    floors = {str(rows): linear_pass.seconds(rows) * 1e3 for rows in options.rows}
    return {"milliseconds": floors, "table": [{"rows": rows, "ms": value} for rows, value in floors.items()]}


def _weights(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns).mul_(0.02).to(torch.bfloat16)


@torch.inference_mode()
def _time(work: Sequence[tuple[Linear, torch.Tensor]]) -> float:
    start = time.perf_counter()
    for linear, x in work:
        linear(x)
    return time.perf_counter() - start
