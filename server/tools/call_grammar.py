"""The grammar of one request's answers, as Lark text for llguidance: reasoning, then text or calls of offered tools.

Made of the strings in the base's format. A call is held to the name of an offered tool and to the format; its arguments
to the schema of the tool's parameters, or to any JSON object where the client does not ask for more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from manylora.engine.grammar.schema_reader import refusal
from manylora.server.tools.formats import AnswerFormat
from manylora.server.tools.parameters import ANY_TEXT, ArgumentGrammar, JsonRule, escaped, without
from manylora.server.tools.schemas import Tool, ToolChoice


@dataclass(kw_only=True)
class CallGrammar:
    """Writes the grammar of one request.

    Args:
        format: Of the base.
        special_tokens: Ids of its tokenizer's tokens that are no text to llguidance, by their text.
        json_rule: Makes rules of schemas.
    """

    format: AnswerFormat
    special_tokens: Mapping[str, int]
    json_rule: JsonRule
    schemas: list[tuple[object, str]] = field(default_factory=list)
    """Schemas of the arguments that are held to them, each with its place in the body."""
    _rules: dict[str, str] = field(default_factory=dict)

    def lark(
        self,
        *,
        tools: Sequence[Tool],
        choice: ToolChoice,
        is_parallel: bool = True,
        thinks: bool | None = False,
        answer: str | None = None,
    ) -> str:
        """The whole grammar.

        Args:
            tools: What may be called; empty for none.
            choice: Whether it must be.
            is_parallel: Whether one answer may hold several calls.
            thinks: Whether the prompt has begun the reasoning; None where the model may begin it.
            answer: A grammar for an answer without calls, which begins with `start:`; None for any text.
        """
        self._rules = {"TEXT": f"/{ANY_TEXT}/"}
        opening = (self.format.reasoning or {}).get("open", "")
        not_first = [opening] if thinks is None and opening not in self.special_tokens else []
        parts = (
            self._calls(tools, choice, is_parallel, not_first, is_free=answer is None)
            if tools
            else []
        )
        if choice.mode != "required" or not tools:
            parts.append(
                self._plain(
                    answer, [*not_first, *(self._beginnings(tools) if answer is None else [])]
                )
            )
        start = f"({' | '.join(parts)})"
        if thinks is not False and self.format.reasoning is not None:
            start = ("think " if thinks else "think? ") + start
            self._think(
                has_begun=bool(thinks), is_spaced=choice.mode == "required" or answer is not None
            )
        body = "\n".join(f"{name}: {rule}" for name, rule in self._rules.items())
        return f"%llguidance {{}}\nstart: {start}\n{body}\n"

    def _think(self, *, has_begun: bool, is_spaced: bool) -> None:
        """Reasoning up to its end; text that follows may have its own white space."""
        strings = self.format.reasoning or {}
        then = self._literal(strings.get("then", "")) + (" /[ \\n]{0,4}/" if is_spaced else "")
        self._until("thought", "TEXT", strings["close"])
        self._rules["think"] = (
            f"{'' if has_begun else self._literal(strings['open'])} thought {then}"
        )

    def _until(self, name: str, text: str, end: str) -> None:
        """A rule for text up to where `end` is first written, and `end`."""
        pieces = self._literal(end)
        is_special = pieces.startswith("<")
        self._rules[name if is_special else f"{name}[lazy]"] = f"{text} {pieces}"

    def _plain(self, answer: str | None, not_first: Sequence[str]) -> str:
        """An answer without calls."""
        opening = self._literal((self.format.calls or {}).get("text", ""))
        if answer is not None:
            self._rules["answer"] = answer.removeprefix("start:")
            return f"{opening} answer"
        self._rules["FREE"] = _not_starting(not_first)
        return f"{opening} FREE"

    def _beginnings(self, tools: Sequence[Tool]) -> list[str]:
        """The beginnings of calls in formats without a mark for them. An answer that is no call does not begin so."""
        strings = self.format.calls or {}
        if not tools or "trigger" in strings or "text" in strings:
            return []
        head, middle, _ = _parts(strings)
        return [
            f"{strings.get('before', '')}{head}{tool.function.name}{middle[0]}" for tool in tools
        ]

    def _calls(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        is_parallel: bool,
        not_first: Sequence[str],
        *,
        is_free: bool,
    ) -> list[str]:
        """The rules of calls; returns what an answer with calls is."""
        strings = self.format.calls or {}
        head, middle, tail = _parts(strings)
        bodies = []
        for index, tool in enumerate(tools):
            is_strict = tool.function.strict or (
                choice.mode == "required" and tool.function.strict is None
            )
            self._rules[f"args_of_{index}"] = (
                self._arguments(tool, index, is_strict=is_strict) or '""'
            )
            self._rules[f"call_{index}"] = (
                f"{quoted(tool.function.name)} {self._literal(middle)} args_of_{index}"
            )
            bodies.append(f"call_{index}")
        self._rules["call"] = f"({' | '.join(bodies)}) {self._literal(tail)}"
        more = ""
        if is_parallel and not choice.is_single and "between" in strings:
            more = f"({self._literal(strings['between'] + head)} call)*"
        after = self._literal(strings.get("after", ""))
        begin = strings.get("before", "") + head
        beginnings = self._beginnings(tools)
        if beginnings:  # each in one piece: the text that begins otherwise ends where it is whole
            firsts = (
                f"{self._literal(beginning + middle[1:])} args_of_{index}"
                for index, beginning in enumerate(beginnings)
            )
            return [f"({' | '.join(firsts)}) {self._literal(tail)} {more} {after}"]
        trigger = strings.get("trigger")
        if choice.mode == "required" or trigger is None or not is_free:
            return [f"{self._literal(begin)} call {more} {after}"]
        self._rules["BEFORE"] = _not_starting(not_first)
        self._until("trigger", "BEFORE", trigger)
        return [f"trigger {self._literal(begin.removeprefix(trigger))} call {more} {after}"]

    def _arguments(self, tool: Tool, index: int, *, is_strict: bool) -> str:
        """An expression for the arguments of a tool."""
        strings = self.format.calls or {}
        param = f"tools.{index}.function.parameters"
        schema: dict[str, Any] = {}
        if is_strict and tool.function.parameters:
            kinds = tool.function.parameters.get("type", "object")
            if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
                raise refusal(
                    "The arguments of a call are an object, so the type must be object.",
                    f"{param}.type",
                )
            schema = {**tool.function.parameters, "type": "object"}
            if schema.get("properties"):
                schema.setdefault("additionalProperties", False)
        rule = self.json_rule(
            schema or {"type": "object"}, param, self._rules
        )  # with all checks, for any notation
        if schema:
            self.schemas.append((schema, param))
        if strings["style"] != "json":
            notation = ArgumentGrammar(
                strings=strings, rules=self._rules, json_rule=self.json_rule, literal=self._literal
            )
            return notation.arguments(f"args_{index}", schema, schema, param)
        if schema:
            return rule
        self._rules["any_args"] = rule
        return "any_args"

    def _literal(self, text: str) -> str:
        """A text as the grammar writes it: special tokens by their id, all else as a string."""
        if not text:
            return ""
        pieces = self._splitter.split(text) if self.special_tokens else [text]
        return " ".join(
            f"<[{self.special_tokens[piece]}]>" if piece in self.special_tokens else quoted(piece)
            for piece in pieces
            if piece
        )

    @cached_property
    def _splitter(self) -> re.Pattern[str]:
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")


def _parts(strings: Mapping[str, Any]) -> list[str]:
    """The texts before the name of a call, between name and arguments, and after them."""
    head, rest = strings["each"].split("{name}")
    return [head, *rest.split("{arguments}")]


def quoted(text: str) -> str:
    """A string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _not_starting(words: Iterable[str]) -> str:
    """A rule for all texts that start with none of the words."""
    words = [escaped(word) for word in words if word]
    return without(f"({'|'.join(words)})") if words else f"/{ANY_TEXT}/"
