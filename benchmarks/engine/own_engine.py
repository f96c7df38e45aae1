"""An engine in this process that a benchmark drives call by call, with adapters and requests as a server gives it."""

from __future__ import annotations

import contextlib
import itertools
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from manylora.adapters.blobs.local import LocalBlobs
from manylora.adapters.checkpoint.reader import read_checkpoint
from manylora.adapters.ref import AdapterRef, content_digest
from manylora.config import Config, RegistryConfig
from manylora.engine.build import EngineParts, build_engine
from manylora.engine.request import GenerationRequest, RequestOutput
from manylora.engine.sampling_params import SamplingParams
from manylora.errors import EngineError

_BLOCKED_WAIT_S = 0.02
Prompts = list[list[int]]


class OwnEngine:
    """An engine that a benchmark drives.

    Args:
        parts: The engine, built with `notify=loaded.set`.
        loaded: Set when a load is done.
        blob_dir: Its blobs.
    """

    def __init__(self, parts: EngineParts, loaded: threading.Event, blob_dir: Path) -> None:
        self.ready = parts.ready
        self.core = parts.core
        self.outputs: list[RequestOutput] = []
        """Outputs of the last call of the core."""
        self._blobs = LocalBlobs(blob_dir)
        self._loaded = loaded
        self._is_blocked = False
        """True if the last call of the core found nothing to do, and no request came since."""
        self._ids = map(str, itertools.count(1))

    def store_adapters(self, folders: Sequence[Path], count: int) -> list[AdapterRef]:
        """Store checkpoints and refer to them in turn; each reference has another alpha, and so a digest of its own."""
        stored = []
        for folder in folders[:count]:
            config = (folder / "adapter_config.json").read_bytes()
            weights = folder / "adapter_model.safetensors"
            base = self.ready.base
            read = read_checkpoint(config, weights, base, self.ready.max_rank, scan_values=False)
            with self._blobs.create() as writer:
                writer.write(weights.read_bytes())
                stored.append((folder.name, read.spec, writer.commit()))
        refs = []
        for index, (name, spec, sha256) in zip(range(count), itertools.cycle(stored), strict=False):
            own = replace(spec, alpha=spec.alpha + index)
            refs.append(
                AdapterRef(
                    tenant_id="benchmark",
                    adapter_id=f"{name}-{index}",
                    version=1,
                    digest=content_digest(own, sha256),
                    weights_sha256=sha256,
                    config=own,
                )
            )
        return refs

    def submit(self, prompt: list[int], max_tokens: int, adapter: AdapterRef | None) -> str:
        """Submit a request for exactly this many tokens; returns its id."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        request_id = next(self._ids)
        self.core.submit(
            GenerationRequest(
                request_id=request_id, prompt_token_ids=prompt, params=params, adapter=adapter
            )
        )
        self._is_blocked = False
        return request_id

    @contextlib.contextmanager
    def running(
        self, prompts: Prompts, adapters: Sequence[AdapterRef | None]
    ) -> Iterator[list[str]]:
        """Ids of requests for these adapters in turn; they run until the block is left or reach the model's length."""
        longest = self.ready.max_model_len
        pairs = zip(prompts, itertools.cycle(adapters), strict=False)
        ids = [self.submit(prompt, longest - len(prompt), adapter) for prompt, adapter in pairs]
        try:
            yield ids
        finally:
            self.abort(ids)

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
            yield OwnEngine(parts, loaded, config.blob_dir)
        finally:
            parts.core.close()


def random_prompts(seed: float, vocab_size: int, count: int, num_tokens: int) -> Prompts:
    """Prompts of random token ids of one length."""
    draw = random.Random(seed)
    return [[draw.randrange(2, vocab_size) for _ in range(num_tokens)] for _ in range(count)]
