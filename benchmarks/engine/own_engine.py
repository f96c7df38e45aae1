"""An engine in this process that a benchmark drives call by call, with blobs of its own."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence

from weft.adapters.ref import AdapterRef
from weft.benchmarks.engine.stored import greedy_request
from weft.config import Config, MemoryConfig, ModelConfig, RegistryConfig, SchedulerConfig
from weft.engine.build import EngineParts, build_engine
from weft.errors import EngineError

_BLOCKED_WAIT_S = 0.02


class OwnEngine:
    """An engine with the requests of a benchmark.

    Args:
        parts: The engine, built with `notify=loaded.set`.
        loaded: Set when a load is done.
        config: What it was built with.
    """

    def __init__(self, parts: EngineParts, loaded: threading.Event, config: Config) -> None:
        self.parts, self.core = parts, parts.core
        self.blob_dir = config.blob_dir
        self._loaded = loaded
        self._is_blocked = False
        """Whether the last call of the core found nothing to compute."""
        self._ids = itertools.count(1)

    def submit(self, prompts: Sequence[list[int]], adapters: Sequence[AdapterRef | None]) -> list[str]:
        """Requests for these adapters in turn that answer until they are aborted, as long as the model allows."""
        ids = []
        for prompt, adapter in zip(prompts, itertools.cycle(adapters), strict=False):
            ids.append(str(next(self._ids)))
            most = self.parts.ready.max_model_len - len(prompt)
            self.core.submit(greedy_request(ids[-1], prompt, most, adapter))
        return ids

    def pump(self) -> float:
        """Call the core once; returns the seconds that it took.

        Raises:
            EngineError: A request failed.
        """
        if self._is_blocked:
            self._loaded.wait(_BLOCKED_WAIT_S)
        self._loaded.clear()
        num_steps, start_s = self.core.num_steps, time.perf_counter()
        outputs = self.core.pump()
        seconds = time.perf_counter() - start_s
        for output in outputs:
            if output.error is not None:
                raise EngineError(f"a request of the benchmark failed: {output.error.message}")
        self._is_blocked = self.core.num_steps == num_steps
        return seconds

    def pump_until_running(self, count: int) -> None:
        """Call the core until so many requests run."""
        while self.core.status().running < count:
            self.pump()

    def abort(self, requests: Sequence[str]) -> None:
        """End requests."""
        for request_id in requests:
            self.core.abort(request_id)
        self.core.pump()


@contextlib.contextmanager
def own_engine(model: ModelConfig, memory: MemoryConfig, scheduler: SchedulerConfig) -> Iterator[OwnEngine]:
    """An engine as the product builds it, until the block is left."""
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        config = Config(model=model, memory=memory, scheduler=scheduler, registry=RegistryConfig(blob_url=folder))
        loaded = threading.Event()
        parts = build_engine(config, notify=loaded.set)
        try:
            yield OwnEngine(parts, loaded, config)
        finally:
            parts.core.close()
