"""What clients are told of their mistakes is in our words, on every route: no library's, no repr, and typed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from api_adapters import upload
from api_server import Api
from route_table import ENDLESS, TABLE, filled

pytestmark = pytest.mark.anyio
RAW = re.compile(
    r"Input should|should be a valid|value_error|\btype=|<class|<function|Traceback|object at 0x|msgspec|orjson"
    r"|pydantic|jinja|sqlalchemy|sqlite|safetensors_rust|HeaderTooLarge|Errno|\b[A-Z]\w+(Error|Exception)\b|NoneType|\bNone\b"
    r"|\bTrue\b|\bFalse\b|function-|(list|dict|tuple|set)\[|constrained-|tagged-union|literal\[|codec|starlette|fastapi"
    r"|llguidance|uvicorn|_parsing|_type\b|\bctx\b|\binstance\b|unhashable|positional|attribute"
)
"""Words of libraries and of Python."""
BODIES = (
    *(
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"5",
        b"\xff\xfe",
        b"{}",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": "\\ud800"}',
    ),
    *(
        b'{"a": 1, "a": 2}',
        b"[" * 5000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"\\u0000": 1}',
        b"{'a': 1}",
        b'{"a": 1} x',
    ),
)
TYPES = (
    "text/plain",
    "multipart/form-data",
    "multipart/form-data; boundary=",
    "application/x-www-form-urlencoded",
    "?",
)
VALUES: tuple[Any, ...] = (5, -1.5, 10**30, "", "x\n\u2028", True, [], [None], [[{}]], {}, {"a": 1})
QUERIES = ("", "x", "-1", "1e999", "9" * 30, "2026-13-45", "\x00", "a,b", "\u20ac")
HEADERS = (
    *(
        {"content-encoding": "gzip"},
        {"x-manylora-ttft-ms": "soon"},
        {"x-slo-ttft-ms": "-1"},
        {"idempotency-key": b"\xff"},
    ),
    *(
        {"idempotency-key": "x" * 300},
        {"content-range": "bytes 5-1/x"},
        {"digest": "x"},
        {"if-match": "*"},
    ),
)
USER = {"role": "user", "content": "x"}
Sent = tuple[str, str, dict[str, Any]]
"""Method, path and the rest of a request."""
FOR_ADMINS = tuple(
    {path.partition("/{")[0] for (_, path), (who, _) in TABLE.items() if who == "admin"}
)


def wrong_requests(api: Api) -> Iterator[Sent]:
    """Requests that are wrong in one thing; of every route."""
    page = api.app.openapi()
    for (method, path), (_, good) in TABLE.items():
        if path == ENDLESS:
            continue
        operation, where = page["paths"][path][method.lower()], filled(path)
        for place in wrong_paths(path):
            yield method, place, {"json": good}
        for rest in (
            *wrong_heads(operation),
            *(wrong_bodies() if method not in ("GET", "DELETE") else ()),
        ):
            yield method, where, {"json": good, **rest} if "content" not in rest else rest
        for body in wrong_fields(properties(page, operation), good or {}):
            yield method, where, {"json": body}


def wrong_paths(path: str) -> Iterator[str]:
    for name in re.findall(r"\{(\w+)\}", path):
        for value in ("\x00", "..", "x" * 300, "a b", "\u20ac"):
            yield filled(path.replace(f"{{{name}}}", quote(value, safe="")))


def wrong_heads(operation: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "query":
            yield from ({"params": {parameter["name"]: value}} for value in QUERIES)
    yield {"params": {"unknown": "1"}}
    yield from ({"headers": headers} for headers in HEADERS)


def wrong_bodies() -> Iterator[dict[str, Any]]:
    yield from (
        {"content": body, "headers": {"content-type": "application/json"}} for body in BODIES
    )
    yield from ({"content": b"{}", "headers": {"content-type": kind}} for kind in TYPES)


def wrong_fields(names: list[str], good: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from ({**good, name: value} for name in (*names, "unknown") for value in VALUES)
    yield from ({key: value for key, value in good.items() if key != name} for name in good)
    for value in VALUES if "messages" in good else ():
        calls = {"role": "assistant", "content": None, "tool_calls": [value]}
        turns = (
            {**USER, "role": value},
            {**USER, "content": value},
            {**USER, "content": [value]},
            {**USER, "name": value},
        )
        yield from ({**good, "messages": [turn]} for turn in (*turns, calls))


def properties(page: dict[str, Any], operation: dict[str, Any]) -> list[str]:
    """Fields of the JSON body that an operation takes."""
    schema = (
        operation.get("requestBody", {})
        .get("content", {})
        .get("application/json", {})
        .get("schema", {})
    )
    if "$ref" in schema:
        schema = page["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return list(schema.get("properties", ()))


def faults(answer: httpx.Response) -> Iterator[str]:
    """What is wrong with the answer to a wrong request."""
    if answer.status_code < 400:
        return
    if answer.status_code >= 500:
        yield "a mistake of the client's is no fault of the server's"
    error = answer.json()["error"]
    is_anthropic = answer.json().get("type") == "error"
    if error.keys() - {"findings"} != (
        {"type", "message"} if is_anthropic else {"message", "type", "param", "code"}
    ):
        yield "the error is not typed"
    told = [
        error["message"],
        *(text for each in error.get("findings", ()) for text in (each["message"], each["hint"])),
    ]
    for message in told:
        if found := RAW.search(message):
            yield f"a word of a library: {found[0]}"
        if len(message) > 700 or not message.isprintable():
            yield "too long, or of several lines"
        if not re.search(r"[.?)]$", message) or not re.search(r"\w+ \w+", message):
            yield "no sentence"


async def test_every_refusal_is_in_our_words(api: Api) -> None:
    await upload(await api.tenant("acme"), "mine")
    acme, wrong, count = await api.tenant("acme"), [], 0
    for method, path, rest in wrong_requests(api):
        client = api.admin if path.startswith(FOR_ADMINS) else acme
        answer = await client.request(method, path, **rest)
        count += answer.status_code >= 400
        said = list(faults(answer))
        if said:
            wrong.append(
                (method, path, str(rest)[:200], answer.status_code, answer.text[:400], said)
            )
    assert wrong == []
    assert count > 2000
