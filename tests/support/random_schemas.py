"""Random JSON schemas of all kinds that Manylora takes, and a run of many of them through a tiny random model.

Two validators that share nothing with the engine check each answer: jsonschema by exact numbers, and jsonschema-rs for
the formats that answers are held to.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema_rs

from grammar_checks import checked_grammar
from manylora import LLM
from manylora.engine.grammar.json_schema import json_grammar, json_rule
from manylora.engine.grammar.schema_reader import FORMATS
from manylora.engine.sampling_params import SamplingParams
from manylora.errors import InvalidRequestError
from manylora.server.tools.call_grammar import CallGrammar
from manylora.server.tools.schemas import Tool, ToolChoice, ToolFunction
from tool_models import family

Schema = dict[str, Any]
PATTERNS = [
    "^[a-z]{1,4}$",
    "^(ab|cd)+$",
    "[0-9]",
    "^x.?y$",
    r"^\d{3}-\d{2}$",
    r"^\w*$",
    "^$",
    '^[^"x]{1,3}$',
]
UNKNOWN_FORMATS = ["password", "byte", "binary", "path", "uri-reference", "regex", "no such format"]
VALUES: list[Any] = [
    None,
    True,
    0,
    -3,
    2.5,
    "",
    "text",
    'a "quoted" \\ one',
    "é",
    [],
    [1, "a"],
    {},
    {"k": [None]},
]
WIDE = [
    2**53 - 1,
    2**53,
    2**53 + 1,
    10**16 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64 + 1,
    10**19,
    10**30 + 7,
    1e19,
    1e22,
]
VALUES += [*WIDE, -(2**63), -0.0, 1.0, 1e-7, 0.1, {"k": [2**53 + 1]}, [[-(2**64) - 1]]]
MAX_DEPTH = 4
RAW_WORDS = re.compile(
    r"NoExtension|verbose|lexe|llguidance|%json|start:|regex parse|panic|<state>|Expected|\n"
)
"""What no refusal may say."""


def _exact(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent of many digits
        return float(text)


class _Exact(json.JSONDecoder):
    """Reads fractions as they are written."""

    def __init__(self) -> None:
        super().__init__(parse_float=_exact)


_TYPES = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
    "integer",
    lambda _, value: (
        type(value) is int or (isinstance(value, Decimal) and value == value.to_integral_value())
    ),
)
_EXACTLY = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=_TYPES)


def random_schema(seed: int) -> Schema:
    """The schema of a seed."""
    rng = random.Random(seed)
    schema = _schema(rng, 0)
    draw = rng.random()
    if draw < 0.2:
        schema["$defs"] = {"node": _schema(rng, 1), "leaf": _leaf(rng)}
        tree = {
            "type": "object",
            "properties": {"leaf": _ref("leaf"), "node": _ref("node")},
            "required": ["leaf"],
        }
        schema["$defs"]["tree"] = tree | {"additionalProperties": False}
        schema = {
            "type": "array",
            "items": _ref(rng.choice(["node", "leaf", "tree"])),
            "maxItems": 2,
        } | {"$defs": schema["$defs"]}
    elif draw < 0.35:
        schema = _recursive(rng)
    return schema


def _recursive(rng: random.Random) -> Schema:
    """Definitions that lead to each other, some of them without an end.

    None leads back to itself in the same place, where validators would not end.
    """
    names = ["a", "b", "c"][: rng.randint(1, 3)]

    def part(names: Sequence[str] = names) -> Schema:
        return _ref(rng.choice(names)) if names and rng.random() < 0.6 else _leaf(rng)

    def definition(later: Sequence[str]) -> Schema:
        draw = rng.random()
        if draw < 0.4:
            own = {"v": part(), "w": part()}
            required = [name for name in own if rng.random() < 0.4]
            return {
                "type": "object",
                "properties": own,
                "required": required,
                "additionalProperties": False,
            }
        if draw < 0.7:
            return {
                "type": "array",
                "items": part(),
                "minItems": rng.choice([0, 0, 1]),
                "maxItems": 2,
            }
        return {"anyOf": [part(later), part(later)]} if draw < 0.9 else part(later)

    return {
        "$defs": {name: definition(names[index + 1 :]) for index, name in enumerate(names)},
        **_ref(names[0]),
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _schema(rng: random.Random, depth: int) -> Schema:
    draw = rng.random()
    if depth >= MAX_DEPTH or draw < 0.4 - 0.08 * (MAX_DEPTH - depth):
        return _leaf(rng)
    if draw < 0.75:
        return _object(rng, depth)
    if draw < 0.88:
        return _array(rng, depth)
    return {"anyOf": [_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def _leaf(rng: random.Random) -> Schema:
    kind = rng.randrange(8)
    if kind == 0:
        return {
            "type": rng.choice(["boolean", "null", ["integer", "null"], ["string", "boolean"]]),
            "maxLength": 5,
        }
    if kind == 1:
        return {"enum": rng.sample(VALUES, rng.randint(1, 4))}
    if kind == 2:
        return {"const": rng.choice(VALUES)}
    if kind == 3:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 4:
        named = rng.choice(sorted(FORMATS) if rng.random() < 0.7 else UNKNOWN_FORMATS)
        return {"type": "string", "format": named} if rng.random() < 0.9 else {"format": named}
    if kind == 5:
        return {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 9)}
    if rng.random() < 0.4:
        return _wide_range(rng)
    low = rng.randint(-1000, 1000)
    if kind == 6:
        bounds = {
            rng.choice(["minimum", "exclusiveMinimum"]): low,
            rng.choice(["maximum", "exclusiveMaximum"]): low + 50,
        }
        return {
            "type": "integer",
            **dict(rng.sample(sorted(bounds.items()), rng.randint(0, 2))),
        } | ({"multipleOf": rng.choice([2, 3, 10])} if rng.random() < 0.3 else {})
    return {
        "type": "number",
        "minimum": low / 8,
        "exclusiveMaximum": low / 8 + rng.choice([0.5, 3, 1000]),
    }


def _wide_range(rng: random.Random) -> Schema:
    """Numbers with bounds beyond what floats tell apart, and those of int64 and uint64."""
    ends = sorted(rng.choice([-1, 1]) * rng.choice([*WIDE, 0, 5, 1000]) for _ in range(2))
    lower, upper = (
        rng.choice(["minimum", "exclusiveMinimum"]),
        rng.choice(["maximum", "exclusiveMaximum"]),
    )
    bounds = dict(rng.sample(list(zip((lower, upper), ends, strict=True)), rng.randint(1, 2)))
    given: Schema = (
        {"format": rng.choice(["int64", "uint64", "double"])} if rng.random() < 0.3 else {}
    )
    kind = rng.choice(["integer", "integer", "number", ["integer", "null"], ["string", "number"]])
    return {"type": kind, **bounds, **given}


def _array(rng: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "maxItems": rng.randint(1, 4)}
    if rng.random() < 0.7:
        schema["items"] = _schema(rng, depth + 1)
    if rng.random() < 0.3:
        schema["prefixItems"] = [_schema(rng, depth + 1) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.4:
        schema["minItems"] = rng.randint(0, 1)
    return schema


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(
        ["a", "b", "name", "x y", 'q"', "é", "$ref", "x-guidance", "type"], rng.randint(0, 4)
    )
    schema: Schema = {
        "type": "object",
        "properties": {name: _schema(rng, depth + 1) for name in names},
    }
    schema["required"] = [name for name in names if rng.random() < 0.6]
    draw = rng.random()
    if draw < 0.6:
        schema["additionalProperties"] = False
    elif draw < 0.8:
        schema["additionalProperties"] = _leaf(rng)
    if rng.random() < 0.06:
        schema["patternProperties"] = {"^p[0-9]$": _leaf(rng)}
    if rng.random() < 0.1:
        schema["allOf"] = [{"properties": {"all": {"type": "boolean"}}, "required": ["all"]}]
        schema["additionalProperties"] = True
    return schema


def tool_grammar(schema: Schema) -> tuple[str, Schema]:
    """The grammar of one call with these arguments, and the schema that they are held to."""
    tool = Tool(type="function", function=ToolFunction(name="f", parameters=schema, strict=True))
    writer = CallGrammar(format=family("hermes"), special_tokens={}, json_rule=json_rule)
    lark = writer.lark(tools=[tool], choice=ToolChoice(mode="required"), is_parallel=False)
    ((held, _),) = writer.schemas
    return lark, dict(held) if isinstance(held, dict) else {}


def check_answer(schema: Schema, text: str) -> None:
    """Raise an error of a validator if a text is not what a schema describes."""
    exact = json.loads(json.dumps(schema), cls=_Exact)
    _EXACTLY(exact).validate(json.loads(text, cls=_Exact))
    jsonschema_rs.validator_for(_formats_alone(schema), validate_formats=True).validate(
        json.loads(text)
    )


def _formats_alone(schema: Any) -> Any:
    """A schema without the values and bounds of numbers, which jsonschema-rs reads as floats."""
    if isinstance(schema, list):
        return [_formats_alone(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    numbers = {
        "const",
        "enum",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
    }
    kept = {
        name: value
        for name, value in schema.items()
        if name not in numbers or isinstance(value, dict | bool)
    }
    unknown = kept.get("format") in UNKNOWN_FORMATS  # of which it knows some
    return {
        name: _formats_alone(value)
        for name, value in kept.items()
        if not (name == "format" and unknown)
    }


def grammar_of(seed: int, folder: Path) -> tuple[str, Schema, bool]:
    """The grammar of a seed's schema, the schema, and whether answers are calls of a tool; some answers are.

    Raises:
        InvalidRequestError: Nothing can be held to it.
    """
    schema = random_schema(seed)
    if seed % 5 == 0 and schema.get("type") == "object":
        lark, held = tool_grammar(schema)
        return checked_grammar(lark, "schema", folder, parts=[(held, "schema")]).text, held, True
    return (
        checked_grammar(json_grammar(schema), "schema", folder, parts=[(schema, "schema")]).text,
        schema,
        False,
    )


def outcomes_of(llm: LLM, seeds: Sequence[int], max_tokens: int = 120) -> Counter[str]:
    """How the answers to the schemas of these seeds ended.

    Raises:
        AssertionError: One ended by itself and is not what its schema describes, or a refusal speaks of a library.
    """
    outcomes: Counter[str] = Counter()
    grammars, schemas, params = [], [], []
    # Without a hand a random model hardly ever ends a text or a list.
    ends = {
        llm.tokenizer.encode(text, add_special_tokens=False)[-1]: 4.0 for text in ('"', "}", "]")
    }
    for seed in seeds:
        try:
            lark, schema, is_call = grammar_of(seed, llm.tokenizer.folder)
        except InvalidRequestError as error:
            outcomes["refused"] += 1
            if RAW_WORDS.search(error.message) or not str(error.param).startswith(
                ("schema", "tools.0")
            ):
                raise AssertionError(
                    f"seed {seed}: {random_schema(seed)}\n{error.param}: {error.message}"
                ) from error
            continue
        grammars.append(lark)
        schemas.append((seed, schema, is_call))
        params.append(
            SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, logit_bias=ends)
        )
    for (seed, schema, is_call), completion in zip(
        schemas, llm.generate([[1, 2]] * len(params), params, grammar=grammars), strict=True
    ):
        outcomes[str(completion.finish_reason)] += 1
        if completion.finish_reason == "stop":
            outcomes["calls"] += is_call
            text = completion.text
            try:
                if is_call:
                    text = text.partition('"arguments": ')[2].rpartition("}")[0]
                check_answer(schema, text)
            except (ValueError, jsonschema.ValidationError) as error:
                raise AssertionError(
                    f"seed {seed}: {json.dumps(schema)}\n{completion.text}\n{error}"
                ) from error
    return outcomes
