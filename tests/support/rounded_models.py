"""The reference for weights in 8 and 4 bits: a model of transformers whose linear layers are rounded as Manylora says.

Written apart from the product's code: weights become what their codes stand for, and inputs of these layers are rounded
per token to 8 bits. PEFT wraps such a layer as any other, so its adapters read the input that is not rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

GROUP = 32


class RoundedLinear(torch.nn.Linear):
    """A layer with rounded weights, whose input is rounded row by row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer in float64."""
        steps = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        rounded = (x / steps).round().double() * steps.double()
        bias = None if self.bias is None else self.bias.double()
        return torch.nn.functional.linear(rounded, self.weight.double(), bias).to(x.dtype)


def round_linears(model: Any, weights: str) -> Any:
    """Round the linear layers in place, the head's weights to 8 bits and not its input; bf16 leaves all as they are."""
    for name, module in model.named_modules():
        if weights != "bf16" and isinstance(module, torch.nn.Linear):
            is_head = name.endswith("lm_head")
            rounding = round_groups if weights == "int4" and not is_head else round_rows
            rounded = rounding(module.weight.detach().float().numpy())
            module.weight = torch.nn.Parameter(
                torch.from_numpy(rounded.astype(np.float32)), requires_grad=False
            )
            if not is_head:
                module.__class__ = RoundedLinear
    return model


def round_rows(weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """8 bits: whole multiples, at most 127, of a step for each row."""
    steps = np.abs(weight).max(1, keepdims=True) / 127
    rounded: npt.NDArray[np.float32] = np.rint(weight / np.where(steps == 0, 1, steps)) * steps
    return rounded


def round_groups(weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """4 bits: -8 to 7 times a step in bfloat16 for each 32 inputs, so that the largest magnitude is -8 steps."""
    rounded = np.empty_like(weight)
    for start in range(0, weight.shape[1], GROUP):
        group = weight[:, start : start + GROUP]
        largest = group[np.arange(len(group)), np.abs(group).argmax(1)][:, None]
        steps = torch.from_numpy(largest / -8).bfloat16().float().numpy()
        codes = np.clip(np.rint(group / np.where(steps == 0, 1, steps)), -8, 7)
        rounded[:, start : start + GROUP] = codes * steps
    return rounded
