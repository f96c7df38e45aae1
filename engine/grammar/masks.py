"""Fills the masks of a step in a thread while the model computes, without the interpreter's lock."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from manylora.engine.grammar.matcher import SLOW_S, WORD_BITS, Matcher
from manylora.engine.request import GRAMMAR_DEAD_END, ErrorInfo

if TYPE_CHECKING:
    import numpy.typing as npt
    from llguidance import LLExecutor


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMasks:
    """Tokens that may come next, for the chunks of a step with a grammar."""

    chunks: list[int]
    """Places of these chunks in the plan."""
    bits: torch.Tensor
    """[chunks, words], int32, on the CPU: bit t % 32 of word t // 32 is token t. The next step overwrites it."""
    failures: dict[int, ErrorInfo]
    """Errors of chunks that can have no token, by place in the plan. Their masks allow nothing."""


class Masks:
    """Buffer for the masks of all steps. Wait for the result of `begin` before the next call."""

    def __init__(self) -> None:
        self._bits = np.zeros((0, 0), dtype=np.int32)
        self._thread: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None
        self._filling: Future[StepMasks] | None = None
        self._was_slow = False

    def begin(self, matchers: Sequence[tuple[int, Matcher]]) -> Future[StepMasks]:
        """Begin to fill the masks of a step.

        Args:
            matchers: Matchers with the places of their chunks in the plan. Nothing else may use them before the result.
        """
        if self._filling is not None:
            self._filling.exception()  # the step may have failed before it asked for the masks
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar-masks")
        self._filling = self._thread.submit(self._fill, matchers)
        return self._filling

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def _fill(self, matchers: Sequence[tuple[int, Matcher]]) -> StepMasks:
        num_rows = len(matchers)
        num_words = matchers[0][1].num_words
        if len(self._bits) < num_rows or self._bits.shape[1] != num_words:
            self._bits = np.zeros((num_rows, num_words), dtype=np.int32)
        bits = self._bits[:num_rows]
        self._compute(matchers, bits)
        failures = {}
        for row, (chunk, matcher) in enumerate(matchers):
            if (error := matcher.error()) is not None:
                bits[row] = (
                    0  # a broken matcher allows the end of the output, which would look like an answer
                )
                failures[chunk] = error
            elif not bits[row].any():
                failures[chunk] = GRAMMAR_DEAD_END
            else:
                for token_id in matcher.end_tokens():
                    bits.view(np.uint32)[row, token_id // WORD_BITS] |= np.uint32(
                        1 << token_id % WORD_BITS
                    )
        return StepMasks(
            chunks=[chunk for chunk, _ in matchers], bits=torch.from_numpy(bits), failures=failures
        )

    def _compute(
        self, matchers: Sequence[tuple[int, Matcher]], bits: npt.NDArray[np.int32]
    ) -> None:
        from llguidance import LLExecutor

        if self._executor is None:
            self._executor = LLExecutor(1)
        jobs = [(matcher.parser, row) for row, (_, matcher) in enumerate(matchers)]
        started_s = time.perf_counter()
        was_slow = self._was_slow
        if not was_slow:
            try:
                self._executor.unsafe_compute_mask_ptr(
                    jobs, bits.ctypes.data, bits.strides[0], len(jobs)
                )
            except BaseException:  # a panic of llguidance is no Exception
                logger.exception("the masks of a step failed; they are made one by one")
                was_slow = True
        if was_slow:  # find the slow one
            for row, (_, matcher) in enumerate(matchers):
                matcher.fill(bits[row].ctypes.data)
        self._was_slow = time.perf_counter() - started_s > SLOW_S
