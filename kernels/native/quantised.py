"""Linear layers with quantised weights on the CPU in C++ (`quantised.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from manylora.kernels.checks import expect, expect_that
from manylora.kernels.native.library import NATIVE_DTYPES, native_function, panel_columns
from manylora.kernels.quantised import Int4Weight, Int8Weight, QuantisedWeight, check_layer
from manylora.kernels.weight_format import GROUP, INT4_PANEL, INT8_INPUTS, INT8_PANEL, UNIT


class QuantisedLinear:
    """See `manylora.kernels.plain.quantised.quantised_linear`. Keeps a copy of the weight in panels."""

    __slots__ = (
        "_bias",
        "_name",
        "_panels",
        "_row_bytes",
        "_scales",
        "in_features",
        "out_features",
    )
    parts = 1
    """Rows of codes for each row of x."""

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None) -> None:
        check_layer(weight, bias)
        self.out_features = weight.codes.shape[0]
        self.in_features = weight.in_features
        groups = -(-self.in_features // GROUP)
        pitch = -(-self.in_features // INT8_INPUTS) * INT8_INPUTS
        if isinstance(weight, Int8Weight):
            self._name = "linear_int8"
            width = INT8_PANEL
            num_sums = 1
            self._panels = _int8_panels(weight)
            self._scales = pad(weight.scales, (0, -self.out_features % width))
        else:
            self._name = "linear_int4"
            width = INT4_PANEL
            num_sums = groups
            self._panels = _int4_panels(weight)
            self._scales = torch.empty(0)
        wide_bias = torch.zeros(self.out_features) if bias is None else bias.float()
        self._bias = pad(wide_bias, (0, -self.out_features % width))
        # CPUs without VNNI keep codes in 16 bits beside those in 8.
        self._row_bytes = 3 * pitch + 4 * (num_sums + 1)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        if x.dtype not in NATIVE_DTYPES:
            return self(x.float()).to(x.dtype if self.parts == 1 else torch.float32)
        expect("x", x, (None, self.in_features))
        expect_that(
            "x", x.stride(1) == 1 or x.shape[1] == 1, "rows of consecutive elements", x.stride()
        )
        rows = x.shape[0]
        y = torch.empty(
            (rows, self.out_features), dtype=x.dtype if self.parts == 1 else torch.float32
        )
        # Codes of x with their sums and scales, and padding: AMX reads 16 rows at once.
        codes = torch.empty((rows * self.parts + 15) * self._row_bytes, dtype=torch.uint8)
        native_function(self._name, x.dtype, "iiiiiiiiii")(
            x.data_ptr(),
            x.stride(0),
            rows,
            self.in_features,
            self._panels.data_ptr(),
            self._scales.data_ptr(),
            self._bias.data_ptr(),
            self.out_features,
            y.data_ptr(),
            codes.data_ptr(),
        )
        return y


class QuantisedHead(QuantisedLinear):
    """See `manylora.kernels.plain.quantised.quantised_head`."""

    __slots__ = ()
    parts = 2

    def __init__(self, weight: Int8Weight) -> None:
        super().__init__(weight, None)
        self._name = "head_int8"


def _int8_panels(weight: Int8Weight) -> Tensor:
    """Codes plus 128, [panels, units, columns of a panel, UNIT], uint8."""
    rows, columns = weight.codes.shape
    codes = pad(weight.codes, (0, -columns % INT8_INPUTS, 0, -rows % INT8_PANEL)).view(torch.uint8)
    panels: Tensor = (
        codes.unflatten(1, (-1, UNIT))
        .unflatten(0, (-1, panel_columns(INT8_PANEL)))
        .transpose(1, 2)
        .contiguous()
    )
    return panels.bitwise_xor_(128)


def _int4_panels(weight: Int4Weight) -> Tensor:
    """Per panel and group: codes, [GROUP / UNIT / 2, columns of a panel, UNIT], then scales in bfloat16; uint8."""
    padding = (0, 0, 0, -weight.codes.shape[0] % INT4_PANEL)
    width = panel_columns(INT4_PANEL)
    codes = (
        pad(weight.codes, padding)
        .unflatten(1, (-1, GROUP // UNIT // 2, UNIT))
        .unflatten(0, (-1, width))
    )
    scales = (
        pad(weight.scales, padding)
        .unflatten(0, (-1, width))
        .transpose(1, 2)
        .contiguous()
        .view(torch.uint8)
    )
    return torch.cat((codes.permute(0, 2, 3, 1, 4).flatten(2), scales), 2)
