"""Runs the Triton kernels through the interpreter, each file in a process of its own: see interpreted/conftest.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


def test_every_kind_of_kernel_is_run() -> None:
    assert FILES == ["test_attention_triton.py", "test_rowwise_triton.py", "test_sgmv_triton.py"]


@pytest.mark.timeout(280)
@pytest.mark.parametrize("name", FILES)
def test_kernels_are_right_in_the_interpreter(name: str) -> None:
    pytest.importorskip("triton", reason="needs Triton, which is there on Linux")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}  # noqa: TID251
    result = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / name)],
        env={**inherited, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=270,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout
