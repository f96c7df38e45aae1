"""How choices look in OpenAI's two dialects, whole and in chunks. One shape object serves one request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from weft.engine.text.tokenizer import Tokenizer
from weft.server.generation.choices import Choice, Step
from weft.server.generation.logprobs import CompletionLogprobs, chat_logprobs, merge
from weft.server.schemas import ChatBody, CompletionBody

JsonObject = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one step, or all steps, say of one choice."""

    text: str
    logprobs: dict[str, list[object]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Shape(ABC):
    """One dialect."""

    whole_object: str
    chunk_object: str
    id_prefix: str

    @abstractmethod
    def part(self, step: Step) -> Part:
        """What a step says; called once per step, in order."""

    def whole_choice(self, choice: Choice, part: Part) -> JsonObject:
        """An entry of `choices` in a whole response; the same as in a chunk where a dialect does not say otherwise."""
        return self.chunk_choice(choice, part)

    @abstractmethod
    def chunk_choice(self, choice: Choice, part: Part) -> JsonObject:
        """An entry of `choices` in a chunk."""

    def opening_choice(self, choice: Choice) -> JsonObject | None:
        """An entry of `choices` that goes before a choice's first chunk."""
        del choice
        return None


class CompletionShape(Shape):
    """/v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, body: CompletionBody, tokenizer: Tokenizer) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._logprobs = None if body.logprobs is None else CompletionLogprobs(tokenizer, body.logprobs)
        self._echoed: dict[int, str] = {}

    def part(self, step: Step) -> Part:
        """Text, after the prompt's own where it is echoed; log-probabilities likewise."""
        text = step.delta.text
        if self._body.echo and step.choice.index not in self._echoed:
            prompt = step.choice.prompt
            echo = self._tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text
            self._echoed[step.choice.index] = echo
            text = echo + text
        return Part(
            text=text,
            logprobs=self._piece(step),
            finish_reason=step.delta.finish_reason,
            stop_reason=step.delta.stop_reason,
        )

    def chunk_choice(self, choice: Choice, part: Part) -> JsonObject:
        """`text`, `logprobs`, `finish_reason`."""
        return {
            "index": choice.index,
            "text": part.text,
            "logprobs": part.logprobs,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }

    def _piece(self, step: Step) -> dict[str, list[object]] | None:
        if self._logprobs is None:
            return None
        pieces = []
        if step.output.prompt_logprobs is not None:
            pieces.append(self._logprobs.prompt_piece(step.choice.prompt.token_ids, step.output.prompt_logprobs))
        start = len(self._echoed.get(step.choice.index, ""))
        pieces.append(
            self._logprobs.piece(
                step.delta.token_ids,
                step.delta.logprobs or (),
                [start + offset for offset in step.delta.text_offsets],
            )
        )
        return merge(pieces)


class ChatShape(Shape):
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, body: ChatBody, tokenizer: Tokenizer) -> None:
        self._num_top = (body.top_logprobs or 0) if body.logprobs else None
        self._tokenizer = tokenizer

    def part(self, step: Step) -> Part:
        """Text and log-probabilities of the new tokens."""
        logprobs = None
        if self._num_top is not None:
            logprobs = chat_logprobs(self._tokenizer, step.delta.logprobs or (), self._num_top)
        return Part(
            text=step.delta.text,
            logprobs=logprobs,
            finish_reason=step.delta.finish_reason,
            stop_reason=step.delta.stop_reason,
        )

    def whole_choice(self, choice: Choice, part: Part) -> JsonObject:
        """`message`, `logprobs`, `finish_reason`."""
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": part.text, "refusal": None},
            **self._end(part),
        }

    def opening_choice(self, choice: Choice) -> JsonObject | None:
        """The chunk that says who speaks."""
        return {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            **self._end(Part(text="")),
        }

    def chunk_choice(self, choice: Choice, part: Part) -> JsonObject:
        """`delta`, `logprobs`, `finish_reason`."""
        return {"index": choice.index, "delta": {"content": part.text} if part.text else {}, **self._end(part)}

    def _end(self, part: Part) -> JsonObject:
        logprobs = None if part.logprobs is None else {**part.logprobs, "refusal": None}
        return {"logprobs": logprobs, "finish_reason": part.finish_reason, "stop_reason": part.stop_reason}


def joined(parts: Sequence[Part]) -> Part:
    """All parts of a choice as one."""
    last = parts[-1]
    return Part(
        text="".join(part.text for part in parts),
        logprobs=merge([part.logprobs for part in parts]),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
