"""Reads answers as they come: what of the text is content, reasoning, or a call. The parser is transformers' own."""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from weft.errors import InvalidRequestError
from weft.server.tools.formats import CALLS_FIELD, REASONING_FIELDS
from weft.server.tools.parameters import typed_tool

if TYPE_CHECKING:
    from weft.server.tools.formats import AnswerFormat
    from weft.server.tools.schemas import Tool

MAX_HEAD = 1024
"""Characters of a call before its arguments begin."""
MAX_HELD = 64
"""White space that waits for what follows."""
_ID_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPiece:
    """What is new of a call."""

    index: int
    """Place among the answer's calls."""
    id: str | None = None
    """With the first piece of a call only, as the name."""
    name: str | None = None
    arguments: str = ""
    """The next piece of the arguments' JSON."""


@dataclass(slots=True, kw_only=True)
class Reading:
    """What a piece of text adds to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """How the answers to a request are read."""

    format: AnswerFormat
    tools: Sequence[Tool] = ()
    """What may be called."""
    prefix: str = ""
    """What the chat template has already written of the answer, for example `<think>`."""
    shows_reasoning: bool = True
    typed_tools: list[Any] = field(default_factory=list, init=False)
    """For values in tags, which have their type from the schema."""

    def __post_init__(self) -> None:
        if (self.format.calls or {}).get("style", "xml") == "xml":
            self.typed_tools.extend(map(typed_tool, self.tools))

    def reader(self) -> AnswerReader:
        """A reader for one choice."""
        return AnswerReader(self)


def plan_answer(answer: AnswerFormat, tools: Sequence[Tool], rendered: str, *, shows_reasoning: bool) -> AnswerPlan:
    """The plan for the answers to a rendered prompt.

    Raises:
        InvalidRequestError: The prompt has begun a call, which nobody can go on with.
    """
    prefix = answer.compiled(with_calls=bool(tools)).truncate_past_last_anchor(rendered)
    # Without its anchor the template would take the history for a part of the answer.
    prefix = "" if len(prefix) == len(rendered) else prefix
    plan = AnswerPlan(format=answer, tools=tools, prefix=prefix, shows_reasoning=shows_reasoning)
    try:
        if not plan.reader().is_calling:
            return plan
    except (ValueError, KeyError, RecursionError):
        pass  # a call of which the parser can make nothing
    raise InvalidRequestError(
        "The last message ends in the middle of a call, or holds a broken one. Leave the call to the model.",
        param="messages",
    )


def joined_calls(pieces: Sequence[CallPiece]) -> tuple[CallPiece, ...]:
    """Pieces of calls with those of one call as one, in the order of the calls."""
    calls: dict[int, CallPiece] = {}
    for piece in pieces:
        known = calls.get(piece.index)
        calls[piece.index] = replace(known, arguments=known.arguments + piece.arguments) if known else piece
    return tuple(calls.values())


class AnswerReader:
    """Reads one answer, fed in pieces of any size.

    White space around reasoning and calls is not part of the content. Text that should be a call and is none, or calls
    what was not offered, stays content.

    Args:
        plan: How.
    """

    def __init__(self, plan: AnswerPlan) -> None:
        from weft.server.tools.parser import AnswerParser

        self._plan = plan
        self._names = {tool.function.name for tool in plan.tools}
        template = plan.format.compiled(with_calls=bool(plan.tools))
        self._parser = AnswerParser(template, prefix=plan.prefix, tools=plan.typed_tools)
        self._strings = plan.format.calls or {}
        head = self._strings.get("head")
        self._head = None if head is None or not plan.tools else re.compile(head)
        self._region: str | None = None
        self._mark = self._body = ""
        """What opened the call, and its text."""
        self._arguments: _JsonText | None = None
        """Those that are being read: the parser does not see them, so no mark ends them."""
        self._has_name = False
        """Whether the open call was handed out."""
        self._has_text = {"content": False, "reasoning": False}
        self._has_marker = self._has_failed = self._is_broken = False
        self._reset()
        for event in self._parser.initial_events:
            self._take(event)
        self._reset()
        # The parser gives this out later, if it is no mark.
        self._num_known = len(self._parser.text_from(self._parser.place))

    def _reset(self) -> None:
        """Forget what was read, but not where it led to."""
        self.num_calls = self._num_known = 0
        self._held = {"content": "", "reasoning": ""}  # white space, part of the text only if more text follows
        self._now = Reading()

    @property
    def thinks(self) -> bool | None:
        """Before the first text: whether reasoning has begun; None where the model may begin it."""
        if self.is_reasoning or not self._plan.format.has_reasoning:
            return self.is_reasoning
        return False if self._has_marker else None

    @property
    def is_reasoning(self) -> bool:
        """Whether the text is in the middle of reasoning."""
        return self._region in REASONING_FIELDS

    @property
    def is_text(self) -> bool:
        """Whether the text is in the middle of neither reasoning nor a call."""
        return self._region in (None, "content")

    @property
    def is_calling(self) -> bool:
        """Whether the text is in the middle of a call."""
        return self._region == CALLS_FIELD

    def read(self, text: str, ends: Sequence[int]) -> tuple[Reading, int]:
        """Take the text of some tokens.

        Args:
            text: What the tokens add.
            ends: Where in it the text of each token ends.

        Returns:
            What is certain with it, and how many of the tokens are reasoning.
        """
        self._now = Reading()
        num_reasoning = start = 0
        for end in [*ends[:-1], len(text)]:
            was_reasoning = self.is_reasoning
            self._push(text[start:end])
            num_reasoning += bool(ends) and (was_reasoning or self.is_reasoning)
            start = max(start, end)
        return self._now, num_reasoning

    def _push(self, text: str) -> None:
        while text and not self._has_failed:
            if self._arguments is not None:
                text = self._add_arguments(self._arguments, text)
            elif text[0] == "{" and self._begins_arguments():
                self._arguments = _JsonText()
            else:  # up to a brace, which may begin arguments
                end = text.find("{", 1) if self._head is not None else -1
                piece, text = (text[:end], text[end:]) if end > 0 else (text, "")
                self._follow(partial(self._parser.feed, piece))
        if text:
            self._text("content", text)

    def _follow(self, step: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Let the parser go on; where it cannot, all from the open call on is content."""
        start = self._parser.opened_at if self.is_calling else self._parser.place
        try:
            events = step()
        except (ValueError, KeyError, RecursionError):
            self._has_failed, self._region = True, None
            self._text("content", self._parser.text_from(start)[self._num_known :])
        else:
            for event in events:
                self._take(event)

    def close(self, reading: Reading, *, is_cut: bool) -> bool:
        """Add the rest, when no more text comes; returns whether a call was cut, or its arguments are no JSON.

        Args:
            reading: What it is added to.
            is_cut: Whether the answer was ended from outside: by its length or a stop.
        """
        self._now = reading
        # Of tags the parser takes what is there.
        is_cut = is_cut or self._plan.format.template["fields"].get(CALLS_FIELD, {}).get("content") == "xml-inline"
        if self._arguments is not None or (is_cut and self.is_calling):
            return True
        if not self._has_failed:
            self._follow(lambda: self._parser.finalize()[1])
        if not self.num_calls:
            self._now.content += self._held["content"]
        return self._is_broken

    def _take(self, event: Mapping[str, Any]) -> None:
        kind, name = event["type"], event["field"]
        if kind == "region_open":
            self._region = name
            if name == CALLS_FIELD or name in REASONING_FIELDS:
                self._has_marker, self._num_known = True, 0
            if name == CALLS_FIELD:
                self._mark, self._body, self._has_name = event["mark"], "", False
        elif kind == "region_close":
            self._region = None
            if name == CALLS_FIELD:
                self._close_call(event["value"])
            elif name in REASONING_FIELDS:
                self._held["reasoning"] = ""
        elif name == CALLS_FIELD:
            self._body += event["text"]
        else:
            text, known = event["text"], self._num_known
            self._num_known = max(known - len(text), 0)
            self._text("reasoning" if name in REASONING_FIELDS else "content", text[known:])

    def _text(self, kind: str, text: str) -> None:
        text = self._held[kind] + text
        if not self._has_text[kind] and self._has_marker:
            text = text.lstrip()
        shown = text[: max(len(text.rstrip()), len(text) - MAX_HELD)]
        self._held[kind] = text[len(shown) :]
        self._has_text[kind] = self._has_text[kind] or bool(shown)
        setattr(self._now, kind, getattr(self._now, kind) + shown)

    def _begins_arguments(self) -> bool:
        """Whether a brace that comes now begins the arguments of a call; its name is handed out then."""
        if self._head is None or not self.is_calling or self._has_name or len(self._body) > MAX_HEAD:
            return False
        head = self._head.match(self._body + "{")
        self._has_name = head is not None and head.end() == len(self._body) and head["name"] in self._names
        if head is not None and self._has_name:
            self._add(head["name"])
        return self._has_name

    def _add_arguments(self, arguments: _JsonText, text: str) -> str:
        """Hand out what of a text are arguments; returns what follows them."""
        piece = arguments.take(text)
        self._now.calls.append(CallPiece(index=self.num_calls - 1, arguments=piece))
        if not arguments.depth:
            self._arguments = None
            self._is_broken = self._is_broken or not arguments.is_valid
        return text[len(piece) :]

    def _close_call(self, value: object) -> None:
        if self._has_name:
            return
        calls = _calls(value) if self._is_whole() else None
        if calls is None or any(name not in self._names for name, _ in calls):
            self._text("content", (self._mark + self._body).strip())
            return
        for name, arguments in calls:
            self._add(name, arguments)

    def _is_whole(self) -> bool:
        """Whether tags leave nothing of the call but its end."""
        if "left" not in self._strings:
            return True
        tag = self._plan.format.template["fields"][CALLS_FIELD]["content_args"]["tag_pattern"]
        return bool(re.sub(tag, "", self._body, flags=re.DOTALL).strip() == self._strings["left"])

    def _add(self, name: str, arguments: str = "") -> None:
        self._now.calls.append(CallPiece(index=self.num_calls, id=_call_id(self._plan), name=name, arguments=arguments))
        self.num_calls += 1


