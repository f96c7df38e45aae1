"""Predicts how many tokens an answer will have, from the answers seen before.

An adapter is the best predictor of the length that a server has: each (tenant, adapter) has a histogram of its own, and
one that was seen too seldom is predicted from its tenant, then from everybody. Lengths as the basis of reservation and
order are the idea of Jin et al., "S3: Increasing GPU Utilization during Generative Inference" (arXiv:2306.06000).
"""

from __future__ import annotations

import math
from array import array

NUM_BINS = 32
"""Two bins per doubling, so the last one begins at 2 ** 15.5 (46,341) tokens."""
HALF_LIFE = 500
"""Newer observations of its histogram after which an observation counts half."""
MIN_OBSERVATIONS = 8
"""A histogram with fewer is not asked."""
MAX_HISTOGRAMS = 4096
"""At most this many histograms of about 350 bytes are kept; the one that was updated longest ago goes first."""
UNSEEN_TOKENS = 256
"""Median where nothing was seen yet."""

_GROWTH = 2 ** (1 / HALF_LIFE)
_RESCALE_AT = 2.0**64


class Lengths:
    """Histograms of output lengths. Not thread-safe; memory is bounded by `MAX_HISTOGRAMS`."""

    def __init__(self) -> None:
        self._all = _Histogram()
        self.histograms: dict[tuple[str | None, ...], _Histogram] = {}
        """By tenant, and by tenant and adapter; the one updated last is at the end."""

    def observe(self, tenant: str, adapter: str | None, tokens: int) -> None:
        """Take in the length of an answer that ended by itself or at its bound, never that of an aborted one.

        Args:
            tenant: The tenant that sent the request.
            adapter: The adapter's digest; None is the base model.
            tokens: Generated tokens; less than one counts as one.
        """
        self._all.add(tokens)
        for key in ((tenant,), (tenant, adapter)):
            histogram = self.histograms.pop(key, None) or _Histogram()
            histogram.add(tokens)
            self.histograms[key] = histogram
        while len(self.histograms) > MAX_HISTOGRAMS:
            del self.histograms[next(iter(self.histograms))]

    def p50(self, tenant: str, adapter: str | None, cap: int) -> int:
        """Median length in tokens, from 1 to `cap`; `UNSEEN_TOKENS` where nothing is known."""
        candidates = (
            self.histograms.get((tenant, adapter)),
            self.histograms.get((tenant,)),
            self._all,
        )
        known = (
            one
            for one in candidates
            if one is not None and one.num_observations >= MIN_OBSERVATIONS
        )
        histogram = next(known, None)
        tokens = UNSEEN_TOKENS if histogram is None else histogram.median()
        return max(1, min(tokens, cap))


class _Histogram:
    """Counts by logarithmic bins. Newer observations get more weight instead of older ones less, which is O(1)."""

    __slots__ = ("_bins", "_total", "_weight")

    def __init__(self) -> None:
        self._bins = array("d", bytes(8 * NUM_BINS))
        self._total = 0.0
        self._weight = 1.0

    @property
    def num_observations(self) -> float:
        """Sum of the observations' weights."""
        # The newest count a little less than 1: 8 of them must reach 8.
        return self._total / self._weight + 0.5

    def add(self, tokens: int) -> None:
        self._weight *= _GROWTH
        if self._weight > _RESCALE_AT:
            self._bins = array("d", (count / self._weight for count in self._bins))
            self._total /= self._weight
            self._weight = 1.0
        self._bins[min(int(2 * math.log2(max(1, tokens))), NUM_BINS - 1)] += self._weight
        self._total += self._weight

    def median(self) -> int:
        """Tokens that half of the answers do not exceed, interpolated within a bin on the logarithmic scale."""
        left = self._total / 2
        for index, count in enumerate(self._bins):
            if count and left <= count:
                return round(2 ** ((index + left / count) / 2))
            left -= count
        return round(2 ** (NUM_BINS / 2))  # rounding errors of the sums may leave a little
