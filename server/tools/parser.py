"""transformers' parser of answers, which here also tells where in the text it is."""

from __future__ import annotations

from typing import Any

from transformers.utils.chat_parsing import ResponseParser


class AnswerParser(ResponseParser):
    """Events of regions that open have what opened them, as `mark`, where it holds a part of the value."""

    opened_at = 0
    """Where the mark of the last region begins."""

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:  # noqa: ANN401
        super()._open_explicit(events, field, m)
        self.opened_at = m.start()
        events[-1]["mark"] = m.group() if m.groupdict() else ""

    @property
    def place(self) -> int:
        """Where the text begins that has no event yet: it may be the start of a mark."""
        return self._pos

    def text_from(self, place: int) -> str:
        """The text from a place on."""
        return self._buffer[place:]
