"""Parts of answers, and answers in OpenAI's two dialects, whole and in chunks. Knows neither sockets nor bills."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import ClassVar, cast

from manylora.engine.request import TokenLogprobs
from manylora.engine.text.text_stream import TextDelta, settled_text
from manylora.engine.text.tokenizer import Tokenizer
from manylora.errors import ManyloraError
from manylora.server.errors import error_body
from manylora.server.generation.chat_schemas import ChatBody
from manylora.server.generation.choices import Choice, ChoiceStep
from manylora.server.generation.meter import Meter
from manylora.server.generation.schemas import CompletionBody, GenerationBody, StreamOptions
from manylora.server.http import sse
from manylora.server.tools.reading import AnswerReader, CallPiece, joined_calls

LEAST = -9999.0
"""Stands for minus infinity, which JSON lacks."""
JsonObject = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPart:
    """One choice as one step, or all steps, have it."""

    text: str
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    logprobs: dict[str, list[object]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    """The tokens, if the client asked for them."""


def joined(parts: Sequence[AnswerPart]) -> AnswerPart:
    """All parts of a choice as one."""
    last = parts[-1]
    text = "".join(part.text for part in parts)
    logprobs = merge([part.logprobs for part in parts])
    if logprobs is not None and "text_offset" in logprobs:  # a stop string may have been cut off
        offsets = cast("list[int]", logprobs["text_offset"])
        logprobs["text_offset"] = [min(offset, len(text)) for offset in offsets]
    return AnswerPart(
        text=text,
        reasoning="".join(part.reasoning for part in parts),
        calls=joined_calls([call for part in parts for call in part.calls]),
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        token_ids=None
        if last.token_ids is None
        else [token for part in parts for token in part.token_ids or ()],
    )


def merge(pieces: Sequence[dict[str, list[object]] | None]) -> dict[str, list[object]] | None:
    """Append the lists of several pieces, key by key; None when there is no piece."""
    found = [piece for piece in pieces if piece is not None]
    return (
        {key: [value for piece in found for value in piece[key]] for key in found[0]}
        if found
        else None
    )


def token_label(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; `bytes:` and hex for one that is only part of a character, so that labels stay distinct."""
    text = tokenizer.token_text(token_id)
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token_id))


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LEAST)


def _top(entry: TokenLogprobs, count: int | None) -> list[tuple[int, float]]:
    """The most likely tokens at a place, the likeliest first."""
    return list(zip(entry.top_ids, entry.top_logprobs, strict=True))[:count]


