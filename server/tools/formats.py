"""The formats in which models write calls and reasoning. Each family has a row of data in `formats/`.

A row holds a `response_template`, which transformers' parser reads answers by, and the strings of which the grammar of
calls is made. A base's format is the row that `model.tool_format` names, else the row whose markers its chat template
holds. A `response_template` of the base's own tokenizer takes the place of the row's. An adapter has no say in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from manylora.engine.text.tokenizer import Tokenizer
from manylora.errors import ConfigError
from manylora.server.tools.bounded_search import SearchBudget, check_tags

FOLDER = Path(__file__).with_name("formats")
REASONING_FIELDS = ("reasoning", "reasoning_content", "thinking")
"""Names that response templates have for it."""
CALLS_FIELD = "tool_calls"
OWN = "response_template"
"""The name of a format that a base's tokenizer brings itself."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnswerFormat:
    """The form in which one base writes what is not plain text."""

    name: str
    template: Mapping[str, Any]
    """transformers' `response_template`."""
    reasoning: Mapping[str, str] | None
    """Strings for the grammar: `open`, `close`, and `then` for what stands between reasoning and answer."""
    calls: Mapping[str, Any] | None
    """Strings for the grammar, see the rows. None: the format has no calls, or is known by its template alone."""
    special_tokens: Mapping[int, str]
    """Special tokens of the tokenizer that end no answer, by id."""

    @property
    def has_calls(self) -> bool:
        """True if calls can be read."""
        return CALLS_FIELD in self.template["fields"]

    @property
    def has_reasoning(self) -> bool:
        """True if an answer may hold reasoning."""
        return any(name in self.template["fields"] for name in REASONING_FIELDS)

    @property
    def call_head(self) -> str:
        """The text before the name of the first function, or the mark of calls; empty where that is not known."""
        strings = self.calls or {"each": ""}
        return str(
            strings.get("trigger") or strings.get("before", "") + strings["each"].split("{name}")[0]
        )

    @lru_cache(maxsize=64)  # noqa: B019 - formats are as few as bases
    def compiled(self, *, with_calls: bool) -> tuple[Any, Mapping[int, str]]:
        """The template for transformers' parser, and the special tokens that it must see in the text, by id.

        Without calls, what looks like one is text.
        """
        from transformers.utils.chat_parsing.response_templates import load_response_template

        own = self.template["fields"].items()
        fields = {name: field for name, field in own if with_calls or name != CALLS_FIELD}
        marks = json.dumps([fields, with_calls and self.calls], ensure_ascii=False)
        shown = {
            token_id: text
            for token_id, text in self.special_tokens.items()
            if _quoted(text) in marks or _quoted(re.escape(text)) in marks
        }
        return load_response_template({**self.template, "fields": fields}), shown

    def bounded(self, budget: SearchBudget, *, with_calls: bool) -> Any:  # noqa: ANN401
        """The template for one answer: the expressions of a downloaded one are bounded, those of a row are known."""
        template, _ = self.compiled(with_calls=with_calls)
        return budget.bound(template) if self.name == OWN else template


@cache
def rows() -> dict[str, dict[str, Any]]:
    """All rows of the table, by name."""
    return {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(FOLDER.glob("*.json"))
    }


def matching_row(chat_template: str) -> str | None:
    """Name of the row for this chat template; None where no row knows it."""
    found = [
        name
        for name, row in rows().items()
        if any(all(marker in chat_template for marker in markers) for markers in row["markers"])
        and not any(marker in chat_template for marker in row.get("without", ()))
    ]
    return min(found, key=lambda name: (rows()[name].get("rank", 0), name), default=None)


def check_format_name(named: str | None) -> None:
    """Refuse a setting `model.tool_format` that names no row.

    Raises:
        ConfigError: It does.
    """
    if named is not None and named not in rows():
        message = f"model.tool_format must be one of {', '.join(rows())}, got {named}."
        raise ConfigError(message, param="model.tool_format")


def check_template(template: Any) -> None:  # noqa: ANN401 - of a downloaded folder
    """Refuse a `response_template` that answers cannot be read by.

    Raises:
        ConfigError: It is one.
    """
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        load_response_template(template)
        for name, field in template["fields"].items():
            check_tags(name, field)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        message = (
            f"The response_template of this model's tokenizer cannot be used: {error}. Correct it in "
            "tokenizer_config.json, or name a format of docs/tools.md by model.tool_format."
        )
        raise ConfigError(message, param="model.path") from error


@lru_cache(maxsize=8)
def format_of(tokenizer: Tokenizer, named: str | None = None) -> AnswerFormat | None:
    """The format of a base; None where nothing is known of it.

    Args:
        tokenizer: Of the base.
        named: The setting `model.tool_format`.

    Raises:
        ConfigError: The base's own `response_template` cannot be used.
    """
    name = named or matching_row(tokenizer.chat_template.text)
    own = tokenizer.response_template
    if named is not None or own is None:
        return None if name is None else _made(name, rows()[name], tokenizer)
    row = rows().get(name or "", {})
    check_template(own)
    return _made(OWN, {**row, "response_template": own}, tokenizer)


def _made(name: str, row: Mapping[str, Any], tokenizer: Tokenizer) -> AnswerFormat:
    template = row["response_template"]
    reasoning = row.get("reasoning")
    if reasoning is not None and reasoning["open"] not in tokenizer.chat_template.text:
        fields = {
            key: field for key, field in template["fields"].items() if key not in REASONING_FIELDS
        }
        template = {**template, "fields": fields}
        reasoning = None
    special = tokenizer.special_tokens.items()
    special_tokens = {
        token_id: text for text, token_id in special if token_id not in tokenizer.eos_token_ids
    }
    return AnswerFormat(
        name=name,
        template=template,
        reasoning=reasoning,
        calls=row.get("calls"),
        special_tokens=special_tokens,
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
