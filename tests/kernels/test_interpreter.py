"""Runs the contract suite over the Triton kernels in its interpreter, in a process of its own.

TRITON_INTERPRET must be set before Triton is first imported, and a process that has it cannot compile kernels.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = (
    *("test_attend.py", "test_attention.py", "test_attention_rows.py", "test_deltas.py", "test_flashinfer.py"),
    *("test_kv_int8.py", "test_masks.py", "test_rows.py"),
    *("test_sampling.py", "test_sgmv.py", "test_triton_steps.py"),
)


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_kernels_are_right_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="needs Triton, which is there on Linux")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}  # noqa: TID251
    files = [str(Path(__file__).with_name(name)) for name in FILES]
    result = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "triton", *files],
        env={**inherited, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=570,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout
