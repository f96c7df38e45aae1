"""The program that renders chats in a process with limits: `python -P -m manylora.server.sandbox.chat_worker`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from manylora.engine.text.chat_template import ChatTemplate
from manylora.errors import InvalidRequestError
from manylora.server.sandbox.worker import Limits, keep_answering

MEMORY_BYTES = 256 << 20


def limits(setup: dict[str, Any]) -> Limits:
    """Limits of each chat."""
    return Limits(cpu_s=setup["cpu_s"], memory_bytes=MEMORY_BYTES)


def renderer(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, str | None]]:
    """Make what answers jobs for the chat template of `setup`: the `text` of a chat, or why it is `refused`."""
    made = ChatTemplate(**setup["template"])

    def answer(job: dict[str, Any]) -> dict[str, str | None]:
        try:
            return {"text": made.render(**job)}
        except InvalidRequestError as error:
            return {"refused": error.message, "code": error.code}

    return answer


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # it takes seconds and is not needed
    logging.getLogger("transformers").setLevel(logging.ERROR)
    import transformers.utils.chat_template_utils  # noqa: F401 - before it forks

    keep_answering(renderer, limits)
