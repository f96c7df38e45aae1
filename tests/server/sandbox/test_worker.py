"""A program that cannot begin to answer jobs ends, and says why."""

from __future__ import annotations

import subprocess
import sys

import pytest

START = "from manylora.server.sandbox.worker import answer_jobs, read_setup; read_setup(); "


@pytest.mark.parametrize(
    ("code", "first_line", "reason"),
    [
        ("answer_jobs(dict, 1 << 70)", "null", "bytes of memory cannot be set here"),
        ("answer_jobs(dict, 1 << 28)", "no JSON", "JSONDecodeError"),
        ("answer_jobs(dict, 1 << 28)", "", "JSONDecodeError"),
    ],
)
def test_it_ends_where_a_fork_would_only_fail_again(
    code: str, first_line: str, reason: str
) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", START + code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdin.write(first_line + "\n")
        program.stdin.flush()
        assert reason in program.stderr.read()  # standard input is still open
        assert program.stdout.read() == ""
    assert program.returncode == 1