@dataclass(eq=False)
class OpenAIAnswer(ABC):
    """One dialect: makes the parts of an answer, and writes them, whole or as the chunks of a stream.

    Args:
        body: The request.
        tokenizer: Shows its tokens.
        meter: The tokens delivered so far.
        head: `created`, `model`, `system_fingerprint`: the same in every chunk.
    """

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    id_prefix: ClassVar[str]

    body: GenerationBody
    tokenizer: Tokenizer
    meter: Meter
    head: JsonObject

    def __post_init__(self) -> None:
        self._head: JsonObject = {"id": self.id_prefix + secrets.token_hex(16), **self.head}
        self._chunk_head = {"object": self.chunk_object, **self._head}
        self._options = self.body.stream_options or StreamOptions()
        self._opened: set[int] = set()
        """Choices whose first chunk was written."""
        by_id = self.body.return_tokens_as_token_ids
        self._label: Callable[[int], str] = (
            "token_id:{}".format if by_id else partial(token_label, self.tokenizer)
        )
        self._prompt_logprobs: dict[int, list[JsonObject | None]] = {}
        """By prompt."""

    def whole(self, ends: Sequence[tuple[Choice, AnswerPart]]) -> JsonObject:
        """The body of an answer that is not streamed; all that each choice says is one part."""
        choices = [
            self.whole_choice(replace(choice, index=index), end)
            for index, (choice, end) in enumerate(ends)
        ]
        head = {"object": self.whole_object, **self._head, **self.extras(ends[0][0])}
        return {**head, "choices": choices, "usage": self.meter.usage.model_dump()}

    def events(self, step: ChoiceStep, part: AnswerPart) -> bytes:
        """The chunk of a step; before a choice's first one, the chunk that opens it."""
        payload = b""
        if step.choice.index not in self._opened:
            payload = self.opening(step.choice)
        if part.text or part.logprobs or part.finish_reason or step.output.token_ids:
            payload += self.chunk(self.chunk_choice(step.choice, part))
        self._opened.add(step.choice.index)
        return payload

    def closing(self) -> bytes:
        """`[DONE]`, after the usage where it is asked for."""
        if not self._options.include_usage:
            return sse.DONE
        usage = self.meter.usage.model_dump()
        return sse.event({**self._chunk_head, "choices": [], "usage": usage}) + sse.DONE

    def failure(self, error: ManyloraError) -> bytes:
        """The end of a stream that an error cuts: an event like the body of an error."""
        return sse.event(error_body(error))

    def chunk(self, choice: JsonObject, **extras: object) -> bytes:
        """The event of an entry of `choices`, with fields beside it."""
        chunk: JsonObject = {**self._chunk_head, **extras, "choices": [choice]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = self.meter.usage.model_dump()
        elif self._options.include_usage:
            chunk["usage"] = None
        return sse.event(chunk)

    def part(self, step: ChoiceStep) -> AnswerPart:
        """The part that a step adds; called once per step, in order."""
        delta = step.delta
        found = step.output.prompt_logprobs
        if self.body.prompt_logprobs is not None and found is not None:
            places = [None if entry is None else self._place(entry) for entry in found]
            self._prompt_logprobs[step.choice.prompt_index] = places
        return AnswerPart(
            text=self.text(step),
            logprobs=self.logprobs(step),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self.body.return_token_ids else None,
        )

    def text(self, step: ChoiceStep) -> str:
        """The text that a step adds to its choice."""
        return step.delta.text

    @abstractmethod
    def logprobs(self, step: ChoiceStep) -> dict[str, list[object]] | None:
        """The log-probabilities of a step's tokens; None where the client asked for none."""

    def prompt_facts(self, choice: Choice) -> JsonObject:
        """Fields about a prompt, where they are asked for."""
        facts: JsonObject = {}
        if self.body.return_token_ids:
            facts["prompt_token_ids"] = choice.prompt.token_ids
        if self.body.prompt_logprobs is not None:
            facts["prompt_logprobs"] = self._prompt_logprobs.get(choice.prompt_index)
        return facts

    def _place(self, entry: TokenLogprobs) -> JsonObject:
        """The token at a place of the prompt and the likeliest ones there, by id."""
        ranked = [*zip(entry.top_ids, entry.top_logprobs, count(1), strict=False)][
            : self.body.prompt_logprobs
        ]
        return {
            str(token_id): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": self.tokenizer.token_text(token_id),
            }
            for token_id, logprob, rank in [(entry.token_id, entry.logprob, entry.rank), *ranked]
        }

    def whole_choice(self, choice: Choice, part: AnswerPart) -> JsonObject:
        """An entry of `choices` in a whole response; the same as in a chunk where a dialect does not say otherwise."""
        return self.chunk_choice(choice, part)

    @abstractmethod
    def chunk_choice(self, choice: Choice, part: AnswerPart) -> JsonObject:
        """An entry of `choices` in a chunk."""

    def opening(self, choice: Choice) -> bytes:
        """The event that goes before a choice's first chunk."""
        del choice
        return b""

    def extras(self, choice: Choice) -> JsonObject:
        """Fields beside `choices`, of a whole answer and of the chunk that opens a choice."""
        del choice
        return {}


@dataclass(eq=False)
class CompletionAnswer(OpenAIAnswer):
    """/v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"

    body: CompletionBody

    def __post_init__(self) -> None:
        super().__post_init__()
        self._echoed: dict[int, str] = {}

    def text(self, step: ChoiceStep) -> str:
        """The step's text, after the prompt's own where that is echoed."""
        if not self.body.echo or step.choice.index in self._echoed:
            return step.delta.text
        prompt = step.choice.prompt
        echo = self._decode(prompt.token_ids) if prompt.text is None else prompt.text
        echo = settled_text(self.tokenizer, prompt.token_ids, echo)
        self._echoed[step.choice.index] = echo
        return echo + step.delta.text

    def logprobs(self, step: ChoiceStep) -> dict[str, list[object]] | None:
        """Parallel lists over the step's tokens, after those of an echoed prompt."""
        if self.body.logprobs is None:
            return None
        delta = step.delta
        start = len(self._echoed.get(step.choice.index, ""))
        own = self._lists(
            delta.token_ids, delta.logprobs or (), [start + offset for offset in delta.text_offsets]
        )
        if step.output.prompt_logprobs is None or not self.body.echo:
            return own
        prompt = step.choice.prompt
        offsets = [min(offset, start) for offset in prompt.text_offsets]
        return merge([self._lists(prompt.token_ids, step.output.prompt_logprobs, offsets), own])

    def chunk_choice(self, choice: Choice, part: AnswerPart) -> JsonObject:
        """`text`, `logprobs`, `finish_reason`; with the first chunk, facts of the prompt."""
        facts = self.prompt_facts(choice) if choice.index not in self._opened else {}
        return {
            "index": choice.index,
            "text": part.text,
            "logprobs": part.logprobs,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
            **_token_ids(part),
            **facts,
        }

    def _lists(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        offsets: Sequence[int],
    ) -> dict[str, list[object]]:
        """Lists for these tokens.

        Args:
            token_ids: The tokens.
            logprobs: One per token; None where nothing is known (a prompt's first token).
            offsets: Characters of the choice's text before each token.
        """
        return {
            "tokens": [self._label(token_id) for token_id in token_ids],
            "token_logprobs": [
                None if entry is None else finite(entry.logprob) for entry in logprobs
            ],
            "top_logprobs": [
                None if entry is None else self._labelled(entry) for entry in logprobs
            ],
            "text_offset": list(offsets),
        }

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=self.body.skip_special_tokens)

    def _labelled(self, entry: TokenLogprobs) -> dict[str, float]:
        pairs = _top(entry, self.body.logprobs)
        top = {self._label(token_id): finite(logprob) for token_id, logprob in pairs}
        top.setdefault(self._label(entry.token_id), finite(entry.logprob))
        return top


