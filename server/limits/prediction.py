"""Prediction of the cost and the wait of a request, which learns from what happened.

Predicted waits from measured throughput: Patke et al., "Queue Management for SLO-Oriented Large Language Model Serving"
(arXiv:2407.00047).
"""

from __future__ import annotations

from dataclasses import dataclass

from manylora.engine.fairness.service import Lengths, Prices

START_FACTOR = 1.25
"""Predictions use the median length of answers; the mean is longer."""
FACTOR_UP = 1.05
FACTOR_DOWN = 0.995
FACTOR_BOUNDS = (0.1, 10.0)
LEARN_SHARE = 0.05
"""Predictions below this share of the longest wait are not learned from: they are as short as a step."""
MIN_ANSWERS = 64
"""Answers before which predictions are not learned from."""
MAX_ADAPTERS = 4096
"""Most adapters that are remembered as loaded."""
BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRequest:
    """An HTTP request for a generation, before it is tokenized."""

    tenant: str
    """Id; empty for an admin without a tenant."""
    name: str | None
    """The tenant's name, for the metrics."""
    weight: float
    adapter: str | None
    """Digest; None: the base model."""
    num_bytes: int
    """Length of the body."""
    num_choices: int
    """Number of engine requests."""
    max_tokens: int
    """Longest answer of a choice."""
    deadline_s: float | None
    """Seconds in which the client wants the first token."""
    key: int
    """Recognises a request that is sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Prediction for a request at the moment when it was let in."""

    units: float
    """Its cost."""
    raw_s: float
    """Its wait by the estimates alone, before `Prediction.factor`."""
    has_row: bool
    """Its tenant's share of the rows was enough for all its requests, so it did not have to wait for one."""
    is_loaded: bool
    """Its adapter was expected on the device."""


class Prediction:
    """Thread: the event loop's.

    Args:
        max_wait_s: Longest predicted wait for a first token.
    """

    def __init__(self, max_wait_s: float) -> None:
        self.factor = START_FACTOR
        """Actual over predicted wait; few requests exceed it."""
        self.load_s = 0.0
        """Seconds that an adapter takes to load, on average."""
        self._min_learned_s = LEARN_SHARE * max_wait_s
        self._lengths = Lengths()
        self._loaded: dict[str, None] = {}
        self._num_answers = 0
        self._num_untaught: int | None = None
        """Number of starts still to come that waited behind requests of unknown length; None before any length is
        known."""

    def is_loaded(self, adapter: str | None) -> bool:
        """Return true if the adapter is the base or was on the device before."""
        return adapter is None or adapter in self._loaded

    def wait_s(self, raw_s: float, *, is_loaded: bool = True) -> float:
        """Predicted wait of a request whose estimates alone say `raw_s`."""
        return self.factor * raw_s + (0.0 if is_loaded else self.load_s)

    def units(self, request: AdmissionRequest, prices: Prices) -> float:
        """Predicted cost of a request."""
        prompt = request.num_bytes / BYTES_PER_TOKEN
        output = self._lengths.p50(request.tenant, request.adapter, request.max_tokens)
        first = cost(prices, prompt, prompt, output)
        next_choice = cost(prices, 0, prompt, output)
        return first + (request.num_choices - 1) * next_choice

    def learn_length(self, request: AdmissionRequest, num_output: int, num_waiting: int) -> None:
        """Learn from a complete answer; `num_waiting` engine requests wait now."""
        self._lengths.observe(request.tenant, request.adapter, num_output)
        if self._num_untaught is None:
            self._num_answers += 1
            if self._num_answers == MIN_ANSWERS:
                self._num_untaught = 2 * num_waiting

    def learn_wait(self, adapter: str | None, predicted: Predicted, queue_s: float) -> None:
        """Learn from the actual wait of a request."""
        if adapter is not None:
            self._loaded.pop(adapter, None)
            self._loaded[adapter] = None
            if len(self._loaded) > MAX_ADAPTERS:
                del self._loaded[next(iter(self._loaded))]
        if not predicted.is_loaded:
            if predicted.has_row:  # else it waited for a row, too
                self.load_s += (max(0.0, queue_s - self.factor * predicted.raw_s) - self.load_s) / 8
        elif self._num_untaught is None or self._num_untaught > 0:
            self._num_untaught = self._num_untaught and self._num_untaught - 1
        elif predicted.raw_s > self._min_learned_s:
            low, high = FACTOR_BOUNDS
            step = FACTOR_UP if queue_s > self.factor * predicted.raw_s else FACTOR_DOWN
            self.factor = min(high, max(low, self.factor * step))


def cost(prices: Prices, computed: float, prompt: float, output: float) -> float:
    """Units of an answer. Cached prompt tokens are not computed, but attention reads them."""
    per_output = prices.output + prices.context * (prompt + output / 2)
    return computed * (prices.prompt + prices.prompt_context * prompt / 2) + output * per_output