class _JsonText:
    """A JSON object or list, which comes in pieces."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self.depth = 0
        """Brackets that are open; 0 at the end."""
        self._is_string = self._is_escaped = False

    def take(self, text: str) -> str:
        """What of a text is a part of it."""
        end = len(text)
        for place, letter in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif letter == '"':
                self._is_string = not self._is_string
            elif self._is_string:
                self._is_escaped = letter == "\\"
            elif letter in "{[":
                self.depth += 1
            elif letter in "}]":
                self.depth -= 1
                if not self.depth:
                    end = place + 1
                    break
        self._pieces.append(text[:end])
        return text[:end]

    @property
    def is_valid(self) -> bool:
        try:
            json.loads("".join(self._pieces))
        except (ValueError, RecursionError):
            return False
        return True


def _call_id(plan: AnswerPlan) -> str:
    length = (plan.format.calls or {}).get("id_length")
    letters = "".join(secrets.choice(_ID_LETTERS) for _ in range(length or 24))
    return letters if length else f"call_{letters}"


def _calls(value: object) -> list[tuple[str, str]] | None:
    """Names and arguments of what the parser made of a region: one call, a list of them, or Python's syntax."""
    if isinstance(value, str):
        return _python_calls(value)
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return None
        name, arguments = function.get("name"), function.get("arguments", function.get("parameters"))
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        try:
            calls.append((name, _dumps(arguments)))
        except RecursionError:
            return None
    return calls


def _dumps(arguments: Mapping[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(arguments)  # a lone surrogate cannot be sent as it is


_PYTHON_NAMES = {"true": True, "false": False, "null": None}


def _python_calls(text: str) -> list[tuple[str, str]] | None:
    """Calls as Python writes them: `f(a=1), g()`, in brackets, or one a line."""

    def value(node: ast.expr) -> Any:  # noqa: ANN401 - any JSON
        match node:
            case ast.Name(id=name) if name in _PYTHON_NAMES:
                return _PYTHON_NAMES[name]
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [value(part) for part in parts]
            case ast.Dict(keys=keys, values=values):
                return {ast.literal_eval(key): value(part) for key, part in zip(keys, values, strict=True) if key}
        return ast.literal_eval(node)

    calls = []
    try:
        for statement in ast.parse(text.strip()).body:
            node = statement.value if isinstance(statement, ast.Expr) else None
            for call in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
                if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
                    return None
                arguments = {str(keyword.arg): value(keyword.value) for keyword in call.keywords}
                calls.append((ast.unparse(call.func), _dumps(arguments)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return calls or None
