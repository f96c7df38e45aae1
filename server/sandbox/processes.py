"""Processes that answer jobs under limits, as `worker.py` does, seen from the server. Thread: the event loop's."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from functools import partial
from pathlib import Path
from typing import Any

from manylora.config import environment
from manylora.server.process.threads import in_thread

MAX_ANSWER_BYTES = 1 << 24
LONG_BYTES = 1 << 15
"""Jobs and answers above this size are written and read in threads."""
LOOK_S = 1.0
"""Seconds between two looks at whether a process was stopped."""
_LIMITS = frozenset({signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV})
"""Signals by which the system ends what passes a limit of CPU time, memory or stack."""
_HIDDEN = ("MANYLORA_", "AWS_", "PG")
"""Prefixes of variables that hold secrets, or may."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
"""Each thread takes address space."""


class LimitReachedError(Exception):
    """A job took more CPU time, memory or time than it may."""


class WallTimeError(LimitReachedError):
    """A job was not answered in time, whatever its process did meanwhile."""


class NoAnswerError(Exception):
    """A job was not answered for another reason."""


class ProcessLostError(NoAnswerError):
    """A process was ended, or stopped, from outside."""


class SandboxedProcesses:
    """Processes of one program, as many as there were jobs at once.

    Args:
        module: The program, run by `python -m`.
        setup: The first line that each process reads, of JSON types.
    """

    def __init__(self, module: str, setup: object) -> None:
        self._module = module
        self._setup = setup
        self._idle: list[Process] = []
        self._numbers = itertools.count()

    async def ask(self, job: object, *, cpu_s: float, wall_s: float, num_bytes: int = 0) -> Any:  # noqa: ANN401 - JSON
        """The answer to a job. A process that was ended or stopped from outside is replaced once.

        Args:
            job: Of JSON types.
            cpu_s: CPU seconds that it may take.
            wall_s: Seconds that it may take.
            num_bytes: About the length of the job.

        Raises:
            LimitReachedError: It reached a limit.
            NoAnswerError: It failed, or two processes were lost.
        """
        number = next(self._numbers)
        write = partial(_line, [number, cpu_s, job])
        line = await in_thread(write) if num_bytes > LONG_BYTES else write()
        try:
            return await self._ask(number, line, wall_s)
        except ProcessLostError:
            await self.close()  # what ended one may have ended the others
            return await self._ask(number, line, wall_s)

    async def close(self) -> None:
        """End the processes."""
        while self._idle:
            await _end(self._idle.pop())

    async def _ask(self, number: int, line: bytes, wall_s: float) -> Any:  # noqa: ANN401 - JSON
        process = await self._idle_or_new()
        is_sound = False
        watching = asyncio.create_task(_end_when_stopped(process))
        try:
            async with asyncio.timeout(wall_s):
                found = await _exchange(process, number, line)
            is_sound = True
        except TimeoutError as error:
            raise WallTimeError(f"no answer within {wall_s} s") from error
        finally:
            watching.cancel()
            if is_sound:
                self._idle.append(process)
            else:
                await _end(process)
        if isinstance(found, Exception):
            raise found
        return found

    async def _idle_or_new(self) -> Process:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
            await _end(process)  # its fork may live
        env = {name: value for name, value in environment().items() if not name.startswith(_HIDDEN)}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            self._module,
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env=env | _ONE_THREAD,
            start_new_session=True,
            limit=MAX_ANSWER_BYTES,
        )
        _pipes(process)[0].write(_line(self._setup))
        return process


def _line(content: object) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


async def _exchange(process: Process, number: int, job: bytes) -> Any:  # noqa: ANN401 - JSON, or why there is none
    """Send the line of a job; returns its answer, or the error that the process reports of it.

    Raises:
        ProcessLostError: The process ended, or something else ended what worked on the job.
    """
    stdin, stdout = _pipes(process)
    try:
        stdin.write(job)
        while line := await stdout.readline():
            is_long = len(line) > LONG_BYTES
            with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError):  # a part
                found = await in_thread(json.loads, line) if is_long else json.loads(line)
                answered, answer = found
                if answered == number:
                    return answer
                if answered is None and answer in _LIMITS:
                    return LimitReachedError(f"ended by signal {answer}")
                if answered is None and answer == 0:
                    return NoAnswerError("the program failed")
                break
    except (ConnectionError, ValueError, TypeError) as error:
        raise ProcessLostError("it ended, or its answer is too long") from error
    raise ProcessLostError("it ended")


def _pipes(process: Process) -> tuple[asyncio.StreamWriter, asyncio.StreamReader]:
    if process.stdin is None or process.stdout is None:
        raise ValueError("a process of a sandbox has pipes")
    return process.stdin, process.stdout


async def _end_when_stopped(process: Process) -> None:
    """Wait until the process or its fork is stopped, which nobody tells, and kill both."""
    while not _is_stopped(process.pid):  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(LOOK_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    """True if a process or one of its children was stopped, which only a signal ends."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        stats = [
            Path(f"/proc/{each}/stat").read_text(encoding="utf-8") for each in (pid, *children)
        ]
    except OSError:  # one of them has ended
        return False
    return any(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _pipes(process)[0].close()
    await process.communicate()
