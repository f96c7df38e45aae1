import pytest
import torch

from cpu_kernels import ALL_KERNELS, CPU_KERNELS, KERNELS_AND_DTYPES
from kernel_numerics import assert_rows_close, assert_rows_match
from oracles import silu_and_mul_reference
from silu_rows import extreme_gates
from weft.kernels.dispatch import Kernels

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def randn(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn((rows, width), generator=torch.Generator().manual_seed(0)) * 8).to(dtype)


@pytest.mark.parametrize(("kernels", "dtype"), KERNELS_AND_DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 24), (7, 896), (2, 2049), (5, 14336), (0, 16)])
def test_cpu_versions_equal_the_reference(rows: int, width: int, kernels: Kernels, dtype: torch.dtype) -> None:
    gate_up = randn(rows, 2 * width, dtype)
    assert_rows_close(kernels.silu_and_mul(gate_up), silu_and_mul_reference.silu_and_mul(gate_up))


@pytest.mark.parametrize(("kernels", "dtype"), KERNELS_AND_DTYPES)
def test_large_gates_let_all_through_or_nothing(kernels: Kernels, dtype: torch.dtype) -> None:
    gate_up = extreme_gates(dtype)
    assert_rows_match(kernels.silu_and_mul(gate_up), silu_and_mul_reference.silu_and_mul(gate_up))


@pytest.mark.parametrize("kernels", ALL_KERNELS)
def test_numbers_are_those_of_the_definition(kernels: Kernels) -> None:
    gate_up = torch.tensor([[1.0, -2.0, 200.0, -200.0, 3.0, 5.0, 0.5, 7.0]])
    expected = torch.tensor([[3 / (1 + 2.718281828**-1), -10 / (1 + 2.718281828**2), 100.0, 0.0]])
    torch.testing.assert_close(kernels.silu_and_mul(gate_up), expected)


@pytest.mark.parametrize("kernels", CPU_KERNELS)
def test_the_operand_stays(kernels: Kernels) -> None:
    gate_up = randn(3, 64, torch.float32)
    kernels.silu_and_mul(gate_up)
    assert torch.equal(gate_up, randn(3, 64, torch.float32))


@pytest.mark.parametrize("kernels", ALL_KERNELS)
def test_misfits_are_refused(kernels: Kernels) -> None:
    gate_up = randn(3, 64, torch.float32)
    with pytest.raises(ValueError, match=r"gate_up: expected two dimensions, the second even, got \[3, 63\]"):
        kernels.silu_and_mul(gate_up[:, 1:])
    with pytest.raises(ValueError, match=r"gate_up: expected contiguous rows, got \(64, 1\)"):
        kernels.silu_and_mul(gate_up[:, 2:])
    with pytest.raises(ValueError, match=r"gate_up: expected two dimensions, the second even, got \[1, 3, 64\]"):
        kernels.silu_and_mul(gate_up[None])
