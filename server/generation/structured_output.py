"""Structured output: what the fields that hold an answer to a grammar mean, and the check of that.

An error names the place of what is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from manylora import strict_json
from manylora.engine.grammar.json_schema import json_grammar, json_object_grammar
from manylora.engine.grammar.problems import TOO_COMPLEX, grammar_problem, schema_problem
from manylora.engine.grammar.schema_reader import parts_of
from manylora.engine.grammar.wide_numbers import MAX_GRAMMAR_BYTES
from manylora.engine.request import Grammar
from manylora.errors import InvalidRequestError
from manylora.server.http.bodies import Body
from manylora.server.process.threads import in_thread

if TYPE_CHECKING:
    from manylora.server.sandbox.grammar_checker import GrammarChecker

MAX_TEXT_LENGTH = 256 * 1024
ChoiceText = Annotated[str, Field(min_length=1, max_length=4096)]
Schema = dict[str, Any]
MAX_SEARCHED = 64
"""Parts of a schema that are tried for the place of what is wrong."""
GrammarPart = tuple[object, str]
"""A JSON schema, or a grammar as text, and its place in the body."""


class WantedGrammar(NamedTuple):
    """The grammar that answers are to be held to, not yet checked."""

    lark: str
    param: str
    """Field of the body that asks for it."""
    parts: Sequence[GrammarPart]


class JsonSchemaFormat(Body):
    """A JSON schema with its name."""

    takes_nul = True

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")
    description: str | None = Field(None, max_length=MAX_TEXT_LENGTH)
    """Not shown to the model; say in a message what the answer should be."""
    schema_: Schema | None = Field(None, alias="schema")
    """Without a schema the answer is any object."""
    strict: bool = False
    """The answer is held to the schema in any case."""


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            message = "response_format has a json_schema if its type is json_schema, and only then."
            raise InvalidRequestError(message, param="response_format.json_schema")
        return self

    def wanted(self) -> WantedGrammar | None:
        """The grammar; None for free text."""
        place = "response_format.json_schema.schema"
        schema = self.json_schema.schema_ if self.json_schema is not None else None
        if schema is not None:
            lark = json_grammar(schema, place)
            return WantedGrammar(lark, "response_format", [(schema, place)])
        if self.type == "text":
            return None
        return WantedGrammar(json_object_grammar(), "response_format", [])


class StructuredOutputs(Body):
    """A grammar that the answer is held to, by vLLM's names: one of these fields."""

    takes_nul = True

    json_: Schema | str | None = Field(None, alias="json")
    """A JSON schema, as an object or as text."""
    json_object: bool = False
    """True for any JSON object."""
    regex: str | None = Field(None, min_length=1, max_length=16 * 1024)
    """A regular expression for the whole answer, without look-around and back references."""
    choice: list[ChoiceText] | None = Field(None, min_length=1, max_length=2048)
    """The answer is one of these texts."""
    grammar: str | None = Field(None, min_length=1, max_length=MAX_TEXT_LENGTH)
    """A grammar in Lark, as llguidance reads it, that begins with the rule `start`."""

    @property
    def _given(self) -> list[str]:
        return [name for name, value in self if value not in (None, False)]

    @model_validator(mode="after")
    def _one_of_them(self) -> StructuredOutputs:
        if len(self._given) != 1:
            message = (
                "structured_outputs must have one of json, json_object, regex, choice and grammar."
            )
            raise InvalidRequestError(message, param="structured_outputs")
        return self

    def wanted(self) -> WantedGrammar:
        """The grammar, and the schema or text that it is made of."""
        place = f"structured_outputs.{self._given[0].rstrip('_')}"
        schema: object = None
        if self.json_ is not None:
            schema = _parsed(self.json_)
            lark = json_grammar(schema, place)
        elif self.regex is not None:
            lark = _regex_grammar(self.regex)
        elif self.choice is not None:
            # A name in capitals is a terminal, of which the texts are parts.
            lark = "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, self.choice))
        elif self.grammar is not None:
            lark = _own_grammar(self.grammar)
        else:
            lark = json_object_grammar()
        return WantedGrammar(
            lark, "structured_outputs", [(lark if schema is None else schema, place)]
        )


def _parsed(schema: Schema | str) -> object:
    if not isinstance(schema, str):
        return schema
    try:
        return strict_json.loads(schema[:MAX_TEXT_LENGTH])
    except strict_json.JsonRefusedError as error:
        message = f"structured_outputs.json must be a JSON schema of at most {MAX_TEXT_LENGTH} characters; {error}."
        raise InvalidRequestError(message, param="structured_outputs.json") from error


