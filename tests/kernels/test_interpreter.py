"""Runs the contract suite over the Triton kernels in its interpreter, in a process of its own."""

from pathlib import Path

import pytest

from triton_processes import TIMEOUT_S, run_interpreted

FILES = (
    "test_attend.py",
    "test_attention.py",
    "test_attention_rows.py",
    "test_deltas.py",
    "test_flashinfer.py",
    "test_kv_int8.py",
    "test_masks.py",
    "test_rows.py",
    "test_sampling.py",
    "test_sgmv.py",
    "test_triton_steps.py",
)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 10)
def test_kernels_are_right_in_the_interpreter() -> None:
    printed = run_interpreted([Path(__file__).with_name(name) for name in FILES], "-k", "triton")
    assert "skipped" not in printed
