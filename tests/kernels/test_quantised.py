"""The contract of linear layers with weights in 8 and 4 bits, and how weights are rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch

from implementations import BF16, F16, F32, NATIVE, TORCH, VNNI, Implementation, num_threads
from manylora.kernels.native.quantised import QuantisedLinear
from manylora.kernels.plain.quantised import has_exact_int_mm
from manylora.kernels.quantised import (
    MAX_FEATURES,
    ROWS_AT_ONCE,
    Int4Weight,
    Int8Weight,
    QuantisedWeight,
)
from manylora.kernels.weight_format import GROUP, layer_bytes

Rounded = Literal["int8", "int4"]
IMPLEMENTATIONS = [TORCH, *NATIVE, VNNI]
FORMATS: dict[Rounded, Callable[[torch.Tensor], QuantisedWeight]] = {
    "int8": Int8Weight.of,
    "int4": Int4Weight.of,
}
ROWS = (0, 1, 2, 3, 16, 17, 33, 200)
SHAPES = [(1, 1), (7, 3), (64, 32), (33, 31), (70, 100), (130, 899), (96, 896), (17, 4864)]
"""Outputs and inputs: odd ones, less than a panel, and some of each."""
by_format = pytest.mark.parametrize("weights", FORMATS)


def layer(
    impl: Implementation, weight: QuantisedWeight, bias: torch.Tensor | None = None
) -> Callable[..., torch.Tensor]:
    make = impl.kernels.quantised_linear
    assert make is not None
    return make(weight, bias)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))


def reference(x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """The layer by its definition in numpy: codes of x, integer products by group, the rest in float64."""
    rows = x.float().numpy()
    largest = np.maximum(np.abs(rows).max(1, keepdims=True), np.float32(1e-30))
    scales = (largest / np.float32(127)).astype(np.float64)
    codes = np.rint(rows * (np.float32(127) / largest)).astype(np.int64)
    if isinstance(weight, Int8Weight):
        y = (codes @ weight.codes.numpy().astype(np.int64).T) * weight.scales.numpy().astype(
            np.float64
        )
    else:
        y = np.zeros((len(rows), len(weight.codes)))
        for group in range(weight.scales.shape[1]):
            inputs = range(group * GROUP, min((group + 1) * GROUP, weight.in_features))
            own = np.stack([nibbles(weight, index) for index in inputs], 1)  # [outputs, inputs]
            y += (codes[:, inputs] @ own.T) * weight.scales[:, group].double().numpy()
    y *= scales
    return torch.from_numpy(y if bias is None else y + bias.double().numpy())


def nibbles(weight: Int4Weight, index: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The codes of one input, less 8."""
    group, at = divmod(index, GROUP)
    eight, place = divmod(at, 8)
    both = weight.codes[:, group * 16 + eight * 4 + place % 4].long().numpy()
    return (both >> 4 if place >= 4 else both & 15) - 8


