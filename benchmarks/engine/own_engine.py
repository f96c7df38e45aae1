"""An engine in this process that a benchmark drives call by call."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from manylora.adapters.ref import AdapterRef
from manylora.benchmarks.engine.stored import greedy_request
from manylora.config import Config, RegistryConfig
from manylora.engine.build import EngineParts, build_engine
from manylora.engine.request import GenerationRequest, RequestOutput
from manylora.errors import EngineError

_BLOCKED_WAIT_S = 0.02


class OwnEngine:
    """An engine that a benchmark drives.

    Args:
        parts: The engine, built with `notify=loaded.set`.
        loaded: Set when a load is done.
        config: What it was built with.
    """

    def __init__(self, parts: EngineParts, loaded: threading.Event, config: Config) -> None:
        self.parts = parts
        self.core = parts.core
        self.blob_dir = config.blob_dir
        self.outputs: list[RequestOutput] = []
        """Outputs of the last call of the core."""
        self._loaded = loaded
        self._is_blocked = False
        """True if the last call of the core found nothing to do, and no request came since."""
        self._ids = itertools.count(1)

    def submit(self, request: GenerationRequest) -> None:
        """Hand a request to the core."""
        self.core.submit(request)
        self._is_blocked = False

    def submit_endless(
        self, prompts: Sequence[list[int]], adapters: Sequence[AdapterRef | None]
    ) -> list[str]:
        """Submit requests for these adapters in turn that run until they are aborted or reach the model's length.

        Returns:
            Their ids.
        """
        ids = []
        for prompt, adapter in zip(prompts, itertools.cycle(adapters), strict=False):
            ids.append(str(next(self._ids)))
            most = self.parts.ready.max_model_len - len(prompt)
            self.submit(greedy_request(ids[-1], prompt, most, adapter))
        return ids

    def pump(self) -> float:
        """Call the core once; if it had nothing to do, wait for a load first. Returns the seconds without the wait.

        Raises:
            EngineError: A request failed.
        """
        if self._is_blocked:
            self._loaded.wait(_BLOCKED_WAIT_S)
        self._loaded.clear()
        num_steps = self.core.num_steps
        start_s = time.perf_counter()
        self.outputs = self.core.pump()
        seconds = time.perf_counter() - start_s
        for output in self.outputs:
            if output.error is not None:
                raise EngineError(f"a request of the benchmark failed: {output.error.message}")
        self._is_blocked = self.core.num_steps == num_steps and not self.outputs
        return seconds

    def pump_until_decoding(self, requests: Sequence[str]) -> None:
        """Call the core until each of these requests had an output."""
        waiting = set(requests)
        while waiting:
            self.pump()
            waiting -= {output.request_id for output in self.outputs}

    def abort(self, requests: Sequence[str]) -> None:
        """End requests."""
        for request_id in requests:
            self.core.abort(request_id)
        self.core.pump()


@contextlib.contextmanager
def own_engine(config: Config) -> Iterator[OwnEngine]:
    """Build an engine as the product does, and close it when the block is left.

    Args:
        config: Its settings; without a blob store it gets an empty one of its own.
    """
    with tempfile.TemporaryDirectory(prefix="manylora-") as folder:
        config = replace(
            config, registry=RegistryConfig(blob_url=config.registry.blob_url or folder)
        )
        loaded = threading.Event()
        parts = build_engine(config, notify=loaded.set)
        try:
            yield OwnEngine(parts, loaded, config)
        finally:
            parts.core.close()
