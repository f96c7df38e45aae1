"""The program that validates what tenants uploaded: `python -P -m manylora.server.uploads.validation_worker`.

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
from manylora.server.sandbox.worker import Answer, answer_jobs, read_setup

MEMORY_BYTES = 1 << 29
"""Address space beyond that of the interpreter and numpy; the reader works in windows of a few MiB."""


def validator(setup: dict[str, Any]) -> Answer:
    """Make what answers jobs for a base: the facts of an upload, `findings`, or that its config is `too_large`."""
    modules = tuple(ModuleShape(**module) for module in setup["base"]["modules"])
    base = BaseShape(**{**setup["base"], "modules": modules})

    def answer(job: dict[str, str]) -> dict[str, object]:
        config = base64.b64decode(job["config"])
        path = Path(job["weights"])
        # A memory file is named by a link of the kernel's, which is to be followed; a file on disk is not.
        is_linked = path.parts[1:2] == ("proc",)
        weights = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if is_linked else path
        try:
            return read_checkpoint(
                config, weights, base, setup["max_rank"], base_names=setup["base_names"]
            ).facts()
        except AdapterError as error:
            return {"findings": [asdict(found) for found in error.findings]}
        except PayloadTooLargeError as error:
            return {"too_large": {"message": error.message, "code": error.code}}

    return answer


if __name__ == "__main__":
    validating = validator(read_setup())
    answer_jobs(lambda: validating, MEMORY_BYTES, one_per_fork=True)