def _regex_grammar(pattern: str) -> str:
    from llguidance import regex_to_lark

    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        message = "The regex ends in a backslash that escapes nothing. Write two to mean one."
        raise InvalidRequestError(message, param="structured_outputs.regex", code="invalid_grammar")
    return f"start: /{regex_to_lark(pattern)}/"


def _own_grammar(grammar: str) -> str:
    """A client's grammar; schemas go through `json`, where they are checked, and llguidance's JSON is not taken."""
    if "%json" in grammar or grammar.lstrip().startswith("{"):
        message = "structured_outputs.grammar takes Lark without %json. Send a schema as structured_outputs.json."
        raise InvalidRequestError(message, param="structured_outputs.grammar")
    return grammar


async def checked_grammar(
    wanted: WantedGrammar, checker: GrammarChecker, tenant: str = ""
) -> Grammar:
    """Check a grammar in a process with limits.

    Args:
        wanted: The grammar.
        checker: Checker for the model.
        tenant: Id of who sent it.

    Raises:
        InvalidRequestError: It is no grammar, or too large; the error names the part that is wrong.
        CapacityError: It could not be checked.
    """
    lark, param, parts = wanted
    size = len(lark.encode())
    if size > MAX_GRAMMAR_BYTES:
        message = f"{param} makes a grammar of {size} bytes; at most {MAX_GRAMMAR_BYTES} are taken."
        raise InvalidRequestError(message, param=param, code="grammar_too_large")
    grammar = Grammar.of(lark)
    problem = await checker.problem(grammar, tenant)
    if problem is None:
        return grammar
    refusal = await _Search(checker, tenant).refusal(parts)
    if refusal is None:
        place = parts[0][1] if len(parts) == 1 else param
        if "%json" in lark:
            refusal = _refusal(place, schema_problem(problem), is_schema=True)
        else:
            refusal = _refusal(place, grammar_problem(problem, has_lines=False), is_schema=False)
    raise refusal


def _refusal(place: str, reason: str, *, is_schema: bool) -> InvalidRequestError:
    place = place[:200]
    message = f"{place}: no answer can be held to this: {reason}."
    code = "invalid_json_schema" if is_schema else "invalid_grammar"
    return InvalidRequestError(message, param=place, code=code)


@dataclass
class _Search:
    """Looks for the least part of a request that has the problem of the whole."""

    checker: GrammarChecker
    tenant: str
    num_left: int = MAX_SEARCHED

    async def refusal(
        self, parts: Iterable[GrammarPart], root: object = None
    ) -> InvalidRequestError | None:
        """The refusal of the first part that is wrong, as small as it can be told; None if each part alone is right.

        Args:
            parts: The parts.
            root: The schema in which they are; None if each is one by itself.
        """
        for part, place in parts:
            if isinstance(part, str):
                problem = await self._problem(part)
                if problem is not None:
                    reason = grammar_problem(problem, has_lines=place.endswith(".grammar"))
                    return _refusal(place, reason, is_schema=False)
            elif (fault := await self._fault(part, root or part, place)) is not None:
                inner = await self.refusal(_parts(part, place), root or part)
                return inner or _refusal(place, fault, is_schema=True)
        return None

    async def _problem(self, lark: str) -> str | None:
        return await self.checker.problem(Grammar.of(lark), self.tenant)

    async def _fault(self, schema: object, root: object, path: str) -> str | None:
        """The fault of a part of a schema; None also if the part cannot be judged without the whole."""
        self.num_left -= 1
        if self.num_left < 0 or not isinstance(schema, dict) or not isinstance(root, dict):
            return None
        shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
        try:
            lark = await in_thread(json_grammar, {**schema, **shared}, path)
        except InvalidRequestError:
            return None
        problem = await self._problem(lark)
        fault = None if problem is None else schema_problem(problem)
        if fault == TOO_COMPLEX:
            self.num_left = 0  # which takes its time
        return fault


def _parts(schema: object, path: str) -> Iterator[GrammarPart]:
    """The keyword with a regular expression first, then the schemas within one."""
    if isinstance(schema, dict):
        if "pattern" in schema and len(schema) > 1:
            yield {"pattern": schema["pattern"]}, f"{path}.pattern"
        for place, each in parts_of(schema):
            yield each, ".".join((path, *place))
