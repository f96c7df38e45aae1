"""An engine in this process that a benchmark drives call by call, with adapters and requests as a server gives it."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from manylora.adapters.ref import AdapterRef, content_digest
from manylora.engine.llm import BLOCKED_WAIT_S, LLM
from manylora.engine.request import GenerationRequest, RequestOutput
from manylora.engine.sampling_params import SamplingParams
from manylora.errors import EngineError

Prompts = list[list[int]]


class OwnEngine(LLM):
    """An engine that a benchmark drives.

    Args:
        model: As of `LLM`, like the settings.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:  # noqa: ANN401 - those of LLM
        super().__init__(model, **settings)
        self.ready = self.engine.ready
        self.core = self.engine.core
        self.outputs: list[RequestOutput] = []
        """Outputs of the last call of the core."""
        self._is_blocked = False
        """True if the last call of the core found nothing to do, and no request came since."""

    def store_adapters(self, folders: Sequence[Path], count: int) -> list[AdapterRef]:
        """Store checkpoints and refer to them in turn; each reference has another alpha, and so a digest of its own."""
        stored = itertools.cycle([self.load_adapter(folder) for folder in folders[:count]])
        refs = []
        for index, ref in enumerate(itertools.islice(stored, count)):
            own = replace(ref.config, alpha=ref.config.alpha + index)
            digest = content_digest(own, ref.weights_sha256)
            name = f"{ref.adapter_id}-{index}"
            refs.append(replace(ref, adapter_id=name, digest=digest, config=own))
        return refs

    def submit(self, prompt: list[int], max_tokens: int, adapter: AdapterRef | None) -> str:
        """Submit a request for exactly this many tokens; returns its id."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        request_id = str(next(self._ids))
        self.core.submit(
            GenerationRequest(
                request_id=request_id, prompt_token_ids=prompt, params=params, adapter=adapter
            )
        )
        self._is_blocked = False
        return request_id

    @contextlib.contextmanager
    def decoding(
        self, rows: int, prompt_tokens: int, adapters: Sequence[AdapterRef | None]
    ) -> Iterator[float]:
        """Requests with random prompts decode in the block, for these adapters in turn, or for the base without any.

        Returns:
            Seconds that the steps took that computed the prompts.
        """
        prompts = random_prompts(self.core.num_steps, self.ready.vocab_size, rows, prompt_tokens)
        max_tokens = self.ready.max_model_len - prompt_tokens
        pairs = zip(prompts, itertools.cycle(adapters or [None]), strict=False)
        ids = [self.submit(prompt, max_tokens, adapter) for prompt, adapter in pairs]
        try:
            waiting = set(ids)
            seconds = 0.0
            while waiting:
                seconds += self.pump()
                waiting -= {output.request_id for output in self.outputs}
            yield seconds
        finally:
            self.abort(ids)

    def pump(self) -> float:
        """Call the core once; if it had nothing to do, wait for a load first. Returns the seconds without the wait.

        Raises:
            EngineError: A request failed.
        """
        if self._is_blocked:
            self._loaded.wait(BLOCKED_WAIT_S)
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

    def abort(self, requests: Sequence[str]) -> None:
        """End requests."""
        for request_id in requests:
            self.core.abort(request_id)
        self.core.pump()


def random_prompts(seed: float, vocab_size: int, count: int, num_tokens: int) -> Prompts:
    """Prompts of random token ids of one length."""
    draw = random.Random(seed)
    return [[draw.randrange(2, vocab_size) for _ in range(num_tokens)] for _ in range(count)]
