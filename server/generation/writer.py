"""Writes OpenAI's answers, whole or as the chunks of a stream. `ItemWriter` is for the APIs whose answers are items.

Knows neither sockets nor bills.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from manylora.errors import ManyloraError
from manylora.server.errors import error_body
from manylora.server.generation.choices import Choice, ChoiceStep
from manylora.server.generation.meter import Meter
from manylora.server.generation.openai_format import AnswerPart, AnswerShape, JsonObject
from manylora.server.generation.schemas import GenerationBody, StreamOptions
from manylora.server.http import sse


class ChunkWriter:
    """OpenAI's completions and chats.

    Args:
        body: The request.
        shape: How its choices look.
        meter: The tokens delivered so far.
        head: `created`, `model`, `system_fingerprint`: the same in every chunk.
    """

    def __init__(
        self, body: GenerationBody, shape: AnswerShape, meter: Meter, head: JsonObject
    ) -> None:
        self._shape = shape
        self._meter = meter
        self._head: JsonObject = {"id": shape.id_prefix + secrets.token_hex(16), **head}
        self._chunk_head = {"object": shape.chunk_object, **self._head}
        self._options = body.stream_options or StreamOptions()
        self._opened: set[int] = set()

    def whole(self, ends: Sequence[tuple[Choice, AnswerPart]]) -> JsonObject:
        """The body of an answer that is not streamed; all that each choice says is one part."""
        choices = [
            self._shape.whole_choice(replace(choice, index=index), end)
            for index, (choice, end) in enumerate(ends)
        ]
        head = {"object": self._shape.whole_object, **self._head, **self._shape.extras(ends[0][0])}
        return {**head, "choices": choices, "usage": self._meter.usage.model_dump()}

    def events(self, step: ChoiceStep, part: AnswerPart) -> bytes:
        """The chunk of a step; before a choice's first one, the chunk that opens it."""
        payload = b""
        if step.choice.index not in self._opened:
            self._opened.add(step.choice.index)
            opening = self._shape.opening_choice(step.choice)
            if opening is not None:
                payload += self._chunk(opening, self._shape.extras(step.choice))
        if part.text or part.logprobs or part.finish_reason or step.output.token_ids:
            payload += self._chunk(self._shape.chunk_choice(step.choice, part))
        return payload

    def closing(self) -> bytes:
        """`[DONE]`, after the usage where it is asked for."""
        if not self._options.include_usage:
            return sse.DONE
        return (
            sse.event({**self._chunk_head, "choices": [], "usage": self._meter.usage.model_dump()})
            + sse.DONE
        )

    def failure(self, error: ManyloraError) -> bytes:
        """The end of a stream that an error cuts: an event like the body of an error."""
        return sse.event(error_body(error))

    def _chunk(self, choice: JsonObject, extras: JsonObject | None = None) -> bytes:
        chunk: JsonObject = {**self._chunk_head, **(extras or {}), "choices": [choice]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = self._meter.usage.model_dump()
        elif self._options.include_usage:
            chunk["usage"] = None
        return sse.event(chunk)
