"""How the models of each family write calls and reasoning. One row of data per family, in `formats/`.

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
from typing import TYPE_CHECKING, Any

from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.engine.text.tokenizer import Tokenizer

FOLDER = Path(__file__).with_name("formats")
REASONING_FIELDS = ("reasoning", "reasoning_content", "thinking")
"""Names that response templates have for it."""
CALLS_FIELD = "tool_calls"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnswerFormat:
    """How one base writes what is not plain text."""

    name: str
    template: Mapping[str, Any]
    """transformers' `response_template`."""
    reasoning: Mapping[str, str] | None
    """Strings for the grammar: `open`, `close`, and `then` for what stands between reasoning and answer."""
    calls: Mapping[str, Any] | None
    """Strings for the grammar, see the rows. None: the format has no calls, or is known by its template alone."""
    shown_ids: Mapping[int, str]
    """Special tokens that the template must see in the text, by id."""

    @property
    def has_calls(self) -> bool:
        """Whether calls can be read."""
        return CALLS_FIELD in self.template["fields"]

    @property
    def has_reasoning(self) -> bool:
        """Whether an answer may hold reasoning."""
        return any(name in self.template["fields"] for name in REASONING_FIELDS)

    def compiled(self, *, with_calls: bool) -> Any:  # noqa: ANN401 - of a module without types
        """The template for transformers' parser; without calls, what looks like one is text."""
        return _compiled(self, with_calls)


@lru_cache(maxsize=64)
def _compiled(answer: AnswerFormat, with_calls: bool) -> Any:  # noqa: ANN401
    from transformers.utils.chat_parsing.response_templates import load_response_template

    fields = {name: field for name, field in answer.template["fields"].items() if with_calls or name != CALLS_FIELD}
    return load_response_template({**answer.template, "fields": fields})


@cache
def rows() -> dict[str, dict[str, Any]]:
    """All rows of the table, by name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}


def matching_rows(chat_template: str) -> list[str]:
    """Names of the rows that know this chat template, the one to take first."""
    found = [
        name
        for name, row in rows().items()
        if any(all(marker in chat_template for marker in markers) for markers in row["markers"])
        and not any(marker in chat_template for marker in row.get("without", ()))
    ]
    return sorted(found, key=lambda name: (rows()[name].get("rank", 0), name))


@lru_cache(maxsize=8)
def format_of(tokenizer: Tokenizer, named: str | None = None) -> AnswerFormat | None:
    """The format of a base; None where nothing is known of it.

    Args:
        tokenizer: Of the base.
        named: The setting `model.tool_format`.

    Raises:
        ConfigError: The setting names no row.
    """
    if named is not None and named not in rows():
        raise ConfigError(
            f"model.tool_format must be one of {', '.join(rows())}, got {named}.", param="model.tool_format"
        )
    name = named or next(iter(matching_rows(tokenizer.chat_template)), None)
    own = tokenizer.response_template
    if named is not None or own is None:
        return None if name is None else _made(name, rows()[name], tokenizer)
    row = rows().get(name or "", {})
    of_rows = ("head", "left")  # made for the row's own template
    calls = {key: value for key, value in row.get("calls", {}).items() if key not in of_rows}
    return _made("response_template", {**row, "response_template": own, "calls": calls or None}, tokenizer)


def _made(name: str, row: Mapping[str, Any], tokenizer: Tokenizer) -> AnswerFormat:
    template, reasoning = row["response_template"], row.get("reasoning")
    if reasoning is not None and reasoning["open"] not in tokenizer.chat_template:
        fields = {key: field for key, field in template["fields"].items() if key not in REASONING_FIELDS}
        template, reasoning = {**template, "fields": fields}, None
    wanted = json.dumps([template, reasoning, row.get("calls")], ensure_ascii=False)
    shown = {
        token_id: text
        for text, token_id in tokenizer.special_tokens.items()
        if token_id not in tokenizer.eos_token_ids and (_quoted(text) in wanted or _quoted(re.escape(text)) in wanted)
    }
    return AnswerFormat(name=name, template=template, reasoning=reasoning, calls=row.get("calls"), shown_ids=shown)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
