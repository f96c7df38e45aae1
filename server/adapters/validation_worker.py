"""The child process that validates what a tenant uploaded: `python -P -m manylora.server.adapters.validation_worker`.

One job comes per line of stdin, one answer per line goes to stdout, both in JSON. Each job is done by a child that this
process forks, which knows nothing of other jobs. Its memory, CPU time and file writes are limited first: a fault in a
parser then costs one upload and not the server. Knows nothing of HTTP.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from manylora.adapters.base_shape import BaseShape, ModuleShape
from manylora.adapters.checkpoint.reader import read_checkpoint
from manylora.errors import AdapterError, PayloadTooLargeError

MEMORY_BYTES = 1 << 30
"""Address space; the reader works in windows of a few MiB, the rest is the interpreter and numpy."""


def answer(job: dict[str, Any]) -> dict[str, object]:
    """What is told of an upload as JSON types: its facts, `findings`, or that its config is `too_large`."""
    config, path = base64.b64decode(job["config"]), Path(job["weights"])
    # A memory file is named by a link of the kernel's, which is to be followed; a file on disk is not.
    weights = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if path.parts[1:2] == ("proc",) else path
    modules = tuple(ModuleShape(**module) for module in job["base"]["modules"])
    base = BaseShape(**{**job["base"], "modules": modules})
    try:
        return read_checkpoint(config, weights, base, job["max_rank"], base_names=job["base_names"]).facts()
    except AdapterError as error:
        return {"findings": [asdict(found) for found in error.findings]}
    except PayloadTooLargeError as error:
        return {"too_large": {"message": error.message, "code": error.code}}


def serve() -> None:
    """Validate one adapter for each line of stdin; the answer is a line, an empty one where there was none."""
    gc.freeze()
    while job := sys.stdin.buffer.readline():
        reader, writer = os.pipe()
        if not (child := os.fork()):
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(writer, 1)  # the child has no other way to the server
            os.closerange(2, writer + 1)
            try:
                with open(1, "w") as output:
                    output.write(_limited(job))
            finally:
                os._exit(0)  # an answer that is incomplete is not JSON
        os.close(writer)
        with open(reader, "rb") as pipe:
            found = pipe.read()
        is_answer = os.waitpid(child, 0)[1] == 0 and b"\n" not in found
        sys.stdout.buffer.write((found if is_answer else b"") + b"\n")
        sys.stdout.buffer.flush()


def _limited(raw: bytes) -> str:
    """The answer to a job as JSON, under limits that stay with this process."""
    job = json.loads(raw)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_s"], job["cpu_s"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    return json.dumps(answer(job))


if __name__ == "__main__":
    serve()
