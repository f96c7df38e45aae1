"""`manylora`, but while a file exists each generation leaks a page of memory, as the endurance test must notice."""

from __future__ import annotations

import os

from starlette.types import Receive, Scope, Send

from manylora.cli import main
from manylora.config import environment
from manylora.server.generation.routes import GenerationResponse

LEAKED_BYTES = 4096
WHILE = environment()["LEAK_WHILE"]
_kept: list[bytes] = []
_answer = GenerationResponse.__call__


async def _answer_and_leak(
    self: GenerationResponse, scope: Scope, receive: Receive, send: Send
) -> None:
    if os.access(WHILE, os.F_OK):
        _kept.append(os.urandom(LEAKED_BYTES))
    await _answer(self, scope, receive, send)


if __name__ == "__main__":
    GenerationResponse.__call__ = _answer_and_leak  # type: ignore[method-assign]
    main()
