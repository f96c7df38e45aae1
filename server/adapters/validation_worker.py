"""The child process that validates what a tenant uploaded: `python -P -m weft.server.adapters.validation_worker`.

One JSON object comes on stdin, one goes to stdout. Memory, CPU time and file writes are limited first: a fault in a
parser then costs one upload and not the server. Knows nothing of HTTP.
"""

from __future__ import annotations

import base64
import json
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weft.adapters.base_shape import BaseShape, ModuleShape
from weft.adapters.checkpoint.reader import read_checkpoint
from weft.errors import AdapterError, PayloadTooLargeError

MEMORY_BYTES = 1 << 30
"""Address space; the reader works in windows of a few MiB, the rest is the interpreter and numpy."""


def answer(job: dict[str, Any]) -> dict[str, object]:
    """What is told of an upload as JSON types: its facts, `findings`, or that its config is `too_large`."""
    config, weights = base64.b64decode(job["config"]), Path(job["weights"])
    modules = tuple(ModuleShape(**module) for module in job["base"]["modules"])
    base = BaseShape(**{**job["base"], "modules": modules})
    try:
        return read_checkpoint(config, weights, base, job["max_rank"], base_names=job["base_names"]).facts()
    except AdapterError as error:
        return {"findings": [asdict(found) for found in error.findings]}
    except PayloadTooLargeError as error:
        return {"too_large": {"message": error.message, "code": error.code}}


def main() -> int:
    """Validate one adapter; 0 also for an adapter that is refused."""
    job = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_s"], job["cpu_s"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    json.dump(answer(job), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
