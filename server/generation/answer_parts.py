"""The parts of an answer, and answers that are lists of items: reasoning, texts and calls, one after the other."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from manylora.errors import ManyloraError
from manylora.server.generation.choices import Choice, ChoiceStep
from manylora.server.generation.meter import Meter
from manylora.server.tools.reading import CallPiece

JsonObject = dict[str, object]
ItemKind = Literal["reasoning", "text", "call"]


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
    """None where the client did not ask for them."""


def joined_calls(pieces: Sequence[CallPiece]) -> tuple[CallPiece, ...]:
    """Pieces of calls with those of one call as one, in the order of the calls."""
    calls: dict[int, CallPiece] = {}
    for piece in pieces:
        known = calls.get(piece.index)
        calls[piece.index] = (
            replace(known, arguments=known.arguments + piece.arguments) if known else piece
        )
    return tuple(calls.values())


def joined(parts: Sequence[AnswerPart]) -> AnswerPart:
    """All parts of a choice as one."""
    last = parts[-1]
    text = "".join(part.text for part in parts)
    logprobs = merge([part.logprobs for part in parts])
    if logprobs is not None and "text_offset" in logprobs:
        # A stop string may have been cut off since.
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
