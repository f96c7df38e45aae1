"""What the load of one tenant is made of, and what is told of its replies."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.benchmarks.http.generator import Call, LoadSettings, PlannedRequest, Reply, make_call
from weft.benchmarks.http.http_stream import EventClient

_TICK_S = 0.005


@dataclass(frozen=True, slots=True)
class Calls:
    """Makes requests of one key; no two have the same prompt."""

    client: EventClient
    vocab_size: int
    seed: int

    def make(self, model: str, prompt_tokens: int, output_tokens: int, index: int) -> Call:
        """A request; its prompt depends on seed and index only."""
        request = PlannedRequest(model, prompt_tokens, output_tokens)
        return make_call(self.client, request, LoadSettings(vocab_size=self.vocab_size, seed=self.seed), index)

    def without_end(self, models: Sequence[str], prompt_tokens: int, output_tokens: int) -> Iterator[Call]:
        """Requests for models in turn."""
        for index, model in enumerate(itertools.cycle(models)):
            yield self.make(model, prompt_tokens, output_tokens, index)


def first_error(replies: Sequence[Reply]) -> str | None:
    """What went wrong, refusals apart."""
    return next((reply.error for reply in replies if reply.error and not reply.is_refused), None)


def tokens_per_s(replies: Sequence[Reply], start_s: float, end_s: float) -> float:
    """Tokens that came within a span, per second of it."""
    return sum(start_s <= at < end_s for reply in replies for at in reply.token_times_s) / (end_s - start_s)


async def watch_delay(delays_s: list[float]) -> None:
    """Note again and again how much later than asked for this event loop comes to a timer; never returns."""
    while True:
        due_s = time.perf_counter() + _TICK_S
        await asyncio.sleep(_TICK_S)
        delays_s.append(max(0.0, time.perf_counter() - due_s))
