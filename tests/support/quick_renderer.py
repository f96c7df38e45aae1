"""Renders chats without a child process, which takes a second to start and has tests of its own."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

from manylora.server.sandbox import chat_worker
from manylora.server.sandbox.chat_renderer import ChatRenderer


class QuickRenderer(ChatRenderer):
    """Calls what the child would run."""

    async def answer(self, job: dict[str, Any], num_bytes: int) -> dict[str, Any]:  # noqa: ARG002
        return dict(json.loads(json.dumps(self._answer(json.loads(json.dumps(job))))))

    @cached_property
    def _answer(self) -> Any:
        return chat_worker.renderer(self.template)
