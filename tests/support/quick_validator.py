"""Validates uploads without a child process, which takes most of an upload's time and has tests of its own."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from manylora.server.uploads import validation_worker
from manylora.server.uploads.validation import AdapterValidator


class QuickValidator(AdapterValidator):
    """Calls in a thread what the child would run."""

    async def in_child(self, job: dict[str, Any]) -> dict[str, Any]:
        found = await asyncio.to_thread(validation_worker.answer, json.loads(json.dumps(job)))
        return dict(json.loads(json.dumps(found)))
