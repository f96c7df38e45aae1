"""Strict reading of JSON bodies: text that two parsers could read differently is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from manylora import strict_json
from manylora.errors import InvalidRequestError, RequestError, UnsupportedParameterError
from manylora.server.http.bodies import Body
from manylora.server.http.body import Pace, held_body, read_chunks
from manylora.server.http.wrong_value import wrong_value
from manylora.server.process.long_work import LongWork

_ESCAPED_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
BodyT = TypeVar("BodyT", bound=Body)


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyReader:
    """Reads JSON bodies, and parses long ones where they hold nobody up."""

    most_bytes: int
    pace: Pace = field(default_factory=Pace)
    """Slowest pace at which clients may send, files as well."""
    long_work: LongWork = field(default_factory=LongWork)
    """Parses and tokenizes what is long."""

    async def json(self, request: Request, model: type[BodyT]) -> BodyT:
        """Read, parse and validate a body; raises like `json_bytes` and `parsed`."""
        raw = await self.raw(request)
        identity = request.state.identity
        return await self.long_work.run(
            partial(parsed, model, raw), len(raw), identity.tenant_id, identity.tenant_weight
        )

    async def raw(self, request: Request) -> bytes:
        """Read a body whose Content-Type is JSON; raises like `json_bytes`."""
        return await json_bytes(request, self.most_bytes, self.pace)


async def json_bytes(request: Request, limit: int, pace: Pace) -> bytes:
    """Read a body whose Content-Type is JSON.

    Raises:
        RateLimitError, CapacityError: There is no room for it among the bodies in memory.
        InvalidRequestError: Content-Type is something else.
        PayloadTooLargeError: More than `limit` bytes.
        TimeoutExceededError: The client is too slow.
    """
    media_type = (
        request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    )
    if media_type != "application/json":
        raise InvalidRequestError(
            "The body must be JSON: send Content-Type application/json.", code="invalid_json"
        )
    keep = held_body(request).keep
    return b"".join([chunk async for chunk in read_chunks(request, limit, pace, keep=keep)])


def parsed(model: type[BodyT], raw: bytes) -> BodyT:
    """Parse and validate a body.

    Raises:
        InvalidRequestError: Not JSON, ambiguous JSON, or a value that the model refuses; `param` names the field.
        UnsupportedParameterError: A field that the model does not have.
    """
    return validate(model, parse_json(raw, takes_nul=model.takes_nul))


def parse_json(raw: bytes, *, takes_nul: bool = False) -> dict[str, Any]:
    """Parse a JSON object.

    Refused are: anything but one object, what `strict_json.loads` refuses, and NUL characters unless `takes_nul`.

    Raises:
        InvalidRequestError: With code `invalid_json`.
    """
    try:
        body = strict_json.loads(raw)
    except strict_json.DuplicateKeyError as error:
        raise _invalid("The body repeats a key within one object.") from error
    except strict_json.TooDeepError as error:
        raise _invalid(f"The body is {error}.") from error
    except strict_json.JsonRefusedError as error:
        raise _invalid(f"The body is not valid JSON: {error}.") from error
    if not takes_nul and _ESCAPED_NUL.search(raw):
        raise _invalid("A string holds a NUL character.")
    if not isinstance(body, dict):
        raise _invalid("The body must be a JSON object.")
    return body


def validate(model: type[BodyT], body: dict[str, Any]) -> BodyT:
    """Check a parsed body against its model; raises like `parsed`."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _explain(error) from error


@contextmanager
def named(own: Mapping[str, str]) -> Iterator[None]:
    """Let errors about a body name the fields of another one, which it was made of.

    Args:
        own: Names of the other's fields, by patterns of the body's. Of two that fit, the first one counts.
    """
    try:
        yield
    except RequestError as error:
        given = error.param or ""
        for pattern, name in own.items():
            found = re.match(rf"{pattern}(?=\.|$)", given)
            if found:
                error.param = found.expand(name) + given[found.end() :]
                if error.message.startswith(given):
                    error.message = error.param + error.message.removeprefix(given)
                break
        raise


def _explain(error: ValidationError) -> InvalidRequestError | UnsupportedParameterError:
    first = error.errors(include_url=False)[0]
    param = ".".join(str(part) for part in first["loc"] if part != "[key]")[:200]
    if first["type"] == "extra_forbidden":
        return UnsupportedParameterError(f"{param} is not a parameter of this route.", param=param)
    if first["type"] == "missing":
        return InvalidRequestError(
            f"{param} is required.", param=param, code="missing_required_parameter"
        )
    code = "invalid_json" if first["type"] == "invalid_json" else "invalid_value"
    return InvalidRequestError(
        f"{param or 'The body'}: {wrong_value(first)}.", param=param or None, code=code
    )


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, code="invalid_json")
