"""Random JSON schemas of all kinds that Manylora takes, and a run of many of them through a tiny random model.

Run as a script, `python -P tests/support/random_schemas.py 10000`, it holds so many answers to as many schemas.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema

from manylora import LLM
from manylora.engine.grammar.json_schema import json_grammar
from manylora.engine.sampling_params import SamplingParams
from manylora.errors import InvalidRequestError
from manylora.server.generation.grammar import checked_grammar
from tiny_models import make_model

Schema = dict[str, Any]
PATTERNS = ["^[a-z]{1,4}$", "^(ab|cd)+$", "[0-9]", "^x.?y$", r"^\d{3}-\d{2}$", r"^\w*$", "^$"]
FORMATS = ["date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname", "uri", "duration"]
VALUES = [None, True, 0, -3, 2.5, "", "text", 'a "quoted" \\ one', "é", [], [1, "a"], {}, {"k": [None]}]
MAX_DEPTH = 4


def random_schema(seed: int) -> Schema:
    """The schema of a seed."""
    rng = random.Random(seed)
    schema = _schema(rng, 0)
    if rng.random() < 0.2:
        schema["$defs"] = {"node": _schema(rng, 1), "leaf": _leaf(rng)}
        tree = {"type": "object", "properties": {"leaf": _ref("leaf"), "node": _ref("node")}, "required": ["leaf"]}
        schema["$defs"]["tree"] = tree | {"additionalProperties": False}
        schema = {"type": "array", "items": _ref(rng.choice(["node", "leaf", "tree"])), "maxItems": 2} | {
            "$defs": schema["$defs"]
        }
    return schema


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
        return {"type": rng.choice(["boolean", "null", ["integer", "null"], ["string", "boolean"]]), "maxLength": 5}
    if kind == 1:
        return {"enum": rng.sample(VALUES, rng.randint(1, 4))}
    if kind == 2:
        return {"const": rng.choice(VALUES)}
    if kind == 3:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 4:
        return {"type": "string", "format": rng.choice(FORMATS)}
    if kind == 5:
        return {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 9)}
    low = rng.randint(-1000, 1000)
    if kind == 6:
        bounds = {
            rng.choice(["minimum", "exclusiveMinimum"]): low,
            rng.choice(["maximum", "exclusiveMaximum"]): low + 50,
        }
        return {"type": "integer", **dict(rng.sample(sorted(bounds.items()), rng.randint(0, 2)))} | (
            {"multipleOf": rng.choice([2, 3, 10])} if rng.random() < 0.3 else {}
        )
    return {"type": "number", "minimum": low / 8, "exclusiveMaximum": low / 8 + rng.choice([0.5, 3, 1000])}


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
    names = rng.sample(["a", "b", "name", "x y", 'q"', "é", "$ref", "x-guidance", "type"], rng.randint(0, 4))
    schema: Schema = {"type": "object", "properties": {name: _schema(rng, depth + 1) for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.6]
    draw = rng.random()
    if draw < 0.6:
        schema["additionalProperties"] = False
    elif draw < 0.8:
        schema["additionalProperties"] = _leaf(rng)
    if rng.random() < 0.1:
        schema["patternProperties"] = {"^p[0-9]$": _leaf(rng)}
    if rng.random() < 0.1:
        schema["allOf"] = [{"properties": {"all": {"type": "boolean"}}, "required": ["all"]}]
        schema["additionalProperties"] = True
    return schema


def outcomes_of(llm: LLM, seeds: Sequence[int], max_tokens: int = 120) -> Counter[str]:
    """How the answers to the schemas of these seeds ended.

    Raises:
        AssertionError: One ended by itself and is not what its schema describes.
    """
    outcomes: Counter[str] = Counter()
    grammars, schemas, params = [], [], []
    # Without a hand a random model hardly ever ends a text or a list.
    ends = {llm.tokenizer.encode(text, add_special_tokens=False)[-1]: 4.0 for text in ('"', "}", "]")}
    for seed in seeds:
        schema = random_schema(seed)
        try:
            grammars.append(checked_grammar(json_grammar(schema), "schema", llm.tokenizer.folder).text)
        except InvalidRequestError:
            outcomes["refused"] += 1
            continue
        schemas.append((seed, schema))
        params.append(SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, logit_bias=ends))
    for (seed, schema), completion in zip(
        schemas, llm.generate([[1, 2]] * len(params), params, grammar=grammars), strict=True
    ):
        outcomes[str(completion.finish_reason)] += 1
        if completion.finish_reason == "stop":
            try:
                jsonschema.Draft202012Validator(schema).validate(json.loads(completion.text))
            except (ValueError, jsonschema.ValidationError) as error:
                raise AssertionError(f"seed {seed}: {json.dumps(schema)}\n{completion.text}\n{error}") from error
    return outcomes


def main() -> None:
    """Run as many schemas as the command line says, 500 at a time."""
    count, total = int(sys.argv[1]), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        with LLM(model, device="cpu", dtype="float32", memory_gib=0.05, host_gib=0.05, max_waiting=1000) as llm:
            for start in range(0, count, 500):
                total += outcomes_of(llm, range(start, min(start + 500, count)))
                print(sum(total.values()), dict(total), flush=True)


if __name__ == "__main__":
    main()