def test_products_are_exact_where_those_of_torch_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """As oneDNN computes them on a CPU without VNNI: a sum of two products is at most 32,767."""

    def saturating(codes: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        products = codes.int()[:, :, None] * others.int()[None]
        return products.unfold(1, 2, 2).sum(-1).clamp(-(1 << 15), (1 << 15) - 1).sum(1)

    codes, x = torch.full((3, 64), -128, dtype=torch.int8), torch.full((2, 64), 127.0)
    monkeypatch.setattr(torch, "_int_mm", saturating)
    has_exact_int_mm.cache_clear()
    try:
        assert set(layer(TORCH, Int8Weight(codes, torch.ones(3)))(x).flatten().tolist()) == {
            64 * 127 * -128
        }
    finally:
        has_exact_int_mm.cache_clear()


@by_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_codes_are_exact(
    weights: Rounded, shape: tuple[int, int], impl: Implementation
) -> None:
    """With scales of 1 all that is computed is whole numbers, as long as float32 has them."""
    out, inputs = shape
    x = integers(-127, 127, 9, inputs, seed=1)
    x[:, 0] = torch.tensor([127, -127, 127, -127, 127, -127, 127, -127, 127])
    x[0], x[1] = 127, -127
    weight: QuantisedWeight
    if weights == "int8":
        codes = integers(-128, 127, out, inputs)
        codes[-1], codes[0] = -128, 127
        weight = Int8Weight(codes.to(torch.int8), torch.ones(out))
    else:
        groups = -(-inputs // GROUP)
        weight = Int4Weight(
            integers(0, 255, out, groups * 16).byte(), torch.ones(out, groups).bfloat16(), inputs
        )
        codes = torch.stack(
            [torch.from_numpy(nibbles(weight, index)) for index in range(inputs)], 1
        )
    expected = x @ codes.t()
    assert expected.dtype == torch.int64
    if (
        expected.abs().max() > 1 << 24
    ):  # integers that float32 rounds, once for int8 and group by group for int4
        torch.testing.assert_close(
            layer(impl, weight)(x.float()).double(), expected.double(), rtol=1e-6, atol=0
        )
    else:
        assert torch.equal(layer(impl, weight)(x.float()).long(), expected)


@by_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_layers_equal_their_definition(
    weights: Rounded,
    shape: tuple[int, int],
    has_bias: bool,
    impl: Implementation,
    dtype: torch.dtype,
) -> None:
    weight = FORMATS[weights](randn(*shape) * 0.1)
    bias = randn(shape[0], seed=2) if has_bias else None
    x = (randn(5, shape[1], seed=1) * torch.tensor([[1e-20], [1e-3], [1], [30], [1e3]])).to(dtype)
    y = layer(impl, weight, None if bias is None else bias.to(dtype))(x)
    expected = reference(x, weight, None if bias is None else bias.to(dtype))
    assert (y.dtype, y.shape, y.is_contiguous()) == (dtype, (5, shape[0]), True)
    ulp = {F32: 1e-6, BF16: 2.0**-8, F16: 2.0**-11}[dtype]  # half of it: rounded once
    size = expected.abs().amax(1, keepdim=True)
    error = (y.double() - expected).abs()
    assert bool(
        (error <= ulp * expected.abs() + 1e-6 * size + (2.0**-24 if dtype == F16 else 0)).all()
    )


@by_format
def test_a_row_is_the_same_alone_and_among_any_others(
    weights: Rounded, impl: Implementation, dtype: torch.dtype
) -> None:
    linear = layer(impl, FORMATS[weights](randn(130, 899)), randn(130, seed=2))
    x = randn(max(ROWS), 899, seed=1).to(dtype)
    alone = torch.cat([linear(x[row : row + 1]) for row in range(len(x))])
    for count in ROWS:
        assert torch.equal(linear(x[:count]), alone[:count])
        assert torch.equal(linear(x[len(x) - count :]), alone[len(x) - count :])
    with num_threads(2):
        assert torch.equal(linear(x), alone)
        assert torch.equal(linear(x[:1]), alone[:1])


@by_format
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_becomes_nan_and_no_other_does(
    weights: Rounded, value: float, impl: Implementation, dtype: torch.dtype
) -> None:
    linear = layer(impl, FORMATS[weights](randn(70, 100)), randn(70, seed=2))
    x = randn(9, 100, seed=1).to(dtype)
    expected = linear(x)
    for row, column in ((0, 0), (4, 99), (8, 50)):
        x[row, column] = value
    y = linear(x)
    assert y[[0, 4, 8]].isnan().all()
    others = [1, 2, 3, 5, 6, 7]
    assert torch.equal(y[others], expected[others])


@by_format
def test_a_row_of_zeros_gives_the_bias(
    weights: Rounded, impl: Implementation, dtype: torch.dtype
) -> None:
    bias = randn(70, seed=2).to(dtype)
    x = torch.zeros(2, 100, dtype=dtype)
    x[1] = 1e-35
    y = layer(impl, FORMATS[weights](randn(70, 100)), bias)(x)
    assert torch.equal(y, bias.expand(2, -1))


@by_format
def test_rows_may_be_apart_and_the_input_stays(weights: Rounded, impl: Implementation) -> None:
    wide = randn(5, 250, seed=1)
    before = wide.clone()
    linear = layer(impl, FORMATS[weights](randn(70, 100)))
    assert torch.equal(linear(wide[:, 100:200]), linear(wide[:, 100:200].contiguous()))
    assert torch.equal(wide, before)


@by_format
def test_the_result_is_its_own(weights: Rounded, impl: Implementation) -> None:
    linear, x = layer(impl, FORMATS[weights](randn(70, 100))), randn(3, 100, seed=1)
    expected = linear(x).clone()
    linear(x).add_(1)
    assert torch.equal(linear(x), expected)


@by_format
def test_all_implementations_give_the_same_numbers(weights: Rounded, impl: Implementation) -> None:
    weight, x = FORMATS[weights](randn(130, 899)), randn(33, 899, seed=1)
    tolerance = (
        0.0 if weights == "int8" else 1e-6
    )  # the sum over groups is rounded in float32 or in float64
    expected = layer(TORCH, weight)(x)
    torch.testing.assert_close(
        layer(impl, weight)(x), expected, rtol=tolerance, atol=tolerance * 100
    )


def head(impl: Implementation, weight: Int8Weight) -> Callable[..., torch.Tensor]:
    make = impl.kernels.quantised_head
    assert make is not None
    return make(weight)


@pytest.mark.parametrize("shape", [(7, 3), (70, 100), (130, 899)], ids=str)
def test_a_head_rounds_its_weights_and_hardly_its_input(
    shape: tuple[int, int], impl: Implementation, dtype: torch.dtype
) -> None:
    weight = Int8Weight.of(randn(*shape))
    x = randn(9, shape[1], seed=1)
    x[:, 0] *= 100  # with 8 bits all else would be rounded to a few steps
    x[3] = 0
    x[4] *= 1e-20
    x = x.to(dtype)
    y = head(impl, weight)(x)
    expected = x.double() @ weight.dequantised().double().T
    assert (y.dtype, y.shape, y.is_contiguous()) == (F32, (9, shape[0]), True)
    reach = x.double().abs().amax(1, keepdim=True) * weight.dequantised().double().abs().sum(1)
    assert bool(
        ((y - expected).abs() <= 4e-5 * reach).all()
    )  # half of 1 / (127 * 127), and a little
    assert not y[3].any()


def test_a_row_of_a_head_is_the_same_alone_and_among_any_others(
    impl: Implementation, dtype: torch.dtype
) -> None:
    logits = head(impl, Int8Weight.of(randn(130, 899)))
    x = randn(max(ROWS), 899, seed=1).to(dtype)
    x[5, 7], x[130, 0] = float("nan"), float("inf")
    alone = torch.cat([logits(x[row : row + 1]) for row in range(len(x))])
    assert alone[[5, 130]].isnan().all()
    assert alone.isfinite().all(1).sum() == len(x) - 2
    for count in (0, 1, 3, 33, 200):
        assert torch.equal(logits(x[:count]).nan_to_num(7), alone[:count].nan_to_num(7))
    with num_threads(2):
        assert torch.equal(logits(x).nan_to_num(7), alone.nan_to_num(7))


def test_all_implementations_of_a_head_give_nearly_the_same_numbers(impl: Implementation) -> None:
    weight, x = Int8Weight.of(randn(130, 899)), randn(33, 899, seed=1)
    expected = head(TORCH, weight)(x)
    # The last bit of what the codes leave out may turn one of its codes.
    torch.testing.assert_close(head(impl, weight)(x), expected, rtol=1e-5, atol=1e-3)


@by_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layer_takes_the_bytes_that_are_planned(weights: Rounded, shape: tuple[int, int]) -> None:
    made = QuantisedLinear(FORMATS[weights](randn(*shape)), None)
    assert made._panels.nbytes + made._scales.nbytes + made._bias.nbytes == layer_bytes(
        weights, *shape
    )


@by_format
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_weights_are_rounded_to_the_nearest_code(weights: Rounded, dtype: torch.dtype) -> None:
    weight = randn(ROWS_AT_ONCE + 5, 100).to(dtype)
    weight[3] = 0
    before = weight.clone()
    rounded = FORMATS[weights](weight)
    assert torch.equal(weight, before)
    assert (rounded.in_features, rounded.codes.shape[0]) == (100, ROWS_AT_ONCE + 5)
    error = (rounded.dequantised() - weight.float()).abs()
    if isinstance(rounded, Int8Weight):
        assert (int(rounded.codes.min()), int(rounded.codes.max())) == (-127, 127)
        step = rounded.scales[:, None]
        assert torch.allclose(rounded.scales * 127, weight.float().abs().amax(1))
        assert bool((error <= step * 0.5001).all())
    else:
        step = rounded.scales.float().abs().repeat_interleave(GROUP, 1)[:, :100]
        opposite = (
            rounded.dequantised().abs() >= 6.9 * step
        )  # 8 steps on the other side have the code of 7
        assert bool((error <= step * torch.where(opposite, 1.05, 0.5001)).all())
        assert error.norm() / weight.float().norm() < 0.1
    assert not rounded.dequantised()[3].any()
    again = FORMATS[weights](rounded.dequantised())
    assert torch.equal(again.codes, rounded.codes)
    torch.testing.assert_close(again.dequantised(), rounded.dequantised())


@by_format
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_shows(
    weights: Rounded, value: float, impl: Implementation
) -> None:
    weight = randn(70, 100)
    weight[5, 7] = value
    y = layer(impl, FORMATS[weights](weight))(randn(2, 100))
    assert y[:, 5].isnan().all()
    assert y[:, [4, 6]].isfinite().all()


MISFITS = [
    (
        Int8Weight(torch.zeros(4, 8), torch.ones(4)),
        None,
        "codes: expected dtype torch.int8, got torch.float32",
    ),
    (
        Int8Weight(torch.zeros(4, 8, dtype=torch.int8), torch.ones(5)),
        None,
        r"scales: expected shape \[4\], got \[5\]",
    ),
    (Int8Weight.of(torch.ones(4, 8)), torch.ones(3), r"bias: expected shape \[4\], got \[3\]"),
    (
        Int4Weight(torch.zeros(4, 15).byte(), torch.ones(4, 1).bfloat16(), 32),
        None,
        r"codes: expected shape \[any, 16\]",
    ),
    (
        Int4Weight(torch.zeros(4, 16).byte(), torch.ones(4, 1), 32),
        None,
        "scales: expected dtype torch.bfloat16",
    ),
]


@pytest.mark.parametrize(("weight", "bias", "said"), MISFITS)
def test_misfits_are_refused(
    weight: QuantisedWeight, bias: torch.Tensor | None, said: str, impl: Implementation
) -> None:
    with pytest.raises(ValueError, match=said):
        layer(impl, weight, bias)


def test_a_layer_whose_sums_need_more_than_32_bits_is_refused(impl: Implementation) -> None:
    weight = Int8Weight(torch.zeros(1, MAX_FEATURES + 1, dtype=torch.int8), torch.ones(1))
    with pytest.raises(ValueError, match="codes: expected at most 65536 inputs, got 65537"):
        layer(impl, weight, None)


@by_format
def test_an_input_of_another_width_is_refused(weights: Rounded, impl: Implementation) -> None:
    with pytest.raises(ValueError, match=r"x: expected shape \[any, 8\], got \[2, 9\]"):
        layer(impl, FORMATS[weights](torch.ones(4, 8)))(torch.ones(2, 9))
