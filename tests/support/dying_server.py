"""`manylora` without a model, which kills itself where a file says: what a crash at that very moment leaves behind.

The file holds the name of one point and is removed on the way out, so that the next start lives on. Everything is
imported once; each line of stdin, a JSON list of arguments, starts a server in a child process, and its pid and exit
status go to stdout.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine, demo_tokenizer
from manylora.adapters.blobs import local as blobs
from manylora.cli import main
from manylora.config import environment
from manylora.engine.status import EngineReady
from manylora.registry import adapters, uploads
from manylora.server import serve
from manylora.server.adapters import idempotency
from manylora.server.adapters import resumable_upload as piecewise
from manylora.server.telemetry.metrics import Metrics
from manylora.server.uploads import staged_files
from manylora.server.uploads.validation import AdapterValidator
from quick_validator import QuickValidator

WHERE = Path(environment()["DIE_WHERE"])
POINTS: list[str] = []


class EngineOfNobody(FakeEngine):
    """Stands where the engine's client does."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    async def start(self) -> EngineReady:
        assert self.ready is not None
        return self.ready

    async def close(self) -> None: ...


def _die_at(point: str) -> None:
    if WHERE.exists() and WHERE.read_text() == point:
        WHERE.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(
    owner: Any, name: str, point: str, when: Callable[..., bool] = lambda *_, **__: True
) -> None:
    """Die before and after each call of `owner.name`; `when` says of its arguments whether the call counts."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        if not when(*arguments, **options):
            return function(*arguments, **options)
        _die_at(f"before {point}")
        result = function(*arguments, **options)
        if inspect.isawaitable(result):
            return _wait(result, point)
        _die_at(f"after {point}")
        return result

    setattr(owner, name, run)


async def _wait(result: Any, point: str) -> Any:
    found = await result
    _die_at(f"after {point}")
    return found


def install() -> None:
    """Watch every step of both ways in."""
    vars(serve)["EngineClient"] = EngineOfNobody
    vars(serve)["AdapterValidator"] = QuickValidator
    _watch(blobs.BlobWriter, "write", "temporary bytes", lambda _, chunk: len(chunk) > 0)
    _watch(AdapterValidator, "validate", "validation")
    _watch(blobs.BlobWriter, "commit", "blob")
    _watch(os, "rename", "rename", lambda *_, **options: "src_dir_fd" in options)
    _watch(adapters.Adapters, "publishing", "transaction")
    # In the transaction, whose rows are written and not committed; and after it.
    _watch(uploads.Publication, "keep", "limits")
    _watch(Metrics, "learn_adapter", "naming")
    _watch(idempotency, "answered", "answer")
    _watch(uploads.Uploads, "create", "announcement")
    _watch(staged_files, "write_all", "staged bytes", lambda _, chunk: len(chunk) > 0)
    _watch(os, "fsync", "staged sync", lambda fd: "/uploads/" in os.readlink(f"/proc/self/fd/{fd}"))
    _watch(piecewise, "gather", "gathering")
    _watch(staged_files.StagedFiles, "delete", "clearing")


def _serve(arguments: list[str]) -> None:
    status = 1
    try:
        sys.argv = ["manylora", *arguments]
        with open(environment()["LOG"], "ab", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        main()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - the child must not go on as its parent
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    install()
    demo_tokenizer()
    for line in sys.stdin:
        if not (child := os.fork()):
            _serve(json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
