"""Reads answers as they come: what of the text is content, reasoning, or a call. The parser is transformers' own."""

from __future__ import annotations

import ast
import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from manylora.errors import InvalidRequestError
from manylora.server.tools.bounded_search import SearchBudget
from manylora.server.tools.formats import CALLS_FIELD, REASONING_FIELDS, AnswerFormat
from manylora.server.tools.parameters import typed_tool
from manylora.server.tools.schemas import Tool

MAX_HELD = 64
"""White space that waits for what follows."""
_ID_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPiece:
    """The new part of a call."""

    index: int
    """Place among the answer's calls."""
    id: str | None = None
    """With the first piece of a call only, as the name."""
    name: str | None = None
    arguments: str = ""
    """The next piece of the arguments' JSON."""


def joined_calls(pieces: Sequence[CallPiece]) -> tuple[CallPiece, ...]:
    """Pieces of calls with those of one call as one, in the order of the calls."""
    calls: dict[int, CallPiece] = {}
    for piece in pieces:
        known = calls.get(piece.index)
        calls[piece.index] = (
            replace(known, arguments=known.arguments + piece.arguments) if known else piece
        )
    return tuple(calls.values())


@dataclass(slots=True, kw_only=True)
class Reading:
    """The parts that a piece of text adds to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    """Log-probabilities of the tokens of the content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """The way in which the answers to a request are read."""

    format: AnswerFormat
    tools: Sequence[Tool] = ()
    """Tools that may be called."""
    prefix: str = ""
    """The start of the answer that the chat template has already written, for example `<think>`."""
    shows_reasoning: bool = True
    typed_tools: list[Any] = field(default_factory=list, init=False)
    """For values in tags, which have their type from the schema."""

    def __post_init__(self) -> None:
        if (self.format.calls or {}).get("style", "xml") == "xml":
            self.typed_tools.extend(map(typed_tool, self.tools))

    @property
    def shown_ids(self) -> Mapping[int, str]:
        """Special tokens that must stand in the text to be read, by id."""
        return self.format.compiled(with_calls=bool(self.tools))[1]

    def reader(self) -> AnswerReader:
        """A reader for one choice."""
        return AnswerReader(self)


def plan_answer(
    answer: AnswerFormat, tools: Sequence[Tool], rendered: str, *, shows_reasoning: bool
) -> AnswerPlan:
    """The plan for the answers to a rendered prompt.

    Raises:
        InvalidRequestError: The prompt has begun a call, which nobody can go on with.
    """
    template = answer.bounded(SearchBudget(), with_calls=bool(tools))
    prefix = template.truncate_past_last_anchor(rendered)
    # Without its anchor the template would take the history for a part of the answer.
    prefix = "" if len(prefix) == len(rendered) else prefix
    reader = AnswerPlan(format=answer, tools=tools, prefix=prefix).reader()
    if reader.has_begun_call:
        message = "The last message ends in the middle of a call. Leave the call to the model."
        raise InvalidRequestError(message, param="messages")
    prefix = prefix.removesuffix(reader.pending)  # no start of a mark: the answer begins after it
    return AnswerPlan(format=answer, tools=tools, prefix=prefix, shows_reasoning=shows_reasoning)


