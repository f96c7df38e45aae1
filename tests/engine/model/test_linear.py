"""Packed weights compute what plain ones do."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional

from manylora.engine.model.linear import (
    PackedLinear,
    can_pack,
    has_fast_bfloat16,
    has_native_float16,
    make_head,
    make_linear,
    padded_rows,
)
from manylora.kernels.dispatch import Kernels, torch_kernels
from manylora.kernels.quantised import Int4Weight, Int8Weight
from manylora.kernels.weight_format import WeightFormat
from numerics import assert_close

CPU_DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 16, 17, 33, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_and_plain_layers_agree(dtype: torch.dtype, num_rows: int, has_bias: bool) -> None:
    if not can_pack(dtype):
        pytest.skip(f"this CPU does not pack {dtype}")
    torch.manual_seed(0)
    weight = torch.randn(96, 64).to(dtype)
    bias = torch.randn(96).to(dtype) if has_bias else None
    x = torch.randn(num_rows, 64).to(dtype)
    packed = PackedLinear(weight, bias)(x)
    assert packed.shape == (num_rows, 96)
    assert_close(packed, functional.linear(x, weight, bias))


def test_few_numbers_of_rows_are_computed_since_each_keeps_a_kernel() -> None:
    padded = [padded_rows(num_rows) for num_rows in range(513)]
    assert padded[:20] == [*range(17), 18, 18, 20]
    assert all(rows <= more <= rows * 9 / 8 for rows, more in enumerate(padded))
    assert len(set(padded)) == 1 + 16 + 5 * 8


def test_a_packed_layer_computes_no_other_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pad = Mock(return_value=8)
    monkeypatch.setattr("manylora.engine.model.linear.padded_rows", pad)
    assert PackedLinear(torch.randn(4, 8), None)(torch.randn(5, 8)).shape == (5, 4)
    pad.assert_called_once_with(5)


def test_rows_of_a_strided_input_are_multiplied_as_they_are() -> None:
    torch.manual_seed(0)
    weight, wide = torch.randn(96, 64), torch.randn(5, 128)
    assert_close(make_linear(weight)(wide[:, 64:]), wide[:, 64:] @ weight.T)


def test_the_result_may_be_changed_in_place() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(8, 16), torch.randn(8), torch.randn(3, 16)
    linear = make_linear(weight, bias)
    expected = linear(x).clone()
    linear(x).add_(1)
    assert_close(linear(x), expected)


def test_float32_is_packed_where_torch_has_onednn() -> None:
    if not torch._C._has_mkldnn:
        pytest.skip("torch without oneDNN")
    assert can_pack(torch.float32)


def test_a_dtype_that_cannot_be_packed_falls_back() -> None:
    assert not can_pack(torch.float64)
    assert not isinstance(make_linear(torch.randn(4, 4, dtype=torch.float64)), PackedLinear)


def test_a_missing_or_wrong_packed_product_is_told_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no such op")

    def wrong(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(3, 48)

    for product, reason in ((missing, "no such op"), (wrong, "come out wrong")):
        caplog.clear()
        monkeypatch.setattr(PackedLinear, "__call__", product)
        assert not can_pack.__wrapped__(torch.float32)
        assert reason in caplog.text


def test_the_probes_of_the_cpu_answer() -> None:
    assert isinstance(has_fast_bfloat16(), bool)
    assert isinstance(has_native_float16(), bool)
    assert can_pack(torch.float16) <= has_native_float16()


def test_a_weight_in_8_bits_is_kept_as_it_is_or_rounded_once_more_but_is_no_float() -> None:
    rounded = Int8Weight.of(torch.randn(70, 64))
    rounded.scales.mul_(1.01)  # its largest code would not be 127 again
    x = torch.randn(3, 64)
    expected = torch_kernels().quantised_linear
    assert expected is not None
    assert torch.equal(make_linear(rounded, weights="int8")(x), expected(rounded, None)(x))
    again = Int4Weight.of(rounded.dequantised())
    assert_close(make_linear(rounded, weights="int4")(x), expected(again, None)(x))
    with pytest.raises(TypeError, match="expected floats to keep as bf16"):
        make_linear(rounded)


def test_a_device_without_layers_of_8_bits_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    usual: Any = next(each.default for each in fields(Kernels) if each.name == "quantised_linear")
    without = replace(torch_kernels(), quantised_linear=usual)
    monkeypatch.setattr("manylora.engine.model.linear.kernels_for", lambda *_: without)
    with pytest.raises(ValueError, match="expected bf16; this device has no layers in 8 or 4 bits"):
        make_linear(torch.randn(4, 4), weights="int8")


def test_layers_of_8_bits_take_activations_of_any_dtype() -> None:
    linear, x = make_linear(torch.randn(96, 64), torch.randn(96), "int8"), torch.randn(3, 64)
    for dtype in (torch.float16, torch.bfloat16):
        assert linear(x.to(dtype)).dtype == dtype
        assert_close(linear(x.to(dtype)), linear(x.to(dtype).float()).to(dtype))


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_head_rounds_its_weights_and_hardly_its_input(
    weights: WeightFormat, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(200, 96), torch.randn(9, 96)
    x[:, 7] *= 100  # an input in 8 bits would round all else to a few steps
    x[3] = 0
    x = x.to(dtype)
    y = make_head(weight, weights)(x)
    exact = x.float() @ Int8Weight.of(weight).dequantised().T
    assert y.dtype == torch.float32
    assert (y - exact).abs().max() < 1e-4 * exact.abs().max()
    assert not y[3].any()
    alone = torch.cat([make_head(weight, weights)(row[None]) for row in x])
    assert torch.equal(y, alone)


def test_a_row_of_a_head_that_is_not_finite_spoils_no_other() -> None:
    head, x = make_head(torch.randn(200, 96), "int8"), torch.randn(3, 96)
    right = head(x)
    x[1, 5] = torch.inf
    y = head(x)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], right[[0, 2]])
