"""The operands of all that a layer does between its projections: rows of a fused projection, and scattered pages."""

from __future__ import annotations

import torch

from manylora.kernels.attend import HeadNorms, Rotation
from manylora.kernels.dispatch import Kernels
from manylora.kernels.kv_layer import KvLayer
from manylora.kernels.sgmv import LoraDelta
from scattered_kv import LAYER, AttentionCase, ScatteredKv


class Projected:
    """The operands of one call; `call` leaves them as they are."""

    def __init__(
        self, case: AttentionCase, has_norms: bool = True, device: torch.device | str = "cpu"
    ) -> None:
        kv = ScatteredKv(case, device)
        generator = torch.Generator().manual_seed(1)
        num_rows, width = len(kv.q), (case.q_heads + 2 * case.kv_heads) * case.head_dim
        self.qkv = torch.randn((num_rows, width), generator=generator).to(case.dtype)
        weights = torch.rand((2, case.head_dim), generator=generator).to(case.dtype).to(device)
        self.norms = HeadNorms(weights[0], weights[1], 1e-6) if has_norms else None
        angles = torch.arange(num_rows + 3)[:, None] * torch.logspace(0, -3, case.head_dim // 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.positions = torch.randperm(num_rows + 3, generator=generator)[:num_rows]
        mapping = []
        for table, (rows, context) in zip(kv.block_tables, case.requests, strict=True):
            positions = range(context - rows, context) if context else [None] * rows
            mapping += [-1 if p is None else table[p // 16] * 16 + p % 16 for p in positions]
        self.slots = torch.tensor([*mapping, *[-1] * case.padding_rows])
        self.arena, self.batch, self.scale, self.window = kv.arena, kv.batch, kv.scale, case.window
        self.scales, self.is_int8 = kv.scales, case.is_int8
        for name in ("qkv", "cos", "sin", "positions", "slots"):
            setattr(self, name, getattr(self, name).to(device))

    def call(self, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and the arena with this step's keys and values."""
        return self.call_with_scales(kernels)[:2]

    def call_with_scales(
        self, kernels: Kernels, *delta: LoraDelta
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same and the scales, which only int8 changes."""
        arena, scales = self.arena.clone(), self.scales.clone()
        rotation = Rotation(self.cos, self.sin, self.positions)
        kv_scales = (scales[:, LAYER, 0], scales[:, LAYER, 1]) if self.is_int8 else None
        kv = KvLayer(arena[:, LAYER, 0], arena[:, LAYER, 1], kv_scales, self.window)
        rest = (self.slots, self.batch, self.scale, *delta)
        out = kernels.attend(self.qkv.clone(), self.norms, rotation, kv, *rest)
        return out, arena, scales
