"""transformers' parser of answers. Here no mark ends a value in JSON, and a region that cannot be parsed is told."""

from __future__ import annotations

import re
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from manylora.server.tools.bounded_search import SearchBudget

CALL = {"function": {"name": "{name}", "arguments": "{content}"}}
"""The `transform` of fields whose text is the arguments."""


class AnswerParser(ResponseParser):
    """Adds to events: `name` where a call opens whose text is its arguments, its `raw` text where one closes.

    The `value` of a region that cannot be parsed is None.
    """

    _json: _JsonText | None = None
    """In a region of JSON."""
    _opened_at = 0

    def __init__(self, template: Any, prefix: str, tools: list[Any], budget: SearchBudget) -> None:  # noqa: ANN401
        self._budget = budget
        super().__init__(template, prefix=prefix, tools=tools)

    @property
    def pending(self) -> str:
        """Text that has no event yet: it may be the start of a mark."""
        return self._buffer[self._pos :]

    def rest(self) -> list[dict[str, Any]]:
        """The last events, when no more text comes."""
        events: list[dict[str, Any]] = []
        self._process(events, eos=True)
        return events

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:  # noqa: ANN401
        super()._open_explicit(events, field, m)
        self._opened_at = m.start()
        if field.content == "json":
            quotes = field.content_args.get("string_delims", [])
            self._json = _JsonText(self._pos, quotes[0][0] if quotes else '"')
            if field.transform == CALL and not field.content_args:
                events[-1]["name"] = self._captures.get("name")

    def _scan(self, watch: Any, eos: bool) -> Any:  # noqa: ANN401
        start = self._pos
        if self._json is not None:
            self._pos = self._json.end(self._buffer)  # marks are looked for after it
        found = super()._scan(watch, eos)
        self._pos = start
        return found

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        name = self._current
        was_open = self._opened
        field = self._spec.fields[name] if name is not None else None
        if field is not None and field.content == "xml-inline":
            self._budget.try_tags(self._body, field.content_args)
        try:
            super()._close_current(events)
        except (ValueError, KeyError, RecursionError):
            events.append({"type": "region_close", "field": name, "value": None})
            self._reset_to_implicit()
        self._json = None
        if was_open and name != self._implicit_name:
            events[-1]["raw"] = self._buffer[self._opened_at : self._pos]
            # What begins an answer may also follow a region.
            self._buffer, self._pos = self._buffer[self._pos :], 0


class _JsonText:
    """Follows an object or a list in a text that grows.

    Args:
        start: Where it begins at the earliest.
        quote: Of its strings.
    """

    def __init__(self, start: int, quote: str) -> None:
        self._place = start
        self._quote = quote
        self._mark = re.compile(
            rf"{re.escape(quote)}|[\[\]{{}}]" + (r"|\\." if quote == '"' else ""), re.DOTALL
        )
        self._depth = 0
        self._is_string = self._has_ended = False

    def end(self, text: str) -> int:
        """Where it ends; the end of the text where it does not yet."""
        for found in () if self._has_ended else self._mark.finditer(text, self._place):
            self._place = found.end()
            mark = found.group()
            if mark == self._quote:
                self._is_string = not self._is_string
            elif not self._is_string and mark[0] != "\\":
                self._depth += 1 if mark in "[{" else -1
                self._has_ended = not self._depth
            if self._has_ended:
                break
        # The start of a mark may be the last of the text.
        self._place = max(
            self._place, 0 if self._has_ended else len(text) - max(len(self._quote) - 1, 1)
        )
        return self._place if self._has_ended else len(text)
