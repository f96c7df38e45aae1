"""Validates an uploaded adapter against the loaded base, and counts the pages that a version takes.

Only a child process reads what strangers send: `validation_worker`. It calls `adapters/checkpoint/reader.py`, which has
the rules. A form, pieces and an import all come here through `publish`.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manylora import errors
from manylora.adapters.blobs.store import BlobStore
from manylora.adapters.checkpoint.reader import check_weights
from manylora.adapters.checkpoint.safetensors_header import header_bytes
from manylora.adapters.lora.layout import adapter_pages
from manylora.adapters.ref import LoraSpec, content_digest
from manylora.engine.status import EngineReady
from manylora.registry.records import VersionFacts
from manylora.server.process.fair_semaphore import FairSemaphore
from manylora.server.process.threads import in_thread, place_in
from manylora.server.sandbox.processes import (
    LimitReachedError,
    NoAnswerError,
    ProcessLostError,
    SandboxedProcesses,
)

CHILDREN = 2
"""Uploads that are validated at once; twice as many while one tenant has more than its share."""
CPU_S = 30
"""CPU seconds of a validation: this number, and again for each GiB of weights."""
WALL_FACTOR = 4
"""Seconds that a validation may take for each of its CPU seconds."""
PAGES_CACHED = 4096
USUAL_HEADER_BYTES = 1 << 16
"""Bytes that are read of a weights file first; a longer header takes a second read."""


class AdapterValidator:
    """Validates adapters against the loaded base. Thread: the event loop's.

    Args:
        ready: Base shape, page geometry and rank limit.
        blobs: Where stored weights lie.
        base_names: Names of the base, the served name first.
    """

    def __init__(
        self, ready: EngineReady, blobs: BlobStore, base_names: Sequence[str] = ()
    ) -> None:
        self._ready = ready
        self._blobs = blobs
        self.setup = {
            "base": dataclasses.asdict(ready.base),
            "base_names": base_names,
            "max_rank": ready.max_rank,
        }
        """The first message to each process."""
        self._processes = SandboxedProcesses(
            "manylora.server.uploads.validation_worker", self.setup
        )
        self.places = FairSemaphore(CHILDREN, spare=CHILDREN)
        """Places of uploads that are being validated."""
        self._pages: dict[str, int] = {}
        self._pages_by_header: dict[tuple[str, int], int] = {}

    async def validate(
        self, config: bytes, weights: Path, weights_sha256: str, size_bytes: int
    ) -> VersionFacts:
        """Validate an upload.

        Raises:
            AdapterError, PayloadTooLargeError: It cannot be served, and why.
        """
        job = {"config": base64.b64encode(config).decode(), "weights": str(weights)}
        cpu_s = CPU_S * (1 + (size_bytes >> 30))
        async with place_in(self.places):
            found = await self.in_child(job, cpu_s)
        if "too_large" in found:
            raise errors.PayloadTooLargeError(**found["too_large"])
        if "findings" in found:
            raise errors.AdapterError.of(
                [errors.Finding(**finding) for finding in found["findings"]]
            )
        spec = LoraSpec.from_canonical(found.pop("spec"))
        ranks = {(layer, module): rank for layer, module, rank in found.pop("ranks")}
        pages = await in_thread(adapter_pages, ranks, self._ready.base, self._ready.geometry)
        self._check_room(pages)
        digest = content_digest(spec, weights_sha256)
        _remember(self._pages, digest, pages)
        found["target_modules"] = tuple(found["target_modules"])
        return VersionFacts(
            digest=digest, weights_sha256=weights_sha256, spec=spec, size_bytes=size_bytes, **found
        )

    async def close(self) -> None:
        """End the processes that are kept."""
        await self._processes.close()

    async def in_child(self, job: dict[str, str], cpu_s: float) -> dict[str, Any]:
        """The answer of `validation_worker` to a job that may take `cpu_s` CPU seconds.

        Raises:
            AdapterFormatError: It used more time or memory than a valid adapter needs, or crashed.
            CapacityError: Two processes were ended or stopped meanwhile, which is not the job's doing.
        """
        try:
            found = await self._processes.ask(
                job, cpu_s=cpu_s, wall_s=WALL_FACTOR * cpu_s, num_bytes=len(job["config"])
            )
            return dict(found)
        except ProcessLostError as error:
            message = "Adapters cannot be checked just now. Try again in a moment."
            raise errors.CapacityError(message, retry_after_s=5.0) from error
        except (LimitReachedError, NoAnswerError) as error:
            needed = "Validating this adapter took more time or memory than a valid adapter needs."
            hint = "Save the adapter again with PEFT's save_pretrained, and upload that."
            finding = errors.Finding("adapter.check_failed", needed, None, hint)
            raise errors.AdapterFormatError.of([finding]) from error

    def _check_room(self, pages: int) -> None:
        limit = self._ready.memory.num_pages - self._ready.geometry.num_groups
        if pages > limit:
            needs = f"The adapter needs {pages} pages of {self._ready.geometry.page_bytes} bytes"
            message = f"{needs}, but the pool has {limit} beside a block of KV cache."
            hint = "Use a smaller rank, or a server with more memory."
            raise errors.AdapterIncompatibleError.of(
                [errors.Finding("adapter.never_fits", message, None, hint)]
            )

    async def pages(self, version: VersionFacts) -> int | None:
        """Pages of a stored version on the device; None where its weights cannot be read."""
        if version.digest not in self._pages:
            try:
                like, pages = await in_thread(self._count_stored, version)
            except (OSError, errors.AdapterError, errors.CapacityError):
                return None
            _remember(self._pages_by_header, like, pages)
            _remember(self._pages, version.digest, pages)
        return self._pages[version.digest]

    def _count_stored(self, version: VersionFacts) -> tuple[tuple[str, int], int]:
        """Key that tells headers apart, and the pages. Runs in threads, so it only reads remembered pages."""
        first, size = self._blobs.peek(version.weights_sha256, USUAL_HEADER_BYTES)
        if (length := header_bytes(first, size)) > len(first):
            first, size = self._blobs.peek(version.weights_sha256, length)
        header = first[:length]
        # Of adapters trained alike all headers are the same, and hashing one is ten times as fast as reading it.
        like = content_digest(version.spec, hashlib.sha256(header).hexdigest()), size
        if (pages := self._pages_by_header.get(like)) is None:
            ranks = check_weights(version.spec, header, size, self._ready.base).ranks
            pages = adapter_pages(ranks, self._ready.base, self._ready.geometry)
        return like, pages


def _remember(cache: dict[Any, int], key: object, pages: int) -> None:
    cache[key] = pages
    if len(cache) > PAGES_CACHED:
        del cache[next(iter(cache))]
