"""Fills the masks of a step in a thread while the model computes; the interpreter's lock is free meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from weft.engine.grammar.matcher import WORD_BITS, Matcher
from weft.engine.request import GRAMMAR_DEAD_END, GRAMMAR_TOO_COMPLEX, RequestError

if TYPE_CHECKING:
    from llguidance import LLExecutor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMasks:
    """Which tokens may come next, for the chunks of a step that have a grammar."""

    chunks: list[int]
    """Places in the plan."""
    bits: torch.Tensor
    """[chunks, words], int32, on the CPU: bit t % 32 of word t // 32 is token t. Overwritten in the next step."""
    failures: dict[int, RequestError]
    """Why a chunk can have no token; its mask allows nothing."""


class Masks:
    """One buffer for the masks of all steps. `begin` and what it returns alternate."""

    def __init__(self) -> None:
        self._bits = np.zeros((0, 0), dtype=np.int32)
        self._thread: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None
        self._filling: Future[StepMasks] | None = None

    def begin(self, matchers: Sequence[tuple[int, Matcher]]) -> Future[StepMasks]:
        """Begin to fill the masks of a step.

        Args:
            matchers: With their chunks' places in the plan; nothing else may use them until the result is there.
        """
        if self._filling is not None:
            self._filling.exception()  # of a step that failed before it asked
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar-masks")
        self._filling = self._thread.submit(self._fill, matchers)
        return self._filling

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def _fill(self, matchers: Sequence[tuple[int, Matcher]]) -> StepMasks:
        from llguidance import LLExecutor

        if self._executor is None:
            self._executor = LLExecutor(1)
        num_rows, num_words = len(matchers), matchers[0][1].num_words
        if len(self._bits) < num_rows or self._bits.shape[1] != num_words:
            self._bits = np.zeros((num_rows, num_words), dtype=np.int32)
        bits = self._bits[:num_rows]
        jobs = [(matcher.parser, row) for row, (_, matcher) in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(jobs, bits.ctypes.data, num_words * bits.itemsize, num_rows)
        failures = {}
        for row, (chunk, matcher) in enumerate(matchers):
            if matcher.has_failed():
                bits[row] = 0  # it says that the output ends here, which would look like an answer
                failures[chunk] = GRAMMAR_TOO_COMPLEX
            elif not bits[row].any():
                failures[chunk] = GRAMMAR_DEAD_END
            else:
                for token_id in matcher.end_tokens():
                    bits.view(np.uint32)[row, token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)
        return StepMasks(chunks=[chunk for chunk, _ in matchers], bits=torch.from_numpy(bits), failures=failures)