class AnswerReader:
    """Reads one answer, fed in pieces of any size.

    White space around reasoning and calls is not part of the content. Text that should be a call and is none, or calls
    what was not offered, stays content.

    Args:
        plan: How.
    """

    def __init__(self, plan: AnswerPlan) -> None:
        from manylora.server.tools.parser import AnswerParser

        self._plan = plan
        self._names = {tool.function.name for tool in plan.tools}
        budget = SearchBudget()
        template = plan.format.bounded(budget, with_calls=bool(plan.tools))
        self._parser = AnswerParser(template, plan.prefix, plan.typed_tools, budget)
        self._region: str | None = None
        self._is_streamed = False
        """True while the text of the open call is its arguments."""
        self._has_text = {"content": False, "reasoning": False}
        self._has_marker = self._is_broken = False
        self._unread: list[object] = []
        """Log-probabilities of tokens that may be content, or the mark of something else."""
        self._reset()
        for event in self._parser.initial_events:
            self._take(event)
        self._reset()  # what was read, but not where it led to

    def _reset(self) -> None:
        self.num_calls = 0
        self._held = {
            "content": "",
            "reasoning": "",
        }  # white space, part of the text only if more text follows
        self._now = Reading()

    @property
    def thinks(self) -> bool | None:
        """True if reasoning has begun before the first text; None where the model may begin it."""
        if self.is_reasoning or not self._plan.format.has_reasoning:
            return self.is_reasoning
        return False if self._has_marker else None

    @property
    def is_reasoning(self) -> bool:
        """True if the text is in the middle of reasoning."""
        return self._region in REASONING_FIELDS

    @property
    def is_text(self) -> bool:
        """True if the text is in the middle of neither reasoning nor a call."""
        return self._region in (None, "content")

    @property
    def pending(self) -> str:
        """The end of the text where it may be the start of a mark."""
        return self._parser.pending

    @property
    def has_begun_call(self) -> bool:
        """True if the text is in the middle of a call, or of what stands before its arguments."""
        head = self._plan.format.call_head if self._plan.tools else ""
        return self._region == CALLS_FIELD or bool(head and head in self.pending)

    def read(
        self, text: str, ends: Sequence[int], logprobs: Sequence[object] = ()
    ) -> tuple[Reading, int]:
        """Take the text of some tokens.

        Args:
            text: What the tokens add.
            ends: Where in it the text of each token ends.
            logprobs: Log-probabilities of each token, where those of the content are wanted.

        Returns:
            What is certain with it, and how many of the tokens are reasoning.
        """
        now = self._now = Reading()
        num_reasoning = start = 0
        sorts_logprobs = bool(logprobs or self._unread)
        for end, logprob in zip_longest([*ends[:-1], len(text)], logprobs):
            was_reasoning = self.is_reasoning
            before = (len(now.content), len(now.calls), self.is_text) if sorts_logprobs else None
            for event in self._parser.feed(text[start:end]):
                self._take(event)
            is_reasoning = bool(ends) and (was_reasoning or self.is_reasoning)
            num_reasoning += is_reasoning
            start = max(start, end)
            if before is not None:
                self._unread += [] if logprob is None else [logprob]
                self._sort_logprobs(*before, is_reasoning=is_reasoning)
        return now, num_reasoning

    def _sort_logprobs(
        self, num_content: int, num_calls: int, was_text: bool, *, is_reasoning: bool
    ) -> None:
        """Add those of tokens that turned out to be content, and drop those of marks; all before the last token."""
        now = self._now
        if len(now.content) > num_content:
            now.logprobs += self._unread
        elif len(now.calls) == num_calls and not is_reasoning and (was_text or not self.is_text):
            return
        self._unread.clear()

    def close(self, reading: Reading, *, is_cut: bool) -> bool:
        """Add the rest, when no more text comes; returns whether a call was cut, or its arguments are no JSON.

        Args:
            reading: What it is added to.
            is_cut: Whether the answer was ended from outside: by its length or a stop.
        """
        self._now = reading
        if self.is_text:
            reading.logprobs += self._unread
        # Of tags the parser takes what is there.
        is_cut = (
            is_cut
            or self._plan.format.template["fields"].get(CALLS_FIELD, {}).get("content")
            == "xml-inline"
        )
        if is_cut and self.has_begun_call:
            return True
        for event in self._parser.rest():
            self._take(event)
        if not self.num_calls:
            self._now.content += self._held["content"]
        return self._is_broken

    def _take(self, event: Mapping[str, Any]) -> None:
        kind = event["type"]
        name = event["field"]
        if kind == "region_open":
            self._region = name
            self._has_marker = self._has_marker or name == CALLS_FIELD or name in REASONING_FIELDS
            self._is_streamed = event.get("name") in self._names
            if self._is_streamed:
                self._add(event["name"])
        elif kind == "region_close":
            self._region = None
            if name == CALLS_FIELD:
                self._close_call(event["value"], event["raw"])
            elif name in REASONING_FIELDS:
                self._held["reasoning"] = ""
        elif name != CALLS_FIELD:
            self._text("reasoning" if name in REASONING_FIELDS else "content", event["text"])
        elif self._is_streamed:
            self._now.calls.append(CallPiece(index=self.num_calls - 1, arguments=event["text"]))

    def _text(self, kind: str, text: str) -> None:
        text = self._held[kind] + text
        if not self._has_text[kind] and self._has_marker:
            text = text.lstrip()
        shown = text[: max(len(text.rstrip()), len(text) - MAX_HELD)]
        self._held[kind] = text[len(shown) :]
        self._has_text[kind] = self._has_text[kind] or bool(shown)
        setattr(self._now, kind, getattr(self._now, kind) + shown)

    def _close_call(self, value: object, raw: str) -> None:
        if self._is_streamed:
            self._is_broken = self._is_broken or value is None
        elif (calls := _calls(value)) and all(name in self._names for name, _ in calls):
            for name, arguments in calls:
                self._add(name, arguments)
        else:
            self._text("content", raw.strip())

    def _add(self, name: str, arguments: str = "") -> None:
        self._now.calls.append(
            CallPiece(index=self.num_calls, id=_call_id(self._plan), name=name, arguments=arguments)
        )
        self.num_calls += 1


def _call_id(plan: AnswerPlan) -> str:
    length = (plan.format.calls or {}).get("id_length")
    letters = "".join(secrets.choice(_ID_LETTERS) for _ in range(length or 24))
    return letters if length else f"call_{letters}"


def _calls(value: object) -> list[tuple[str, str]]:
    """Names and arguments of what the parser made of a region, one call or a list of them; empty where it is none."""
    try:
        found = _python_calls(value) if isinstance(value, str) else value
        return [_call(each) for each in (found if isinstance(found, list) else [found])]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _call(value: object) -> tuple[str, str]:
    match value.get("function", value) if isinstance(value, dict) else None:
        case {"name": str(name), "arguments": dict(given)} | {
            "name": str(name),
            "parameters": dict(given),
        }:
            text = json.dumps(given, ensure_ascii=False)
            return name, text if text.isprintable() else json.dumps(
                given
            )  # a lone surrogate cannot be sent as it is
    raise TypeError("not a call")


class _JsonNames(ast.NodeTransformer):
    """Reads what JSON calls otherwise than Python."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        names = {"true": True, "false": False, "null": None}
        return ast.Constant(names[node.id]) if node.id in names else node


def _python_calls(text: str) -> list[dict[str, Any]]:
    """Calls as Python writes them: `f(a=1), g()`, in brackets, or one a line."""
    calls = []
    for statement in ast.parse(text.strip()).body:
        node = statement.value if isinstance(statement, ast.Expr) else None
        for call in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
            if (
                not isinstance(call, ast.Call)
                or call.args
                or any(each.arg is None for each in call.keywords)
            ):
                raise TypeError("not a call")
            pairs = (
                (each.arg, ast.literal_eval(_JsonNames().visit(each.value)))
                for each in call.keywords
            )
            calls.append({"name": ast.unparse(call.func), "arguments": dict(pairs)})
    return calls
