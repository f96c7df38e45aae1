"""The demo's tokenizer with a chat template that shows tools, reasoning and calls as other families do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from llguidance import LLTokenizer

from api_server import Api
from fake_engine import DEMO_MODEL
from grammar_checks import SharedChecker
from manylora.engine.text.tokenizer import Tokenizer
from manylora.server.tools.formats import AnswerFormat, format_of, rows
from manylora.server.tools.schemas import Tool, ToolFunction
from quick_renderer import QuickRenderer

HERMES = (
    "{{ bos_token }}{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}Answer as "
    '<tool_call>{"name": ..., "arguments": ...}</tool_call><|end|>{% endif %}'
    "{% for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{% if message.role == 'tool' %}{{ message.tool_call_id }}={% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>\n"
    "{% endif %}{% endif %}"
)


SPECIAL = {
    "mistral_v3": ("[TOOL_CALLS]",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    "gemma4": ("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>'),
    "harmony": ("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "llama3": ("<|python_tag|>",),
}
"""Special tokens of a family besides the demo's."""


def family(name: str) -> AnswerFormat:
    """The format of a base that is known by the row's first markers."""
    return known_format(family_tokenizer(name))


def known_format(tokenizer: Tokenizer, named: str | None = None) -> AnswerFormat:
    found = format_of(tokenizer, named)
    assert found is not None
    return found


def family_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of `family`."""
    return tokenizer_with(*_asked(name))


@cache
def family_llguidance(name: str) -> LLTokenizer:
    """The same for llguidance."""
    folder = tokenizer_folder(*_asked(name))
    # Not the demo's own end, which is a mark within answers of gpt-oss.
    end = family_tokenizer(name).special_tokens["<|pad|>"]
    return LLTokenizer((folder / "tokenizer.json").read_text(), eos_token=end)


def _asked(name: str) -> tuple[str, tuple[str, ...]]:
    row = rows()[name]
    return "".join(row["markers"][0]) + row.get("reasoning", {}).get("open", ""), SPECIAL.get(
        name, ()
    )


def tool(name: str, *, strict: bool | None = None, **properties: Any) -> Tool:
    """A tool; a property whose name ends with an underscore is not required."""
    own = {key.rstrip("_"): schema for key, schema in properties.items()}
    required = [key for key in properties if not key.endswith("_")]
    parameters = {"type": "object", "properties": own, "required": required}
    return Tool(
        type="function", function=ToolFunction(name=name, parameters=parameters, strict=strict)
    )


def tool_format(name: str) -> Mapping[str, Any]:
    """The strings of a family's calls."""
    calls = family(name).calls
    assert calls is not None
    return calls


@cache
def tokenizer_with(
    chat_template: str = HERMES, special: tuple[str, ...] = (), **fields: Any
) -> Tokenizer:
    """The demo's tokenizer with another chat template and more special tokens.

    `fields` are more of its tokenizer_config.json.
    """
    return Tokenizer(tokenizer_folder(chat_template, special, **fields))


@cache
def tokenizer_folder(chat_template: str, special: tuple[str, ...] = (), **fields: Any) -> Path:
    """Where the files of `tokenizer_with` are."""
    folder = Path(mkdtemp(prefix="manylora-tokenizer-"))
    (folder / "config.json").symlink_to(DEMO_MODEL / "config.json")
    content = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    known = content["added_tokens"]
    first = max(len(content["model"]["vocab"]), *(token["id"] + 1 for token in known))
    for index, text in enumerate(special):
        known.append({**known[0], "id": first + index, "content": text})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    config.pop("response_template", None)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": chat_template, **fields})
    )
    return folder


def use_tokenizer(api: Api, tokenizer: Tokenizer) -> None:
    """Serve the demo model with this tokenizer."""
    ready = replace(api.services.ready, max_model_len=4096)
    api.services = api.app.state.services = replace(
        api.services,
        tokenizer=tokenizer,
        chats=QuickRenderer(tokenizer),
        grammars=SharedChecker(tokenizer.folder),
        ready=ready,
    )
