"""The decoder of the Llama family, described by a `DecoderSpec`: token ids in, normed hidden rows and logits out.

The rows of all requests are in one batch; the attention batch alone says which keys a row attends to. Knows nothing of
requests, adapters and pages: adapters come in through `lora`, pages through the views of the KV cache.
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
"""Output of a linear layer, and the delta that the next operation must add to it, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Weights of one layer. Norms are [features], linears are laid out for the device."""

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
    """Layer group of each layer, an index into block tables and slot mappings."""

    @classmethod
    def of(cls, arena: Arena, windows: Sequence[int | None]) -> KvViews:
        """Make the views of an arena for layers with these sliding windows. They stay valid as long as the arena."""
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
    """The T rows of one step, and the places where they read and write. All are on the decoder's device."""

    tokens: torch.Tensor
    """Token ids, [T], int32 or int64. A token that the step before has sampled is -1 - its row of `sampled`."""
    positions: torch.Tensor
    """Positions in their sequences, [T], int32 or int64."""
    slot_mapping: tuple[torch.Tensor, ...]
    """KV slot of each row by layer group, [T], int32 or int64 (int64 for C++ kernels). -1 is not stored."""
    attention: tuple[AttentionBatch, ...]
    """Keys that each row attends to, by layer group. Rows that it does not cover are padding."""
    sampled: torch.Tensor | None = None
    """Tokens of the step before, [rows of that step], int32. A row without a token is below 0, and read as token 0."""


@dataclass(frozen=True, slots=True)
class _Step:
    """The part of a step that all layers share."""

    rows: StepRows
    rotation: Rotation
    kv: KvViews
    lora: LoraStep | None


class Decoder:
    """The weights of a model, and the forward pass.

    Args:
        spec: Sizes and kinds of the layers.
        kernels: The operations for its device.
        embedding: [vocab_size, hidden_size].
        layers: The layers in order.
        norm: Weight of the last norm, [hidden_size].
        head: Linear layer from hidden_size to vocab_size.
        rope: Cosines and sines of every position that is used, as `rope_table` makes them.
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
        """Device of the weights."""
        return self._embedding.device

    def forward(self, rows: StepRows, kv: KvViews, lora: LoraStep | None = None) -> torch.Tensor:
        """Run all layers, and write keys and values of the rows into the pages.

        Args:
            rows: The step.
            kv: The pages, which are read and written.
            lora: The adapters of the rows; None if all rows belong to the base model.

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
        """Compute scores of the next token, float32 [n, vocab_size], for hidden rows [n, hidden_size], into `out`."""
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
