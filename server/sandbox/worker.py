"""The loop of a process that answers jobs under limits. It ends when its standard input does.

The first line of standard input sets the program up. Each further line is a job in JSON: `[number, cpu_s, job]`, with
the CPU seconds that it may take. A line of standard output answers it: `[number, answer]`, or `[null, signal]` where
the system ended what worked on it. This process only forks: what may do harm is read by its forks.
"""

from __future__ import annotations

import gc
import io
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

Answer = Callable[[Any], object]
"""Makes the answer to a job, both of JSON types."""
_DONE = 0
_FAILED = 1
_NO_MORE_JOBS = 3
_NOT_READY = 4
"""Exit status of a fork that could not set its limits, and read no job."""


def read_setup() -> Any:  # noqa: ANN401 - JSON
    """Read the first line of standard input."""
    # Without a buffer, which could hold the first job for all forks.
    return json.loads(io.FileIO(0, closefd=False).readline())


def answer_jobs(
    make_answer: Callable[[], Answer], memory_bytes: int, *, one_per_fork: bool = False
) -> None:
    """Answer all jobs in one fork, which takes no time for forking. The next one follows where a job passed a limit.

    Args:
        make_answer: Runs in the fork, under the limits of its first job.
        memory_bytes: Address space that a fork may take beyond what it begins with.
        one_per_fork: Answer each job in a fork of its own, which knows nothing of other jobs.

    Raises:
        SystemExit: A fork cannot set its limits, so that no job would be answered.
    """
    gc.freeze()
    while True:
        if not (child := os.fork()):
            _answer_in_fork(make_answer, memory_bytes, one_per_fork=one_per_fork)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == _NO_MORE_JOBS:
            return
        if status == _NOT_READY:
            sys.exit(f"The limit of {memory_bytes} more bytes of memory cannot be set here.")
        if status != _DONE:
            # A part of an answer may stand before it.
            os.write(1, b"\n[null,%d]\n" % max(-status, 0))


def _answer_in_fork(
    make_answer: Callable[[], Answer], memory_bytes: int, *, one_per_fork: bool
) -> NoReturn:
    status = _NOT_READY
    try:
        _limit_files_and_memory(memory_bytes)
        status = _FAILED
        answer: Answer | None = None
        jobs = open(0, "rb", closefd=False)  # noqa: SIM115 - standard input
        while line := jobs.readline():
            number, cpu_s, job = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the fork
            answer = answer or make_answer()
            found = json.dumps([number, answer(job)], ensure_ascii=False) + "\n"
            signal.setitimer(signal.ITIMER_PROF, 0)
            sys.stdout.buffer.write(found.encode("utf-8", "surrogatepass"))
            sys.stdout.buffer.flush()
            if one_per_fork:
                break
        status = _DONE if line else _NO_MORE_JOBS
    except MemoryError:
        if status == _FAILED:
            os.abort()
    finally:
        os._exit(status)


def _limit_files_and_memory(memory_bytes: int) -> None:
    """Limit this process for good: no file grows or dumps its memory, and only so much memory comes to what it has."""
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = num_pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
