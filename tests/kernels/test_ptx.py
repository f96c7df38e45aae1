"""What the Triton compiler makes of the kernels; needs no GPU, but a process that does not interpret.

All variants are compiled for sm_90, and those that are not minor for the other kinds of GPU. The folder of another
Triton (`pip install --target FOLDER triton==3.6.0`) in MANYLORA_TEST_TRITON is used instead of the installed one.
"""

import json

import pytest

import triton_processes
from manylora.config import environment
from triton_processes import SUPPORT, run_compiling

TIMEOUT_S = 3 * triton_processes.TIMEOUT_S
pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 10)]

PROGRAM = SUPPORT / "ptx_report.py"
LARGEST_SHARED = 100 * 1024
"""Bytes of shared memory of a program: one fits on each GPU, and two where there are 227 KB."""
LARGEST_WIDE = {80: 101 * 1024, 90: 132 * 1024, 100: 132 * 1024}
"""The same for heads of 256 numbers."""
LARGEST_PRODUCTS = ("shrink", "expand", "items", "chunks")
"""Beginnings of the names of variants that read weights or keys."""
STACKS = {"fp32": 160}
"""Bytes of stack that are accepted, by a part of the name: float32 is for comparisons with a CPU alone."""
Report = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """The figures of the variants, by architecture."""
    pytest.importorskip("triton", reason="needs Triton, which is there on Linux")
    other = environment().get("MANYLORA_TEST_TRITON")
    variables = {"PYTHONPATH": other} if other else {}
    arguments = [str(PROGRAM), *map(str, LARGEST_WIDE), "--all", "90"]
    found: dict[str, Report] = json.loads(
        run_compiling(
            arguments, tmp_path_factory.mktemp("compiled"), timeout_s=TIMEOUT_S, **variables
        )
    )
    return found


def stack_of(name: str, figures: dict[str, int]) -> int:
    """Bytes of stack of a variant, above what is accepted."""
    return max(0, figures["stack"] - sum(most for part, most in STACKS.items() if part in name))


@pytest.mark.parametrize("arch", LARGEST_WIDE)
def test_no_variant_spills_or_moves_single_elements(arch: int, reports: dict[str, Report]) -> None:
    report = reports[str(arch)]
    beginnings = {name.split()[0] for name in report}
    assert beginnings >= {*LARGEST_PRODUCTS, "norm", "silu_and_mul", "sample"}
    assert not {
        name: each for name, each in report.items() if stack_of(name, each) or each["local"]
    }
    assert not {
        name: each for name, each in report.items() if each["load_2_bytes"] or each["store_2_bytes"]
    }
    most = {
        name: LARGEST_WIDE[arch] if name.split()[1:2] == ["256"] else LARGEST_SHARED
        for name in report
    }
    assert not {name: each for name, each in report.items() if each["shared"] > most[name]}
    assert not {
        name: each
        for name, each in report.items()
        if name.startswith("shrink") and each["async_narrow"]
    }
    products = {name: each for name, each in report.items() if name.startswith(LARGEST_PRODUCTS)}
    assert all(each["async_16"] + each["load_16_bytes"] >= 4 for each in products.values()), (
        products
    )
    assert all(each["tensor_core"] > 0 or "fp32" in name for name, each in products.items()), (
        products
    )
