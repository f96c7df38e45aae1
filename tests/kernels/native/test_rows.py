"""The C++ operations on rows, as they are compiled for this CPU and for lesser ones."""

import pytest
import torch

from cpu_kernels import num_threads
from kernel_numerics import assert_rows_close, assert_rows_match
from oracles import reference_kernels
from silu_rows import extreme_gates
from weft.kernels.kv_slots import KvSlots
from weft.kernels.native import rows as rows_native
from weft.kernels.plain.rows import both_halves

pytestmark = pytest.mark.usefixtures("poisoned_memory", "native_build")
REFERENCE = reference_kernels()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SIZES = pytest.mark.parametrize("size", [2, 16, 24, 100, 896, 2050])


def randn(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def tolerance(dtype: torch.dtype) -> float:
    return 0.1 if dtype == torch.float32 else 1


@DTYPES
@SIZES
def test_norms_are_right(size: int, dtype: torch.dtype) -> None:
    x, residual, weight = randn((5, size), dtype), randn((5, size), dtype, 1), randn((size,), dtype, 2)
    assert_rows_close(rows_native.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6), tolerance(dtype))
    normed, stream = rows_native.fused_add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(stream, x + residual)
    assert_rows_close(normed, REFERENCE.rms_norm(stream, weight, 1e-6), tolerance(dtype))


@DTYPES
@SIZES
def test_rope_is_right(size: int, dtype: torch.dtype) -> None:
    angles = torch.tensor([0.0, 39.0, 7.0])[:, None] * torch.logspace(0, -3, size // 2)
    cos, sin = both_halves(angles.cos(), angles.sin())
    fused = randn((3, 6, size), dtype)
    expected = fused.clone()
    REFERENCE.rope(expected[:, :3], expected[:, 4:], cos, sin)
    rows_native.rope(fused[:, :3], fused[:, 4:], cos, sin)
    assert_rows_close(fused, expected, tolerance(dtype))


@DTYPES
@SIZES
def test_silu_and_mul_is_right(size: int, dtype: torch.dtype) -> None:
    gate_up = randn((3, 2 * size), dtype)
    assert_rows_close(rows_native.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up), tolerance(dtype))


@DTYPES
def test_large_gates_let_all_through_or_nothing(dtype: torch.dtype) -> None:
    gate_up = extreme_gates(dtype)
    assert_rows_match(rows_native.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up))


def test_a_nan_of_any_bits_stays_one() -> None:
    # An instruction makes 0x7FC00000, memory that is filled with ones has this one.
    nan = torch.full((1, 32), -1, dtype=torch.int32).view(torch.float32)
    assert rows_native.silu_and_mul(nan).isnan().all()
    q, k = torch.ones((1, 1, 32), dtype=torch.bfloat16), torch.ones((1, 1, 32), dtype=torch.bfloat16)
    rows_native.rope(q, k, nan, nan)
    assert q.isnan().all()
    assert k.isnan().all()


@pytest.mark.parametrize("distance", [0, 1, 5000, 20000])
def test_sums_are_rounded_to_the_nearest_bfloat16(distance: int) -> None:
    every = torch.arange(2**16).to(torch.int16).view(torch.bfloat16).view(256, 256)
    other = every.view(-1).roll(distance).view(256, 256)
    _, stream = rows_native.fused_add_rms_norm(every, other, torch.ones(256, dtype=torch.bfloat16), 1e-6)
    # Instructions for bfloat16 take numbers below the smallest normal one for zero.
    smallest = torch.finfo(torch.bfloat16).tiny
    torch.testing.assert_close(stream, every + other, rtol=0, atol=smallest, equal_nan=True)


@DTYPES
def test_kv_write_stores_exact_bits(dtype: torch.dtype) -> None:
    slots = KvSlots.build([35, -1, 16, 17, 79], 16, torch.device("cpu"))
    fused = randn((5, 9, 24), dtype)
    expected = torch.full((6, 2, 2, 3, 16, 24), float("nan"), dtype=dtype)
    actual = expected.clone()
    rows_native.kv_write(fused[:, 3:6], fused[:, 6:], actual[:, 1, 0], actual[:, 1, 1], slots)
    REFERENCE.kv_write(fused[:, 3:6], fused[:, 6:], expected[:, 1, 0], expected[:, 1, 1], slots)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(actual.view(bits), expected.view(bits))


@DTYPES
def test_results_are_bitwise_the_same_alone_and_with_more_threads(dtype: torch.dtype) -> None:
    x, weight, gate_up = randn((100, 896), dtype), randn((896,), dtype, 1), randn((100, 1792), dtype)
    normed, gated = rows_native.rms_norm(x, weight, 1e-6), rows_native.silu_and_mul(gate_up)
    for row in range(100):
        assert torch.equal(rows_native.rms_norm(x[row : row + 1], weight, 1e-6)[0], normed[row])
        assert torch.equal(rows_native.silu_and_mul(gate_up[row : row + 1])[0], gated[row])
    with num_threads(2):
        assert torch.equal(rows_native.rms_norm(x, weight, 1e-6), normed)
        assert torch.equal(rows_native.silu_and_mul(gate_up), gated)
