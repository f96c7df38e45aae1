"""Validates uploads without a child process, which takes most of an upload's time and has tests of its own."""

from __future__ import annotations

import asyncio
import json
from functools import cached_property
from typing import Any

from manylora.server.uploads import validation_worker
from manylora.server.uploads.validation import AdapterValidator


class QuickValidator(AdapterValidator):
    """Calls in a thread what the child would run."""

    async def in_child(self, job: dict[str, str], cpu_s: float) -> dict[str, Any]:  # noqa: ARG002
        found = await asyncio.to_thread(self._answer, json.loads(json.dumps(job)))
        return dict(json.loads(json.dumps(found)))

    @cached_property
    def _answer(self) -> Any:
        return validation_worker.validator(json.loads(json.dumps(self.setup)))
