"""Predicts how many tokens an answer will have, from the answers seen before.

An adapter is the best predictor of the length that a server has: each (tenant, adapter) is predicted from its own last
answers, and one that was seen too seldom from its tenant's, then from everybody's. Lengths as the basis of reservation
are the idea of Jin et al., "S3: Increasing GPU Utilization during Generative Inference" (arXiv:2306.06000).
"""

from __future__ import annotations

from collections import deque
from statistics import median

WINDOW = 64
"""Answers that a prediction is made from: the last ones."""
MIN_OBSERVATIONS = 8
"""A window with fewer answers is not asked."""
MAX_WINDOWS = 4096
"""At most this many windows of about 2 KiB are kept; the one that was updated longest ago goes first."""
UNSEEN_TOKENS = 256
"""Median where nothing was seen yet."""


class Lengths:
    """Lengths of the last answers. Not thread-safe; memory is bounded by `MAX_WINDOWS`."""

    def __init__(self) -> None:
        self._all: deque[int] = deque(maxlen=WINDOW)
        self.windows: dict[tuple[str | None, ...], deque[int]] = {}
        """By tenant, and by tenant and adapter; the one updated last is at the end."""

    def observe(self, tenant: str, adapter: str | None, tokens: int) -> None:
        """Take in the length of an answer that ended by itself or at its bound, never that of an aborted one.

        Args:
            tenant: The tenant that sent the request.
            adapter: The adapter's digest; None is the base model.
            tokens: Generated tokens.
        """
        self._all.append(tokens)
        for key in ((tenant,), (tenant, adapter)):
            window = self.windows.pop(key, None) or deque(maxlen=WINDOW)
            window.append(tokens)
            self.windows[key] = window
        while len(self.windows) > MAX_WINDOWS:
            del self.windows[next(iter(self.windows))]

    def p50(self, tenant: str, adapter: str | None, cap: int) -> int:
        """Median length in tokens, from 1 to `cap`; `UNSEEN_TOKENS` where nothing is known."""
        windows = (self.windows.get((tenant, adapter)), self.windows.get((tenant,)), self._all)
        known = (each for each in windows if each is not None and len(each) >= MIN_OBSERVATIONS)
        window = next(known, None)
        tokens = UNSEEN_TOKENS if window is None else round(median(window))
        return max(1, min(tokens, cap))
