"""Child processes that validate: they are kept, and fork a child for each job.

A new process takes a third of a second to import what it needs, a fork some milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from typing import Any

from weft.config import environment

MAX_ANSWER_BYTES = 1 << 24
_HIDDEN_FROM_CHILD = ("WEFT_", "AWS_", "PG")
"""Prefixes of variables that hold secrets, or may."""


class KeptProcesses:
    """Processes that fork a child for each job; as many as there were jobs at once. Thread: the event loop's."""

    def __init__(self) -> None:
        self._idle: list[Process] = []

    async def run(self, job: dict[str, Any], wall_s: float) -> bytes | None:
        """The answer of a fork; None where it failed or took longer than `wall_s` seconds."""
        self._idle = [process for process in self._idle if process.returncode is None]
        process = self._idle.pop() if self._idle else await _start()
        answer = b""
        try:
            if process.stdin is None or process.stdout is None:
                raise ValueError("a kept process has pipes")
            with contextlib.suppress(TimeoutError, OSError, ValueError):
                process.stdin.write(json.dumps(job).encode() + b"\n")
                async with asyncio.timeout(wall_s):
                    answer = await process.stdout.readline()
        finally:
            if answer:
                self._idle.append(process)
            else:  # it died, or its child still runs
                await _end(process)
        return answer.strip() or None

    async def close(self) -> None:
        """End them."""
        while self._idle:
            await _end(self._idle.pop())


async def _start() -> Process:
    env = {name: value for name, value in environment().items() if not name.startswith(_HIDDEN_FROM_CHILD)}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "weft.server.adapters.validation_worker"),
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        env={**env, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,
        limit=MAX_ANSWER_BYTES,
    )


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
