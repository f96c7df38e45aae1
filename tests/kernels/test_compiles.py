"""The watch for compilations, with Triton's own compiler and no GPU."""

import json
import re
from pathlib import Path

import pytest

from triton_processes import SUPPORT, run_compiling


def test_each_compilation_after_begin_is_counted_and_told(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs Triton, which is there on Linux")
    program = str(SUPPORT / "watched_compiles.py")
    found = json.loads(run_compiling([program], tmp_path, PYTHONPATH=str(SUPPORT)))
    assert found["counts"] == {"add_kernel": 2}
    assert found["later"] == {"add_kernel": 2}, "one of them after the first watch ended"
    assert found["seen_by_the_hook_before"] == 5, "two of them while nobody watched"
    assert "add_kernel" in found["complaint"]
    by_the_watch = [message for message in found["messages"] if "BLOCK=16" in message]
    assert len(by_the_watch) == 2, "one from each watch"
    assert re.fullmatch(
        r"a kernel was compiled while requests are served: add_kernel\(BLOCK=16, num_warps=4, num_stages=3; "
        r"dividing by 16: x, n\)",
        by_the_watch[0],
    )


def test_a_watch_does_not_import_triton(tmp_path: Path) -> None:
    program = """
import sys
from manylora.kernels.triton.compiles import CompileWatch
with CompileWatch() as watch:
    print("triton" in sys.modules, dict(watch.counts))
"""
    assert run_compiling(["-c", program], tmp_path) == "False {}\n"
