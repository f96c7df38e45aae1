"""Reports calls in the product's files to a pipe; `scripts/walk.py` has every process of a server run it first.

A coroutine or generator that goes on is not called again. Nothing is reported until the first byte of the gate is 1.
"""

from __future__ import annotations

import dis
import fcntl
import mmap
import os
import sys
import threading
import time
from types import CodeType, FrameType

FIRST_DESCRIPTOR = 500
"""Above those that processes with limits close at their start."""
NEVER = -2
"""Below the position of every frame."""


def begin(folder: str, product: tuple[str, ...]) -> None:
    """Report calls in files below those of `product` to a folder's pipe `calls`, while its file `gate` holds 1."""
    with open(f"{folder}/gate", "r+b") as file:
        gate = mmap.mmap(file.fileno(), 1)
    opened = os.open(f"{folder}/calls", os.O_WRONLY)
    pipe = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)
    os.close(opened)
    starts: dict[CodeType, int] = {}

    def report(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not gate[0]:
            return
        code = frame.f_code
        if code not in starts:
            starts[code] = _start(code) if code.co_filename.startswith(product) else NEVER
        if frame.f_lasti <= starts[code]:
            line = f"{time.monotonic_ns()} {os.getpid()} {code.co_firstlineno} {code.co_filename}\n"
            os.write(pipe, line.encode())

    threading.setprofile(report)
    sys.setprofile(report)


def _start(code: CodeType) -> int:
    """Position in a function up to which it has only begun; `NEVER` for the body of a module."""
    if code.co_name == "<module>":
        return NEVER
    return next(
        step.offset
        for step in dis.get_instructions(code)
        if (step.opname, step.arg) == ("RESUME", 0)
    )
