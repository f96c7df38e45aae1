"""Runs the contract suite over the Triton kernels in its interpreter, in processes of its own."""

from pathlib import Path

import pytest

from triton_processes import run_interpreted

FILES = (
    ("test_attend.py", "test_attention.py", "test_triton_steps.py"),
    (
        "test_attention_rows.py",
        "test_deltas.py",
        "test_kv_int8.py",
        "test_masks.py",
        "test_rows.py",
    ),
    ("test_sampling.py", "test_sgmv.py"),
)
"""Of each process: three that take about as long."""


@pytest.mark.slow
@pytest.mark.timeout(580)
@pytest.mark.parametrize("files", FILES, ids=" ".join)
def test_kernels_are_right_in_the_interpreter(files: tuple[str, ...]) -> None:
    printed = run_interpreted([Path(__file__).with_name(name) for name in files], "-k", "triton")
    assert "skipped" not in printed
