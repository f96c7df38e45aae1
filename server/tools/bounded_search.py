"""Regular expressions of a `response_template`, bounded in time: they are code of a downloaded folder.

They run in the event loop, at each piece of an answer, and no check of an expression tells how long it will take. So
all searches for one answer share a budget of computing time, which a sound template never comes near.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import thread_time
from typing import Any

import regex

from manylora.errors import InvalidRequestError

MAX_SEARCH_S = 0.5
"""Computing time for one answer. A sound template takes microseconds a token."""
UNUSABLE = "response_template_unusable"
_LEAST_S = 1e-3  # `regex` takes 0 for no time at all, and looks at the clock only now and then


class SearchBudget:
    """The time that is left for the searches of one answer."""

    def __init__(self) -> None:
        self._left_s = MAX_SEARCH_S

    def run(self, search: Callable[..., Any], *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Call a method of a compiled expression.

        Raises:
            InvalidRequestError: The time is over; code `response_template_unusable`.
        """
        if self._left_s <= 0:
            raise _too_slow()
        began = thread_time()
        try:
            return search(*args, timeout=max(self._left_s, _LEAST_S), **options)
        except TimeoutError:
            self._left_s = 0.0
            raise _too_slow() from None
        finally:
            self._left_s -= thread_time() - began

    def bound(self, template: Any) -> Any:  # noqa: ANN401 - transformers' ResponseTemplate
        """The template with its own expressions within this budget. Literal marks are found in linear time."""
        fields = {
            name: replace(
                field,
                open_re=self._bounded(field.open_re, field.open_literals),
                close_re=self._bounded(field.close_re, field.close_literals),
            )
            for name, field in template.fields.items()
        }
        anchor = self._bounded(template.start_anchor_re, template.start_anchor_literals)
        return replace(template, fields=fields, start_anchor_re=anchor)

    def try_tags(self, text: str, content_args: dict[str, Any]) -> None:
        """Find all tags in a text: transformers finds them again, without a bound, and takes as long."""
        self.run(lambda timeout: list(_tags(content_args).finditer(text, timeout=timeout)))

    def _bounded(self, pattern: Any, literals: Any) -> Any:  # noqa: ANN401
        return pattern if pattern is None or literals else BoundedPattern(pattern, self)


@dataclass(frozen=True)
class BoundedPattern:
    """A compiled expression as transformers' parser uses it, within a budget."""

    pattern: Any
    budget: SearchBudget

    def search(self, text: str, start: int, **options: bool) -> Any:  # noqa: ANN401
        """The first match at or after `start`."""
        return self.budget.run(self.pattern.search, text, start, **options)

    def match(self, text: str, start: int) -> Any:  # noqa: ANN401
        """The match at `start`."""
        return self.budget.run(self.pattern.match, text, start)

    def finditer(self, text: str) -> list[Any]:
        """All matches."""
        return list(
            self.budget.run(lambda timeout: list(self.pattern.finditer(text, timeout=timeout)))
        )


def check_tags(name: str, field: dict[str, Any]) -> None:
    """Refuse expressions for tags that `try_tags` cannot bound.

    Raises:
        ValueError: One is none, or it is for tags within tags or lines.
    """
    args = field.get("content_args", {})
    if field.get("content") == "xml-inline":
        try:
            _tags(args)
        except (regex.error, KeyError, TypeError) as error:
            raise ValueError(
                f"Field '{name}': its tag_pattern is no regular expression: {error}"
            ) from error
    if (args.get("value_parser") or {}).get("name") in ("xml-inline", "kv-lines"):
        raise ValueError(f"Field '{name}': its value_parser must not look for tags or lines itself")


def _tags(content_args: dict[str, Any]) -> Any:  # noqa: ANN401
    return regex.compile(
        content_args["tag_pattern"], regex.DOTALL
    )  # which keeps what it has compiled


def _too_slow() -> InvalidRequestError:
    message = (
        f"The response_template of this model's tokenizer took more than {MAX_SEARCH_S} s of computing time to read "
        "this answer. The operator may name a format of docs/tools.md by the setting model.tool_format; else use "
        "/v1/completions."
    )
    return InvalidRequestError(message, code=UNUSABLE, param="messages")
