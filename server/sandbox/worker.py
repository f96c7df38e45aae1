"""The loops of a process that answers jobs under limits. It ends when its standard input does.

The first line of standard input sets the process up, and each further line holds a job: `[number, job]` in JSON. A line
of standard output answers it: `[number, answer]`, or `[null, signal]` where the system ended what worked on it. This
process only forks: what may do harm is read by its forks.
"""

from __future__ import annotations

import gc
import io
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_NO_MORE_JOBS = 3
"""Status of a fork that keeps answering when it ends by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one job."""

    cpu_s: float
    memory_bytes: int
    """Address space beyond what a fork begins with."""


def answer_each(answer: Callable[[Any], object], limits: Callable[[Any], Limits]) -> None:
    """Answer each job in a fork of its own, which knows nothing of other jobs and cannot reach standard output."""
    gc.freeze()
    sys.stdin.buffer.readline()
    while line := sys.stdin.buffer.readline():
        number, job = json.loads(line)
        reader, writer = os.pipe()
        if not (child := os.fork()):
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(writer, 1)
            os.closerange(2, writer + 1)
            _answer_once(answer, job, limits(job))
        os.close(writer)
        with open(reader, "rb") as pipe:
            found = pipe.read()
        status = os.waitpid(child, 0)[1]
        is_answer = status == 0 and b"\n" not in found
        _write(b"[%d,%b]\n" % (number, found) if is_answer else _ended_by(status))


def keep_answering(
    make: Callable[[Any], Callable[[Any], object]], limits: Callable[[Any], Limits]
) -> None:
    """Answer all jobs in one fork, which takes no time for forking. The next one follows where a job passed a limit.

    Args:
        make: Makes what answers jobs of what the first line says. It runs in the fork, under the limits of a first job.
        limits: Limits of each job, by the first line too.
    """
    gc.freeze()
    # Without a buffer, which could hold the first job for all forks.
    setup = json.loads(io.FileIO(0, closefd=False).readline() or b"null")
    while True:
        if not (child := os.fork()):
            _answer_all(make, setup, limits(setup))
        status = os.waitpid(child, 0)[1]
        if os.waitstatus_to_exitcode(status) == _NO_MORE_JOBS:
            return
        _write(b"\n" + _ended_by(status))  # a part of an answer may stand before it


def _answer_once(answer: Callable[[Any], object], job: object, limits: Limits) -> NoReturn:
    status = 1
    try:
        cpu_s = math.ceil(limits.cpu_s)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        _limit_files_and_memory(limits.memory_bytes)
        with open(1, "w") as output:
            output.write(json.dumps(answer(job)))
        status = 0
    except MemoryError:
        os.abort()
    finally:
        os._exit(status)


def _answer_all(
    make: Callable[[Any], Callable[[Any], object]], setup: object, limits: Limits
) -> NoReturn:
    answer: Callable[[Any], object] | None = None
    status = 1
    try:
        _limit_files_and_memory(limits.memory_bytes)
        for line in open(0, "rb", closefd=False):  # noqa: SIM115
            number, job = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)  # its signal ends the fork
            answer = answer or make(setup)
            found = json.dumps([number, answer(job)]).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            _write(found + b"\n")
        status = _NO_MORE_JOBS
    except MemoryError:
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


def _ended_by(status: int) -> bytes:
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return b"[null,%d]\n" % number


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
