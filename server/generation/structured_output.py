"""Fields that hold an answer to a schema, a pattern or a grammar, and the grammar that they mean."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from manylora import strict_json
from manylora.engine.grammar.json_schema import json_grammar, json_object_grammar
from manylora.errors import InvalidRequestError
from manylora.server.generation.grammar import GrammarPart
from manylora.server.http.bodies import Body

MAX_TEXT_LENGTH = 256 * 1024
ChoiceText = Annotated[str, Field(min_length=1, max_length=4096)]
Schema = dict[str, Any]


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

    def rule(self) -> str | None:
        """The grammar's rule; None for free text."""
        schema = self.json_schema.schema_ if self.json_schema is not None else None
        if schema is not None:
            return json_grammar(schema, "response_format.json_schema.schema")
        return None if self.type == "text" else json_object_grammar()


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

    @model_validator(mode="after")
    def _one_of_them(self) -> StructuredOutputs:
        given = [name for name, value in self if value not in (None, False)]
        if len(given) != 1:
            message = (
                "structured_outputs must have one of json, json_object, regex, choice and grammar."
            )
            raise InvalidRequestError(message, param="structured_outputs")
        return self

    def rule(self) -> str:
        """The grammar."""
        if self.json_ is not None:
            return json_grammar(self.json_schema, "structured_outputs.json")
        if self.regex is not None:
            from llguidance import regex_to_lark

            if (len(self.regex) - len(self.regex.rstrip("\\"))) % 2:
                message = (
                    "The regex ends in a backslash that escapes nothing. Write two to mean one."
                )
                raise InvalidRequestError(
                    message, param="structured_outputs.regex", code="invalid_grammar"
                )
            return f"start: /{regex_to_lark(self.regex)}/"
        if self.choice is not None:
            # A name in capitals is a terminal, of which the texts are parts.
            return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in self.choice)
        return json_object_grammar() if self.grammar is None else _own_grammar(self.grammar)

    @property
    def json_schema(self) -> object:
        """The JSON schema; None if it is something else."""
        return _parsed(self.json_) if self.json_ is not None else None

    @property
    def place(self) -> str:
        """The field of the request."""
        return "structured_outputs." + next(
            name for name, value in self if value not in (None, False)
        ).rstrip("_")


class GrammarFields(Body):
    """Fields that completions and chat share."""

    response_format: ResponseFormat | None = None
    """Hold the answer to JSON, or to a JSON schema."""
    structured_outputs: StructuredOutputs | None = None
    """Hold the answer to a schema, a pattern, one of some texts, or a grammar."""

    @property
    def has_grammar(self) -> bool:
        """True if answers are held to something; reading it belongs in a thread."""
        is_text = self.response_format is None or self.response_format.type == "text"
        return self.structured_outputs is not None or not is_text

    @property
    def has_own_grammar(self) -> bool:
        """True if the grammar is the client's, and holds the whole output."""
        return self.structured_outputs is not None and self.structured_outputs.grammar is not None

    @property
    def grammar_param(self) -> str:
        """The field that asks for it."""
        return "structured_outputs" if self.structured_outputs is not None else "response_format"

    def grammar_parts(self) -> list[GrammarPart]:
        """Schemas, patterns and grammars that the client sent, each with its place."""
        if self.structured_outputs is not None:
            schema = self.structured_outputs.json_schema
            return [
                (
                    self.structured_outputs.rule() if schema is None else schema,
                    self.structured_outputs.place,
                )
            ]
        form = self.response_format
        schema = (
            form.json_schema.schema_ if form is not None and form.json_schema is not None else None
        )
        return [] if schema is None else [(schema, "response_format.json_schema.schema")]

    def grammar_rule(self) -> str | None:
        """The grammar that answers are held to, with the rule `start`; None if they are free.

        Raises:
            InvalidRequestError: A schema is wrong.
        """
        if self.structured_outputs is not None:
            return self.structured_outputs.rule()
        return self.response_format.rule() if self.response_format is not None else None

    def check_grammar(self, *, use_beam_search: bool, ignore_eos: bool) -> None:
        """Refuse what cannot be used together with a grammar.

        Raises:
            InvalidRequestError: Something was.
        """
        is_text = self.response_format is None or self.response_format.type == "text"
        others = {
            "response_format": self.structured_outputs is not None and not is_text,
            "use_beam_search": use_beam_search,
            "ignore_eos": ignore_eos,
        }
        for name, is_there in others.items() if self.has_grammar else ():
            if is_there:
                raise InvalidRequestError(
                    f"{name} cannot be used with {self.grammar_param}.", param=name
                )


def _parsed(schema: Schema | str) -> object:
    if not isinstance(schema, str):
        return schema
    try:
        return strict_json.loads(schema[:MAX_TEXT_LENGTH])
    except strict_json.JsonRefusedError as error:
        message = f"structured_outputs.json must be a JSON schema of at most {MAX_TEXT_LENGTH} characters; {error}."
        raise InvalidRequestError(message, param="structured_outputs.json") from error


def _own_grammar(grammar: str) -> str:
    """A client's grammar; schemas go through `json`, where they are checked, and llguidance's JSON is not taken."""
    if "%json" in grammar or grammar.lstrip().startswith("{"):
        message = "structured_outputs.grammar takes Lark without %json. Send a schema as structured_outputs.json."
        raise InvalidRequestError(message, param="structured_outputs.grammar")
    return grammar
