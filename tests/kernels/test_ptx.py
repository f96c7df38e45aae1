"""What the Triton compiler makes of the kernels for sm_90; needs no GPU, but a process that does not interpret."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[1] / "support" / "ptx_report.py"
SGMV = [
    *(
        f"{kernel} {rows} {dtype}"
        for kernel in ("shrink", "expand", "expand heads", "expand silu", "expand norm")
        for rows in (16, 64)
        for dtype in ("bf16", "fp16", "fp32")
        if (kernel, rows) != ("expand norm", 64)  # the expand is launched alone then
    ),
    "expand heads int8",
]
ATTENTION = ["items", "items limited", "items int8", "chunks", "chunks limited", "chunks int8"]
ROWWISE = ["embed", "norm", "norm add", "heads", "heads normed", "heads int8", "silu_and_mul", "zero_pages"]
SAMPLING = [f"sample {name}" for name in ("stats", "edges top-k", "edges top-p", "bound top-k", "bound top-p", "draw")]
Report = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    pytest.importorskip("triton", reason="needs Triton, which is there on Linux")
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}  # noqa: TID251
    result = subprocess.run(
        [sys.executable, "-P", str(PROGRAM)],
        env={**inherited, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    counts: Report = json.loads(result.stdout)
    return counts


def test_all_variants_are_compiled(report: Report) -> None:
    assert set(report) == {*SGMV, *ATTENTION, *ROWWISE, *SAMPLING, "reduce", "reduce limited"}


@pytest.mark.parametrize("variant", [*SGMV, *ATTENTION, *ROWWISE, *SAMPLING])
def test_no_weight_key_or_activation_moves_by_single_elements(report: Report, variant: str) -> None:
    assert report[variant]["load_2_bytes"] == 0
    assert report[variant]["store_2_bytes"] == 0


@pytest.mark.parametrize("variant", [*SGMV, *ATTENTION])
def test_weights_and_keys_are_read_16_bytes_at_a_time_into_tensor_cores(report: Report, variant: str) -> None:
    assert report[variant]["async_16"] + report[variant]["load_16_bytes"] >= 4
    assert report[variant]["tensor_core"] > 0 or "fp32" in variant


@pytest.mark.parametrize("variant", [name for name in SGMV if name.startswith("shrink")])
def test_shrink_has_no_narrow_copies_at_all(report: Report, variant: str) -> None:
    assert report[variant]["async_16"] >= 4
    assert report[variant]["async_narrow"] == 0