@dataclass(eq=False)
class ChatAnswer(OpenAIAnswer):
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    body: ChatBody

    def __post_init__(self) -> None:
        super().__post_init__()
        body = self.body
        self._echo = body.echoed_text
        self._num_top = (body.top_logprobs or 0) if body.logprobs else None
        self._readers: dict[int, AnswerReader] = {}
        self._is_by_token = body.has_logprobs_of_text_alone and body.logprobs

    def part(self, step: ChoiceStep) -> AnswerPart:
        """The part that a step adds; calls and reasoning are told from text here."""
        part = super().part(step)
        plan = step.choice.prompt.answer
        if plan is None:
            return part
        if step.choice.index not in self._readers:
            self._readers[step.choice.index] = plan.reader()
        reader = self._readers[step.choice.index]
        delta = step.delta
        logprobs = part.logprobs["content"] if self._is_by_token and part.logprobs else []
        reading, num_reasoning = reader.read(delta.text, _cuts(delta), logprobs)
        step.choice.reasoning_tokens += num_reasoning
        finish_reason: str | None = delta.finish_reason
        if finish_reason is not None:
            is_stopped = (
                delta.stop_reason is not None
                and delta.stop_reason not in self.tokenizer.eos_token_ids
            )
            if reader.close(reading, is_cut=finish_reason != "stop" or is_stopped):
                finish_reason = "length"
            elif finish_reason == "stop" and reader.num_calls:
                finish_reason = "tool_calls"
        return replace(
            part,
            text=reading.content,
            reasoning=reading.reasoning if plan.shows_reasoning else "",
            calls=joined_calls(reading.calls),
            logprobs={"content": reading.logprobs} if self._is_by_token else part.logprobs,
            finish_reason=finish_reason,
        )

    def logprobs(self, step: ChoiceStep) -> dict[str, list[object]] | None:
        """An entry for each new token, those of reasoning and calls included."""
        if self._num_top is None:
            return None
        content: list[object] = []
        for entry in step.delta.logprobs or ():
            top = [self._entry(*pair) for pair in _top(entry, self._num_top)]
            content.append({**self._entry(entry.token_id, entry.logprob), "top_logprobs": top})
        return {"content": content}

    def _entry(self, token_id: int, logprob: float) -> JsonObject:
        return {
            "token": self._label(token_id),
            "logprob": finite(logprob),
            "bytes": list(self.tokenizer.token_bytes(token_id)),
        }

    def whole_choice(self, choice: Choice, part: AnswerPart) -> JsonObject:
        """`message`, `logprobs`, `finish_reason`."""
        text = self._echo + part.text
        content = None if part.calls and not text else text
        message: JsonObject = {
            "role": "assistant",
            "content": content,
            "refusal": None,
            **_reasoning(part),
        }
        if part.calls:
            message["tool_calls"] = [_call(call) for call in part.calls]
        return {"index": choice.index, "message": message, **self._end(part)}

    def extras(self, choice: Choice) -> JsonObject:
        """A chat has one prompt, so facts of it stand beside the choices."""
        return self.prompt_facts(choice)

    def opening(self, choice: Choice) -> bytes:
        """The chunk that says who speaks."""
        delta = {"role": "assistant", "content": self._echo}
        opened = {"index": choice.index, "delta": delta, **self._end(AnswerPart(text=""))}
        return self.chunk(opened, **self.extras(choice))

    def chunk_choice(self, choice: Choice, part: AnswerPart) -> JsonObject:
        """`delta`, `logprobs`, `finish_reason`."""
        delta: JsonObject = ({"content": part.text} if part.text else {}) | _reasoning(part)
        if part.calls:
            delta["tool_calls"] = [_call_delta(call) for call in part.calls]
        return {"index": choice.index, "delta": delta, **self._end(part)}

    def _end(self, part: AnswerPart) -> JsonObject:
        logprobs = None if part.logprobs is None else {**part.logprobs, "refusal": None}
        why = {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
        return {"logprobs": logprobs, **why, **_token_ids(part)}


def _cuts(delta: TextDelta) -> list[int]:
    """Ends of the delta's tokens in its text."""
    start = delta.text_offsets[0] if delta.text_offsets else 0
    ends = [offset - start for offset in delta.text_offsets[1:]]
    return [*ends, len(delta.text)] if delta.token_ids else []


def _token_ids(part: AnswerPart) -> JsonObject:
    return {} if part.token_ids is None else {"token_ids": part.token_ids}


def _reasoning(part: AnswerPart) -> JsonObject:
    return (
        {"reasoning": part.reasoning, "reasoning_content": part.reasoning} if part.reasoning else {}
    )


def _call(call: CallPiece) -> JsonObject:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _call_delta(call: CallPiece) -> JsonObject:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_call(call)}
