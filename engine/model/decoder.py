"""The decoder of the Llama family, described by a `DecoderSpec`: token ids in, normed hidden rows and logits out.

Rows of all requests stand one under another; which row attends to what is said by the attention batch alone. Knows
nothing of requests, adapters and pages: adapters come in through `lora`, pages through the views of the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from manylora.engine.model.linear import Linear
from manylora.engine.model.spec import DecoderSpec
from manylora.kernels.attend import HeadNorms, Rotation
from manylora.kernels.attention_batch import AttentionBatch
from manylora.kernels.dispatch import Kernels
from manylora.kernels.kv_layer import KvLayer
from manylora.kernels.sgmv import LoraDelta

if TYPE_CHECKING:
    from manylora.adapters.lora.step import LoraStep
    from manylora.memory.arena import Arena

QKV, OUT, GATE_UP, DOWN = range(4)
"""Indices of the sites in `manylora.adapters.base_shape.SITES`."""
Projected = tuple[torch.Tensor, tuple[LoraDelta, ...]]
"""The output of a linear layer, and what the next operation is to add to it, if anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Weights of one layer; norms are [features], linears are laid out for the device."""

    input_norm: torch.Tensor
    qkv: Linear
    head_norms: HeadNorms | None
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class KvViews:
    """The arena as the layers see it."""

    layers: tuple[KvLayer, ...]
    groups: tuple[int, ...]
    """Per layer: its layer group, an index into block tables and slot mappings."""

    @classmethod
    def of(cls, arena: Arena, windows: Sequence[int | None]) -> KvViews:
        """The views of an arena by layers with these sliding windows; they stay valid as long as it lives."""
        layers = range(arena.geometry.num_layers)
        return cls(
            tuple(
                KvLayer(*arena.kv(layer), arena.kv_scales(layer), windows[layer])
                for layer in layers
            ),
            tuple(layer // arena.geometry.layers_per_group for layer in layers),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of one step, T of them, and where they read and write. All on the decoder's device."""

    tokens: torch.Tensor
    """Token ids, [T], int32 or int64; below 0 where the step before has sampled it: -1 - its row of `sampled`."""
    positions: torch.Tensor
    """Positions in their sequences, [T], int32 or int64."""
    slot_mapping: tuple[torch.Tensor, ...]
    """KV slot of each row, [T], int32 or int64 (C++ kernels: int64), per layer group; -1 is not stored."""
    attention: tuple[AttentionBatch, ...]
    """What each row attends to, per layer group; rows that it does not cover are padding."""
    sampled: torch.Tensor | None = None
    """Tokens of the step before, [rows of that step], int32; a row that has none is below 0, and read as token 0."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of a step share."""

    rows: StepRows
    rotation: Rotation
    kv: KvViews
    lora: LoraStep | None


class Decoder:
    """Weights and how they are applied.

    Args:
        spec: What the decoder is made of.
        kernels: The operations for its device.
        embedding: [vocab_size, hidden_size].
        layers: In order.
        norm: Of the last hidden rows, [hidden_size].
        head: hidden_size to vocab_size.
        rope: Cosines and sines of every position that is used, as of `rope_table`.
    """

    def __init__(
        self,
        *,
        spec: DecoderSpec,
        kernels: Kernels,
        embedding: torch.Tensor,
        layers: Sequence[DecoderLayer],
        norm: torch.Tensor,
        head: Linear,
        rope: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self.spec = spec
        self._kernels = kernels
        self._embedding = embedding
        self._layers = tuple(layers)
        self._next_norms = (*(layer.input_norm for layer in layers[1:]), norm)
        self._head = head
        self._rope = rope
        self._scale = spec.head_dim**-0.5

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._embedding.device

    def forward(self, rows: StepRows, kv: KvViews, lora: LoraStep | None = None) -> torch.Tensor:
        """Run all layers, writing keys and values of the rows into the pages.

        Args:
            rows: The step.
            kv: The pages, which are read and written.
            lora: The adapters of the rows; None where all rows are the base model's.

        Returns:
            Hidden rows after the last norm, [T, hidden_size].
        """
        eps = self.spec.norm_eps
        add_norm = self._kernels.fused_add_rms_norm
        residual = self._kernels.embed(rows.tokens, rows.sampled, self._embedding)
        x = self._kernels.rms_norm(residual, self._layers[0].input_norm, eps)
        step = _Step(rows, Rotation(*self._rope, rows.positions), kv, lora)
        for index, layer in enumerate(self._layers):
            y, delta = self._attend(index, layer, x, step)
            x, residual = add_norm(y, residual, layer.post_norm, eps, *delta)
            y, delta = self._feed_forward(index, layer, x, lora)
            x, residual = add_norm(y, residual, self._next_norms[index], eps, *delta)
        return x

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Scores of the next token, float32 [n, vocab_size], for hidden rows [n, hidden_size]; put into `out`."""
        scores = self._head(hidden)
        return scores.float() if out is None else out.copy_(scores)

    def _attend(self, index: int, layer: DecoderLayer, x: torch.Tensor, step: _Step) -> Projected:
        group = step.kv.groups[index]
        qkv, delta = _project(step.lora, index, QKV, layer.qkv, x)
        seen = self._kernels.attend(
            qkv,
            layer.head_norms,
            step.rotation,
            step.kv.layers[index],
            step.rows.slot_mapping[group],
            step.rows.attention[group],
            self._scale,
            *delta,
        )
        return _project(step.lora, index, OUT, layer.o, seen)

    def _feed_forward(
        self, index: int, layer: DecoderLayer, x: torch.Tensor, lora: LoraStep | None
    ) -> Projected:
        gate_up, delta = _project(lora, index, GATE_UP, layer.gate_up, x)
        return _project(lora, index, DOWN, layer.down, self._kernels.silu_and_mul(gate_up, *delta))


def _project(
    lora: LoraStep | None, layer: int, site: int, linear: Linear, x: torch.Tensor
) -> Projected:
    if lora is None:
        return linear(x), ()
    y, delta = lora.project(layer, site, linear, x)
    return y, () if delta is None else (delta,)
