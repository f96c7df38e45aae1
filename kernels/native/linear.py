"""Linear layers with weights in bfloat16 for CPUs that do not multiply bfloat16, in C++ (`linear.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from manylora.kernels.checks import expect, expect_that
from manylora.kernels.native.library import native_function, panel_columns
from manylora.kernels.weight_format import BF16_PANEL, BF16_UNIT


class WideningLinear:
    """`x @ weight.T + bias` in float32, on a copy of the weight that stays in bfloat16. x and y are in bfloat16.

    Weights become floats in registers, so a step reads half of what it reads of weights in float32. A row of y does not
    depend on the other rows.

    Args:
        weight: [out_features, in_features], bfloat16, on the CPU. It is not kept.
        bias: [out_features], any float dtype, or None.
    """

    __slots__ = ("_bias", "_in_features", "_out_features", "_panels")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        expect("weight", weight, (None, None), torch.bfloat16)
        self._out_features, self._in_features = weight.shape
        rest = -self._out_features % BF16_PANEL
        units = pad(weight, (0, -self._in_features % BF16_UNIT, 0, rest)).view(torch.int32)
        self._panels = (
            units.unflatten(0, (-1, panel_columns(BF16_PANEL))).transpose(1, 2).contiguous()
        )
        wide_bias = torch.zeros(self._out_features) if bias is None else bias.float()
        self._bias = pad(wide_bias, (0, rest))

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer to x [rows, in_features], rows of consecutive elements."""
        expect("x", x, (None, self._in_features), torch.bfloat16)
        expect_that(
            "x", x.stride(1) == 1 or x.shape[1] == 1, "rows of consecutive elements", x.stride()
        )
        rows = x.shape[0]
        y = torch.empty((rows, self._out_features), dtype=torch.bfloat16)
        floats = torch.empty(rows * (self._in_features + 15))
        native_function("linear", torch.bfloat16, "iiiiiiiii")(
            x.data_ptr(),
            x.stride(0),
            rows,
            self._in_features,
            self._panels.data_ptr(),
            self._bias.data_ptr(),
            self._out_features,
            y.data_ptr(),
            floats.data_ptr(),
        )
        return y
