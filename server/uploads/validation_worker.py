"""The child process that validates what a tenant uploaded: `python -P -m manylora.server.uploads.validation_worker`.

Each job is done under limits, in a fork that knows nothing of other jobs: a fault in a parser then costs one upload and
not the server. Knows nothing of HTTP.
"""

from __future__ import annotations

import base64
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from manylora.adapters.base_shape import BaseShape, ModuleShape
from manylora.adapters.checkpoint.reader import read_checkpoint
from manylora.errors import AdapterError, PayloadTooLargeError
from manylora.server.sandbox.worker import Limits, answer_each

MEMORY_BYTES = 1 << 29
"""Address space beyond that of the interpreter and numpy; the reader works in windows of a few MiB."""


def answer(job: dict[str, Any]) -> dict[str, object]:
    """Result of the check of an upload in JSON types: its facts, `findings`, or that its config is `too_large`."""
    config = base64.b64decode(job["config"])
    path = Path(job["weights"])
    # A memory file is named by a link of the kernel's, which is to be followed; a file on disk is not.
    weights = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if path.parts[1:2] == ("proc",) else path
    modules = tuple(ModuleShape(**module) for module in job["base"]["modules"])
    base = BaseShape(**{**job["base"], "modules": modules})
    try:
        return read_checkpoint(
            config, weights, base, job["max_rank"], base_names=job["base_names"]
        ).facts()
    except AdapterError as error:
        return {"findings": [asdict(found) for found in error.findings]}
    except PayloadTooLargeError as error:
        return {"too_large": {"message": error.message, "code": error.code}}


def limits(job: dict[str, Any]) -> Limits:
    """Limits of a job."""
    return Limits(cpu_s=job["cpu_s"], memory_bytes=MEMORY_BYTES)


if __name__ == "__main__":
    answer_each(answer, limits)
