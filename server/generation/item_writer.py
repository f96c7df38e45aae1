"""Answers that are lists of items: reasoning, texts and calls, one after the other."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from manylora.errors import ManyloraError
from manylora.server.generation.choices import Choice, ChoiceStep
from manylora.server.generation.meter import Meter
from manylora.server.generation.openai_format import AnswerPart, JsonObject
from manylora.server.tools.reading import CallPiece

ItemKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True, kw_only=True)
class Item:
    """A part of an answer that is of one kind."""

    kind: ItemKind
    index: int
    """Place in the answer."""
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    call: CallPiece | None = None
    """The first piece of a call, with its id and name."""
    pieces: list[str] = field(default_factory=list)
    """None at the opening of an item."""
    logprobs: list[object] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of its text so far; the arguments of a call."""
        return "".join(self.pieces)

    def add(self, text: str, logprobs: list[object]) -> None:
        """Add its next piece."""
        self.pieces.append(text)
        self.logprobs += logprobs


class ItemWriter(ABC):
    """Writes an answer item by item; one is open at a time. Says when, a dialect says how.

    Args:
        meter: The tokens delivered so far.
    """

    def __init__(self, meter: Meter) -> None:
        self.items: list[Item] = []
        self.meter = meter
        self.open_item: Item | None = None
        self._logprobs: list[object] = []
        """Log-probabilities of tokens whose text has not come yet."""
        self._has_begun = False
        self.end = AnswerPart(text="")
        """The last part, once it has come: why the answer ended."""

    @abstractmethod
    def answer(self) -> JsonObject:
        """The whole answer."""

    @abstractmethod
    def begun(self) -> bytes:
        """Events before the first item."""

    @abstractmethod
    def opened(self, item: Item) -> bytes:
        """Events before an item's text."""

    @abstractmethod
    def grown(self, item: Item, text: str, logprobs: list[object]) -> bytes:
        """Events for the next piece of an item."""

    @abstractmethod
    def closed(self, item: Item) -> bytes:
        """Events after an item's text."""

    @abstractmethod
    def ended(self) -> bytes:
        """Events after the last item."""

    @abstractmethod
    def failure(self, error: ManyloraError) -> bytes:
        """The end of a stream that an error cuts."""

    def whole(self, ends: Sequence[tuple[Choice, AnswerPart]]) -> JsonObject:
        """The answer; items of one kind are joined."""
        ((_, self.end),) = ends
        for item, text, logprobs in self._grow(self.end):
            item.add(text, logprobs)
        return self.answer()

    def events(self, step: ChoiceStep, part: AnswerPart) -> bytes:
        """Events of the items that a step adds to."""
        del step
        payload = b"" if self._has_begun else self.begun()
        self._has_begun = True
        for item, text, logprobs in self._grow(part):
            if item is not self.open_item:
                payload += self._close() + self.opened(item)
                self.open_item = item
            item.add(text, logprobs)
            if text:
                payload += self.grown(item, text, logprobs)
        self.end = part
        return payload

    def closing(self) -> bytes:
        """The end of the last item, and of the answer."""
        return self._close() + self.ended()

    def _grow(self, part: AnswerPart) -> Iterator[tuple[Item, str, list[object]]]:
        """Give a part to its items: each with its next text, and the log-probabilities that go with that."""
        if part.logprobs:
            self._logprobs += part.logprobs["content"]
        num_open = int(bool(part.calls) and part.calls[0].id is None)
        for call in part.calls[
            :num_open
        ]:  # what goes on with a call stands before all else of a part
            yield self._item("call", call), call.arguments, []
        if part.reasoning:
            yield self._item("reasoning"), part.reasoning, []
        if part.text or (
            part.finish_reason not in (None, "length") and not (self.items or part.calls)
        ):
            logprobs, self._logprobs = self._logprobs, []
            yield self._item("text"), part.text, logprobs
        for call in part.calls[num_open:]:
            yield self._item("call", call), call.arguments, []
        if part.finish_reason is not None and self.items and self.items[-1].kind == "text":
            self.items[-1].logprobs += self._logprobs  # of the token that ended it

    def _item(self, kind: ItemKind, call: CallPiece | None = None) -> Item:
        """The last item, or a new one after it."""
        if (
            not self.items
            or self.items[-1].kind != kind
            or (call is not None and call.id is not None)
        ):
            self.items.append(Item(kind=kind, index=len(self.items), call=call))
        return self.items[-1]

    def _close(self) -> bytes:
        return b"" if self.open_item is None else self.closed(self.open_item)
