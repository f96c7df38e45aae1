"""Linear layers whose weights stay in bfloat16 and become floats in registers."""

from __future__ import annotations

import pytest
import torch

from implementations import BF16, NATIVE, Implementation
from manylora.kernels import dispatch
from manylora.kernels.native.linear import WideningLinear

ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 12, 33, 200)
SHAPES = [(1, 1), (7, 3), (64, 32), (70, 101), (130, 899), (17, 4864)]
"""Outputs and inputs: odd ones, less than a panel, and some of each."""

IMPLEMENTATIONS = NATIVE


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_equals_its_definition(
    shape: tuple[int, int], has_bias: bool, impl: Implementation
) -> None:
    weight = randn(*shape)
    bias = randn(shape[0], seed=2) if has_bias else None
    x = randn(9, shape[1], seed=1)
    y = WideningLinear(weight, bias)(x)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    size = (x.double().abs() @ weight.double().abs().T).amax(1, keepdim=True)
    assert (y.dtype, y.shape, y.is_contiguous()) == (BF16, (9, shape[0]), True)
    error = (y.double() - expected).abs()
    assert bool((error <= 2.0**-8 * expected.abs() + 1e-6 * size).all())


@pytest.mark.parametrize("shape", [(70, 101), (130, 896)], ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    shape: tuple[int, int], impl: Implementation
) -> None:
    linear = WideningLinear(randn(*shape), None)
    x = randn(max(ROWS), shape[1], seed=1)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), alone[:rows])


def test_rows_of_a_wider_tensor_are_multiplied_as_they_are(impl: Implementation) -> None:
    weight = randn(96, 64)
    wide = randn(5, 128, seed=1)
    linear = WideningLinear(weight, None)
    assert torch.equal(linear(wide[:, 64:]), linear(wide[:, 64:].contiguous()))


def test_a_row_that_is_not_finite_spoils_no_other(impl: Implementation) -> None:
    linear = WideningLinear(randn(70, 33), None)
    x = randn(8, 33, seed=1)
    spoilt = x.clone()
    spoilt[3] = float("nan")
    spoilt[5, 32] = float("inf")
    good = [0, 1, 2, 4, 6, 7]
    assert torch.equal(linear(spoilt)[good], linear(x)[good])
    assert not linear(spoilt)[[3, 5]].isfinite().any()


def test_other_inputs_are_refused(impl: Implementation) -> None:
    linear = WideningLinear(randn(8, 4), None)
    with pytest.raises(ValueError, match="expected dtype"):
        linear(torch.ones(2, 4))
    with pytest.raises(ValueError, match="rows of consecutive elements"):
        linear(randn(4, 2).T)
    with pytest.raises(ValueError, match="weight: expected dtype"):
        WideningLinear(torch.ones(8, 4), None)


@pytest.mark.parametrize(
    ("level", "is_widened"),
    [("x86-64-v3", True), ("x86-64-v4", True), ("x86-64-v4-bf16", False), ("x86-64-v4-amx", False)],
)
def test_only_a_cpu_that_multiplies_no_bfloat16_gets_it(
    level: str, is_widened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "level_of", lambda _: level)
    monkeypatch.setattr(dispatch, "native_library", object)
    made = dispatch.native_kernels.__wrapped__().widening_linear
    assert made is (WideningLinear if is_widened else None)
