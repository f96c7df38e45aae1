"""Checks of the grammars that answers are to be held to, and errors that name the place of what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from manylora.engine.grammar.json_schema import json_grammar
from manylora.engine.grammar.problems import TOO_COMPLEX, grammar_problem, schema_problem
from manylora.engine.grammar.schema_reader import parts_of
from manylora.engine.grammar.wide_numbers import MAX_GRAMMAR_BYTES
from manylora.engine.request import Grammar
from manylora.errors import InvalidRequestError
from manylora.server.sandbox.grammar_checker import GrammarChecker

MAX_SEARCHED = 64
"""Parts of a schema that are tried for the place of what is wrong."""
Part = tuple[object, str]
"""A JSON schema, or a grammar as text, and its place in the body."""


async def checked_grammar(
    lark: str, param: str, checker: GrammarChecker, tenant: str = "", parts: Sequence[Part] = ()
) -> Grammar:
    """What the engine is to hold an answer to.

    Args:
        lark: A whole grammar with the rule `start`.
        param: What it was made of, for errors.
        checker: Of the model.
        tenant: Who sent it.
        parts: What it was made of, one by one: an error names the one that is wrong.

    Raises:
        InvalidRequestError: It is no grammar, or too large.
        CapacityError: It could not be checked.
    """
    encoded = lark.encode()
    if len(encoded) > MAX_GRAMMAR_BYTES:
        message = f"{param} makes a grammar of {len(encoded)} bytes; at most {MAX_GRAMMAR_BYTES} are taken."
        raise InvalidRequestError(message, param=param, code="grammar_too_large")
    grammar = Grammar.of(lark)
    problem = await checker.problem(grammar, tenant)
    if problem is None:
        return grammar
    is_schema = "%json" in lark
    told = schema_problem(problem) if is_schema else grammar_problem(problem, has_lines=False)
    place, reason, is_schema = await _Search(checker, tenant).cause(parts) or (
        parts[0][1] if len(parts) == 1 else param,
        told,
        is_schema,
    )
    message = f"{place[:200]}: no answer can be held to this: {reason}."
    raise InvalidRequestError(
        message, param=place[:200], code="invalid_json_schema" if is_schema else "invalid_grammar"
    )


class _Search:
    """Looks for the least part of a request that has the problem of the whole."""

    def __init__(self, checker: GrammarChecker, tenant: str) -> None:
        self._checker = checker
        self._tenant = tenant
        self._num_left = MAX_SEARCHED

    async def cause(self, parts: Sequence[Part]) -> tuple[str, str, bool] | None:
        """A place, what is wrong there, and whether it is a schema; None if each part alone is right."""
        for part, place in parts:
            if isinstance(part, str):
                problem = await self._problem(part)
                if problem is not None:
                    return (
                        place,
                        grammar_problem(problem, has_lines=place.endswith(".grammar")),
                        False,
                    )
            elif (found := await self._alone(part, part, place)) is not None:
                return *(await self._within(part, part, place) or (place, found)), True
        return None

    async def _problem(self, lark: str) -> str | None:
        return await self._checker.problem(Grammar.of(lark), self._tenant)

    async def _within(self, schema: object, root: object, path: str) -> tuple[str, str] | None:
        for name, part in _parts(schema):
            place = f"{path}.{name}"
            found = await self._alone(part, root, place)
            if found is not None:
                return await self._within(part, root, place) or (place, found)
        return None

    async def _alone(self, schema: object, root: object, path: str) -> str | None:
        """The fault of a part of a schema; None also if the part cannot be judged without the whole."""
        self._num_left -= 1
        if self._num_left < 0 or not isinstance(schema, dict) or not isinstance(root, dict):
            return None
        shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
        try:
            lark = await asyncio.to_thread(json_grammar, {**schema, **shared}, path)
        except InvalidRequestError:
            return None
        problem = await self._problem(lark)
        told = None if problem is None else schema_problem(problem)
        if told == TOO_COMPLEX:
            self._num_left = 0  # which takes its time
        return told


def _parts(schema: object) -> Iterator[tuple[str, Any]]:
    """The keyword with a regular expression first, then the schemas within one."""
    if isinstance(schema, dict):
        yield from (
            (name, {name: schema[name]})
            for name in ("pattern",)
            if name in schema and len(schema) > 1
        )
        yield from ((".".join(place), each) for place, each in parts_of(schema))
