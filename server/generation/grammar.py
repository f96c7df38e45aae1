"""Checks of the grammars that answers are to be held to, and errors that name the place of what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from manylora.engine.grammar.json_schema import json_grammar
from manylora.engine.grammar.problems import TOO_COMPLEX, grammar_problem, schema_problem
from manylora.engine.grammar.schema_reader import parts_of
from manylora.engine.grammar.wide_numbers import MAX_GRAMMAR_BYTES
from manylora.engine.request import Grammar
from manylora.errors import InvalidRequestError
from manylora.server.process.threads import in_thread

if TYPE_CHECKING:
    from manylora.server.sandbox.grammar_checker import GrammarChecker

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
    cause = await _Search(checker, tenant).cause(parts)
    if cause is None:
        place = parts[0][1] if len(parts) == 1 else param
        if "%json" in lark:
            cause = _Cause(place, schema_problem(problem), is_schema=True)
        else:
            cause = _Cause(place, grammar_problem(problem, has_lines=False), is_schema=False)
    message = f"{cause.place[:200]}: no answer can be held to this: {cause.reason}."
    code = "invalid_json_schema" if cause.is_schema else "invalid_grammar"
    raise InvalidRequestError(message, param=cause.place[:200], code=code)


class _Cause(NamedTuple):
    """The part of a request that is wrong."""

    place: str
    reason: str
    is_schema: bool


class _Search:
    """Looks for the least part of a request that has the problem of the whole."""

    def __init__(self, checker: GrammarChecker, tenant: str) -> None:
        self._checker = checker
        self._tenant = tenant
        self._num_left = MAX_SEARCHED

    async def cause(self, parts: Sequence[GrammarPart]) -> _Cause | None:
        """The first part that is wrong, as small as it can be told; None if each part alone is right."""
        for part, place in parts:
            if not isinstance(part, str):
                reason = await self._alone(part, part, place)
                if reason is not None:
                    found = _Cause(place, reason, is_schema=True)
                    return await self._within(part, part, place) or found
            elif (problem := await self._problem(part)) is not None:
                reason = grammar_problem(problem, has_lines=place.endswith(".grammar"))
                return _Cause(place, reason, is_schema=False)
        return None

    async def _problem(self, lark: str) -> str | None:
        return await self._checker.problem(Grammar.of(lark), self._tenant)

    async def _within(self, schema: object, root: object, path: str) -> _Cause | None:
        for name, part in _parts(schema):
            place = f"{path}.{name}"
            reason = await self._alone(part, root, place)
            if reason is not None:
                found = _Cause(place, reason, is_schema=True)
                return await self._within(part, root, place) or found
        return None

    async def _alone(self, schema: object, root: object, path: str) -> str | None:
        """The fault of a part of a schema; None also if the part cannot be judged without the whole."""
        self._num_left -= 1
        if self._num_left < 0 or not isinstance(schema, dict) or not isinstance(root, dict):
            return None
        shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
        try:
            lark = await in_thread(json_grammar, {**schema, **shared}, path)
        except InvalidRequestError:
            return None
        problem = await self._problem(lark)
        reason = None if problem is None else schema_problem(problem)
        if reason == TOO_COMPLEX:
            self._num_left = 0  # which takes its time
        return reason


def _parts(schema: object) -> Iterator[tuple[str, Any]]:
    """The keyword with a regular expression first, then the schemas within one."""
    if isinstance(schema, dict):
        yield from (
            (name, {name: schema[name]})
            for name in ("pattern",)
            if name in schema and len(schema) > 1
        )
        yield from ((".".join(place), each) for place, each in parts_of(schema))
